package conformance

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

const module = "github.com/pdproxy/pdproxy/"

// mayImport lists the packages of this module that each package may import. A
// name that ends in /... stands for all packages below it.
var mayImport = map[string][]string{
	"abi":                         {},
	"abi/guest":                   {"abi"},
	"abi/host/meter":              {},
	"abi/host":                    {"abi", "abi/host/meter"},
	"plugins/source":              {},
	"plugins/budget":              {},
	"plugins/shared":              {"abi/host"},
	"plugins/build":               {"abi"},
	"plugins/policy":              {"abi", "abi/host", "plugins/budget", "plugins/shared"},
	"plugins/policy/policytest":   {"abi"},
	"plugins/filter":              {"abi", "abi/host", "plugins/budget", "plugins/shared", "proxy/openai"},
	"plugins/trial":               {"abi", "abi/host", "plugins/budget", "plugins/filter", "plugins/policy", "plugins/shared"},
	"plugins":                     {"abi", "abi/host", "plugins/..."},
	"policies":                    {"abi", "policies/..."},
	"policies/...":                {"abi", "policies/candidates", "policies/param", "policies/leastload", "policies/kvaware", "policies/plan"},
	"policies/builtin":            {"abi", "policies/..."},
	"policies/param":              {"abi"},
	"policies/wasm":               {"abi", "abi/guest", "policies/..."},
	"examples/...":                {"abi", "abi/guest"},
	"proxy/balance":               {"proxy/takeover", "proxy/privatedir"},
	"proxy/buffer":                {},
	"proxy/circuit":               {},
	"proxy/config":                {},
	"proxy/config/importer":       {"proxy/config"},
	"proxy/pemfile":               {},
	"proxy/etcd":                  {"proxy/config", "proxy/pemfile"},
	"proxy/models":                {"proxy/config"},
	"proxy/openai":                {},
	"proxy/downstream":            {"proxy/buffer", "proxy/config", "proxy/connector", "proxy/openai", "proxy/upstream"},
	"proxy/inflight":              {},
	"proxy/websocket":             {"proxy/config", "proxy/downstream", "proxy/openai"},
	"proxy/prompt":                {"abi", "proxy/buffer", "proxy/config", "proxy/coordinator", "proxy/engine", "proxy/openai", "proxy/state/...", "proxy/telemetry", "proxy/tokens", "proxy/upstream"},
	"proxy/cleanup":               {"abi", "proxy/buffer", "proxy/connector", "proxy/engine", "proxy/inflight", "proxy/openai", "proxy/telemetry", "proxy/upstream", "proxy/wire"},
	"proxy/retained":              {"abi", "proxy/cleanup", "proxy/connector", "proxy/coordinator/fleet", "proxy/engine", "proxy/openai", "proxy/state/conversation", "proxy/tokens"},
	"proxy/accesslog":             {"proxy/lograte"},
	"proxy/journal":               {"abi", "proxy/accesslog", "proxy/balance", "proxy/connector", "proxy/coordinator", "proxy/engine", "proxy/inflight", "proxy/openai", "proxy/state/conversation", "proxy/telemetry"},
	"proxy/attempt":               {"abi", "proxy/buffer", "proxy/cleanup", "proxy/config", "proxy/connector", "proxy/coordinator", "proxy/coordinator/fleet", "proxy/downstream", "proxy/engine", "proxy/journal", "proxy/openai", "proxy/prompt", "proxy/retained", "proxy/sidecar", "proxy/telemetry", "proxy/upstream", "proxy/circuit"},
	"proxy/exchange":              {"abi", "proxy/admission", "proxy/attempt", "proxy/buffer", "proxy/cleanup", "proxy/config", "proxy/connector", "proxy/coordinator", "proxy/downstream", "proxy/engine", "proxy/journal", "proxy/models", "proxy/openai", "proxy/prompt", "proxy/recording", "proxy/retained", "proxy/sidecar", "proxy/sidecar/extproc", "proxy/telemetry", "proxy/tenant", "proxy/upstream", "proxy/circuit"},
	"proxy/epp":                   {"abi", "proxy/attempt", "proxy/buffer", "proxy/connlimit", "proxy/coordinator", "proxy/downstream", "proxy/engine", "proxy/lograte", "proxy/openai", "proxy/socket"},
	"proxy/recording":             {"proxy/openai", "proxy/state/kvindex"},
	"proxy/sidecar":               {"abi", "proxy/config", "proxy/connector", "proxy/coordinator", "proxy/downstream", "proxy/engine", "proxy/openai", "proxy/pemfile", "proxy/sidecar/extproc", "proxy/upstream"},
	"proxy/sidecar/extproc":       {"proxy/upstream", "proxy/circuit"},
	"proxy/socket":                {},
	"proxy/upstream":              {"proxy/socket"},
	"proxy/state/...":             {"abi"},
	"proxy/telemetry":             {"abi"},
	"proxy/wire":                  {},
	"proxy/engine":                {"abi", "proxy/config", "proxy/lograte", "proxy/state/kvindex", "proxy/state/load", "proxy/state/predict", "proxy/tokens", "proxy/upstream", "proxy/wire", "proxy/circuit"},
	"proxy/engine/discovery":      {"proxy/config", "proxy/connlimit", "proxy/engine", "proxy/engine/registrations", "proxy/etcd", "proxy/httpguard", "proxy/lograte"},
	"proxy/engine/kvevents":       {"proxy/engine/zmtp", "proxy/state/kvindex"},
	"proxy/engine/moriio":         {"proxy/config", "proxy/connlimit", "proxy/engine/registrations", "proxy/engine/zmtp", "proxy/lograte"},
	"proxy/engine/zmtp":           {},
	"proxy/engine/registrations":  {"proxy/privatedir"},
	"proxy/engine/loads":          {"proxy/config", "proxy/engine", "proxy/openai", "proxy/state/load"},
	"proxy/engine/saturation":     {"abi", "proxy/engine"},
	"proxy/tokens":                {"proxy/openai", "proxy/tokens/bpe", "proxy/circuit"},
	"proxy/tokens/bpe":            {},
	"proxy/admintoken":            {"proxy/privatedir"},
	"proxy/connlimit":             {},
	"proxy/httpguard":             {"proxy/lograte"},
	"proxy/lograte":               {},
	"proxy/takeover":              {"proxy/privatedir"},
	"proxy/privatedir":            {},
	"proxy/privatedir/...":        {"proxy/privatedir"},
	"proxy/edge":                  {"proxy/balance", "proxy/config", "proxy/downstream", "proxy/edge/quicshare", "proxy/inflight", "proxy/openai", "proxy/pemfile", "proxy/privatedir"},
	"proxy/edge/quicshare":        {"proxy/takeover", "proxy/privatedir"},
	"proxy/state/conversation":    {"abi", "proxy/state/kvindex", "proxy/wire"},
	"proxy/connector":             {"abi", "proxy/engine", "proxy/openai", "proxy/tokens", "proxy/upstream"},
	"proxy/coordinator":           {"abi", "proxy/engine", "proxy/state/...", "proxy/circuit"},
	"proxy/coordinator/fleet":     {"abi", "proxy/coordinator", "proxy/coordinator/access", "proxy/coordinator/link", "proxy/engine", "proxy/lograte", "proxy/state/...", "proxy/tenant", "proxy/wire"},
	"proxy/coordinator/placetest": {"abi", "policies", "proxy/config", "proxy/coordinator", "proxy/engine", "proxy/state/...", "proxy/tokens", "proxy/upstream"},
	"proxy/coordinator/access":    {"proxy/coordinator/link", "proxy/lograte", "proxy/pemfile"},
	"proxy/coordinator/election":  {"proxy/etcd", "proxy/privatedir"},
	"proxy/coordinator/idstore":   {"proxy/privatedir", "proxy/state/disaggid"},
	"proxy/coordinator/link":      {},
	"proxy/coordinator/replica":   {"proxy/state/conversation"},
	"proxy/coordinator/selectapi": {"abi", "proxy/buffer", "proxy/config", "proxy/connector", "proxy/connlimit", "proxy/coordinator", "proxy/engine", "proxy/httpguard", "proxy/state/..."},
	"proxy/admin":                 {"proxy/admin/dashboard", "proxy/config", "proxy/coordinator", "proxy/coordinator/fleet", "proxy/downstream", "proxy/engine", "proxy/httpguard", "proxy/journal", "proxy/lograte", "proxy/openai", "proxy/sidecar", "proxy/state/indexcheck", "proxy/telemetry", "proxy/circuit"},
	"proxy/admin/dashboard":       {"proxy/telemetry"},
	"proxy/admission":             {"proxy/config", "proxy/downstream", "proxy/openai", "proxy/tenant"},
	"proxy/tenant":                {"proxy/privatedir"},
	"proxy/idtoken":               {"proxy/config", "proxy/openai", "proxy/tenant"},
	"proxy/proxytest":             {},
	"proxy":                       {"abi", "proxy/..."},
	"quickstart":                  {"proxy/config"},
	"cmd/exit":                    {},
	"cmd/node":                    {"abi", "abi/...", "cmd/exit", "plugins", "plugins/...", "policies", "proxy", "proxy/..."},
	"cmd/supervisor":              {"cmd/exit", "cmd/node", "proxy/balance", "proxy/config", "proxy/takeover", "proxy/privatedir"},
	"cmd":                         {"abi", "abi/...", "cmd/exit", "cmd/node", "cmd/supervisor", "plugins", "plugins/...", "internal/enginesim", "internal/loadgen", "internal/replay", "policies", "proxy", "proxy/admintoken", "proxy/config", "proxy/config/importer", "proxy/journal", "proxy/state/conversation", "quickstart", "proxy/admission"},
	"cmd/pdproxy":                 {"cmd"},
	"deploy/manual":               {"cmd"},
	"conformance":                 {},
	"conformance/abi":             {},
	"conformance/policies":        {},
	"conformance/plugins":         {},
	"internal/dev/surface":        {},
	"internal/dev/eppfloor":       {},
	"internal/enginesim":          {}, // so that both sides cannot share one wrong reading of a protocol
	"conformance/kvevents":        {},
	"internal/dev/bench":          {},
	"conformance/deploy":          {},
	"conformance/docs":            {},
	"conformance/discovery":       {},
	"internal/loadgen":            {"internal/plot", "internal/replay"},
	"internal/plot":               {},
	"conformance/fleet":           {},
	"conformance/chaos":           {},
	"internal/dev/coverage":       {},
	"internal/dev/mutation":       {},
	"conformance/scaling":         {},
	"conformance/security":        {},
	"internal/dev/suite":          {},
	"conformance/takeover":        {},
	"internal/dev/testbed":        {"proxy/admintoken"},
	"internal/replay":             {"abi", "internal/plot", "policies/...", "proxy/state/..."},
	"proxy/coordinator/standby":   {"proxy/coordinator", "proxy/coordinator/..."},
}

func TestImportsPointDownwards(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}}|{{.Doc}}|{{join .Imports " "}}`, module+"...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		path, rest, _ := strings.Cut(strings.TrimSpace(line), "|")
		doc, imports, _ := strings.Cut(rest, "|")
		pkg := strings.TrimPrefix(path, module)
		if strings.HasPrefix(pkg, "build/") {
			continue
		}
		allowed, known := rule(pkg)
		if !known {
			t.Errorf("mayImport has no row for package %s", pkg)
		}
		if doc == "" {
			t.Errorf("package %s has no package comment", pkg)
		}
		for _, i := range strings.Fields(imports) {
			if i, ours := strings.CutPrefix(i, module); ours && !matches(allowed, i) {
				t.Errorf("%s imports %s", pkg, i)
			}
		}
	}
}

// rule returns the packages that pkg may import, according to its own row or that of the folder
// above.
func rule(pkg string) ([]string, bool) {
	if allowed, ok := mayImport[pkg]; ok {
		return allowed, true
	}
	for name, allowed := range mayImport {
		if matches([]string{name}, pkg) {
			return allowed, true
		}
	}
	return nil, false
}

func matches(names []string, pkg string) bool {
	for _, name := range names {
		above, all := strings.CutSuffix(name, "/...")
		if name == pkg || all && strings.HasPrefix(pkg, above+"/") {
			return true
		}
	}
	return false
}

// TestUnwatchedPackages: the packages that the Makefile excludes from the race
// detector use no generic code that synchronizes. For such code the detector
// would report races that do not exist.
func TestUnwatchedPackages(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	root := regexp.MustCompile(`(?m)^WAZERO +:= (\S+)$`).FindStringSubmatch(string(makefile))
	names := regexp.MustCompile(`foreach p,([^,]+),-gcflags=\$\(WAZERO\)/\$p=-race=false`).FindStringSubmatch(string(makefile))
	if root == nil || names == nil || strings.Count(string(makefile), "-race=false") != 1 {
		t.Fatal("the Makefile names the packages in another way")
	}
	args := []string{"list", "-f", `{{$dir := .Dir}}{{range .GoFiles}}{{$dir}}/{{.}}{{"\n"}}{{end}}`}
	for _, name := range strings.Fields(names[1]) {
		args = append(args, root[1]+"/"+name)
	}
	out, err := exec.Command("go", args...).Output()
	if err != nil {
		t.Fatal(err)
	}
	files := strings.Fields(string(out))
	if len(files) < 20 {
		t.Errorf("only %d files are found", len(files))
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if used := regexp.MustCompile(`\bsync\.(Map|Once\w*)|"sync/atomic"`).Find(source); used != nil {
			t.Errorf("%s uses %s", file, used)
		}
	}
}
