package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/pdproxy/pdproxy/"

// never lists imports that would break a property of the program. A name that ends in /... stands
// for a package and all packages below it, and "..." stands for all packages of the module.
var never = []struct {
	of, except   []string // the packages that the rule is for
	imports, but []string // what they never import
	why          string
}{{
	of: []string{"abi/..."}, imports: []string{"..."}, but: []string{"abi/..."},
	why: "the contract belongs to guests and host alike, and a guest cannot link the proxy",
}, {
	of: []string{"policies/..."}, imports: []string{"..."}, but: []string{"abi", "abi/guest", "policies/..."},
	why: "a policy knows only the facts of the contract, so that each policy can run in a guest",
}, {
	of: []string{"filters/..."}, imports: []string{"..."}, but: []string{"abi", "abi/guest", "filters/..."},
	why: "a built-in filter uses only the functions of proxy-wasm, as any other filter",
}, {
	of: []string{"proxy/state/..."}, imports: []string{"..."}, but: []string{"abi", "proxy/fleetpb", "proxy/state/..."},
	why: "state is computed, replicated and replayed without engines",
}, {
	of: []string{"proxy/config"}, imports: []string{"..."},
	why: "reading a configuration starts nothing",
}, {
	of: []string{"proxy/..."}, except: []string{"proxy", "proxy/proxytest/world"}, imports: []string{"proxy", "proxy/exchange"},
	why: "an exchange calls the packages below; none of them calls an exchange",
}, {
	of: []string{"..."}, except: []string{"proxy/proxytest/world"}, imports: []string{"proxy/proxytest/world"},
	why: "only tests run the proxy with fake engines",
}, {
	of: []string{"proxy/..."}, except: []string{"proxy/coordinator/placetest"},
	imports: []string{"plugins/...", "policies/...", "filters/..."},
	why:     "the proxy calls decisions through the contract, whether they are native or in a guest",
}, {
	of: []string{"..."}, except: []string{"cmd", "conformance/...", "internal/enginesim/..."},
	imports: []string{"internal/enginesim/..."},
	why:     "the simulators serve tests and the commands that start them",
}, {
	of: []string{"internal/enginesim/..."}, imports: []string{"..."}, but: []string{"internal/enginesim/..."},
	why: "proxy and simulators must not share one wrong reading of a protocol",
}, {
	of: []string{"..."}, except: []string{"conformance/...", "internal/dev/..."},
	imports: []string{"conformance/...", "internal/dev/..."},
	why:     "the program contains no tests and no tools of the repository",
}}

// TestImports: no package breaks a rule, and each package has a comment. A new package needs no
// entry.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}}|{{.Doc}}|{{join .Imports " "}}`, strings.TrimSuffix(module, "/")+"/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		path, rest, _ := strings.Cut(strings.TrimSpace(line), "|")
		cut := strings.LastIndexByte(rest, '|')
		doc, imports := rest[:cut], rest[cut+1:]
		pkg := strings.TrimPrefix(path, module)
		if strings.HasPrefix(pkg, "build/") {
			continue
		}
		if doc == "" {
			t.Errorf("package %s has no comment", pkg)
		}
		for _, rule := range never {
			if !matches(rule.of, pkg) || matches(rule.except, pkg) {
				continue
			}
			for i := range strings.FieldsSeq(imports) {
				if i, ours := strings.CutPrefix(i, module); ours && matches(rule.imports, i) && !matches(rule.but, i) {
					t.Errorf("%s imports %s, but %s", pkg, i, rule.why)
				}
			}
		}
	}
}

func matches(names []string, pkg string) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		above, all := strings.CutSuffix(name, "/...")
		return name == "..." || pkg == above || all && strings.HasPrefix(pkg, above+"/")
	})
}

// TestConnectorsDoNoIO: a connector computes the bodies of the legs, and only attempt sends
// bodies. Of the packages that can open something, a connector uses constants and forms of
// addresses.
func TestConnectorsDoNoIO(t *testing.T) {
	files, err := filepath.Glob("../proxy/connector/*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(len(files), err)
	}
	opens := regexp.MustCompile(`"(os|os/.*|io|syscall|net/rpc|net/smtp|crypto/tls|golang\.org/x/.*)"$`)
	harmless := regexp.MustCompile(`\bhttp\.Status|\bnet\.(Join|Split)HostPort\b|\bupstream\.Field\b`)
	uses := regexp.MustCompile(`^[^/]*\b(http|net|upstream)\.[A-Z]\w*`)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(source)) {
			line = strings.TrimRight(line, "\n")
			if opens.MatchString(line) || uses.MatchString(harmless.ReplaceAllString(line, "")) {
				t.Errorf("%s: %s", file, line)
			}
		}
	}
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
	names := regexp.MustCompile(`(?m)^UNWATCHED +:= (.+)$`).FindStringSubmatch(string(makefile))
	if root == nil || names == nil || strings.Count(string(makefile), "-race=false") != 1 {
		t.Fatal("the Makefile names the packages in another way")
	}
	list := exec.Command("go", "list", "-f", `{{$dir := .Dir}}{{range .GoFiles}}{{$dir}}/{{.}}{{"\n"}}{{end}}`)
	list.Args = append(list.Args, strings.Fields(strings.ReplaceAll(names[1], "$(WAZERO)", root[1]))...)
	list.Dir = ".."
	out, err := list.Output()
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
