package conformance

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/cmd"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// readYAML decodes a file of the repository.
func readYAML(t *testing.T, path string, v any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", path))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(data, v); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// TestShippedConfigurations: the configurations of the packages and of the chart are valid.
func TestShippedConfigurations(t *testing.T) {
	texts := map[string]string{}
	for _, path := range []string{"values.yaml", "ci/full.yaml", "ci/picker.yaml"} {
		var values struct{ Config string }
		readYAML(t, "deploy/helm/pdproxy/"+path, &values)
		texts[path] = values.Config
	}
	packaged, err := os.ReadFile("../deploy/packages/config.toml")
	if err != nil {
		t.Fatal(err)
	}
	texts["packages/config.toml"] = string(packaged)
	engines := regexp.MustCompile(`(?m)^#(\S|$)`).ReplaceAll(packaged, []byte("$1"))
	texts["packages/config.toml with its engines"] = string(engines)
	for name, text := range texts {
		c, err := config.Parse([]byte(text))
		if warnings := len(c.Warnings()); err != nil || warnings > 0 && name != "packages/config.toml" || warnings > 1 {
			t.Errorf("%s: %v %v", name, err, c.Warnings()) // only the packaged file may lack engines
		}
		if strings.Contains(name, "engines") && len(c.Engines) != 2 {
			t.Errorf("%s: %d engines", name, len(c.Engines))
		}
	}
}

// TestPackagedFiles: .goreleaser.yaml names files that exist, and ships every unit.
func TestPackagedFiles(t *testing.T) {
	var release struct {
		Archives []struct {
			Files []struct{ Src string }
		}
		NFPMs []struct {
			Contents []struct{ Src, Dst, Type string }
			Scripts  map[string]string
		}
	}
	readYAML(t, ".goreleaser.yaml", &release)
	sources := map[string]string{}
	for _, a := range release.Archives {
		for _, f := range a.Files {
			sources[f.Src] = ""
		}
	}
	for _, p := range release.NFPMs {
		for _, c := range p.Contents {
			sources[c.Src] = c.Dst
			if strings.HasPrefix(c.Dst, "/etc/") != (c.Type == "config|noreplace") {
				t.Errorf("%s has type %q: an upgrade must keep the files of /etc, and only these", c.Dst, c.Type)
			}
		}
		for _, script := range p.Scripts {
			sources[script] = ""
		}
	}
	if len(sources) < 15 {
		t.Fatalf("only %d files are found", len(sources))
	}
	for src := range sources {
		if strings.HasPrefix(src, "build/manual/") { // deploy/manual writes them, and has a test
			continue
		}
		if found, err := filepath.Glob(filepath.Join("..", src)); err != nil || len(found) == 0 {
			t.Errorf("%s does not exist", src)
		}
	}
	units, err := filepath.Glob("../deploy/systemd/*.service")
	if err != nil {
		t.Fatal(err)
	}
	for _, unit := range units {
		if sources["deploy/systemd/"+filepath.Base(unit)] == "" {
			t.Errorf("no package has %s", unit)
		}
	}
}

// TestShippedCommands: units and chart start pdproxy with commands and flags that it has.
func TestShippedCommands(t *testing.T) {
	var lines []string
	for pattern, form := range map[string]string{
		"../deploy/systemd/*.service":                `(?m)^Exec\w+=/usr/bin/pdproxy (.*)$`,
		"../deploy/helm/pdproxy/templates/*.yaml":    `(?m)^ +args: \[(.*)\]$`,
		"../deploy/kubernetes/[^e]*.yaml":            `(?m)^ +args: \[(.*)\]$`,
		"../deploy/release/image/main.go":            `(?m)^\s+Cmd: +\[\]string\{(.*)\},$`,
		"../deploy/packages/*.sh":                    `(?m)^\s*(?:/usr/bin/)?pdproxy (.*)$`,
		"../deploy/packages/config.toml":             `(?m)^# +pdproxy ([^&]*)`,
		"../deploy/helm/pdproxy/templates/NOTES.txt": `(?m)^ +pdproxy (.*)$`,
	} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", pattern, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range regexp.MustCompile(form).FindAllSubmatch(text, -1) {
				lines = append(lines, strings.NewReplacer(",", "", "\"", "").Replace(string(m[1])))
			}
		}
	}
	if len(lines) < 10 {
		t.Fatalf("only %q are found", lines)
	}
	for _, line := range lines {
		words := strings.Fields(line)
		c, rest, err := cmd.Tree().Find(words)
		if err == nil {
			err = c.ParseFlags(rest)
		}
		if err == nil {
			err = c.ValidateArgs(c.Flags().Args())
		}
		if err != nil || !c.Runnable() {
			t.Errorf("pdproxy %s: %v", line, err)
		}
	}
}

// TestReleaseNumber: make release, a development build, the changelog and the installation page
// agree about the number of the release.
func TestReleaseNumber(t *testing.T) {
	number, ok := strings.CutSuffix(cmd.Version, "-dev")
	if !ok {
		t.Fatalf("a development build says %q", cmd.Version)
	}
	for _, tt := range []struct{ file, line string }{
		{"../Makefile", "RELEASE      := " + number},
		{"../CHANGELOG.md", "## " + number},
		{"../docs/install.md", "VERSION=" + number + " OS="},
	} {
		text, err := os.ReadFile(tt.file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains("\n"+string(text), "\n"+tt.line) {
			t.Errorf("%s has no line %q", tt.file, tt.line)
		}
	}
	for goal, version := range map[string]string{"build": cmd.Version, "release": number} {
		out, err := exec.Command("make", "-C", "..", "-n", "--no-print-directory", goal).CombinedOutput()
		if err != nil {
			t.Fatalf("make -n %s: %v\n%s", goal, err, out)
		}
		if want := map[string]string{"build": "cmd.Version=" + version + " ", "release": "--app-version " + version + " "}[goal]; !strings.Contains(string(out), want) {
			t.Errorf("make -n %s has no %q:\n%s", goal, want, out)
		}
	}
}

// TestChartAgrees: the schema of the chart has exactly its values, and the chart the release
// of the program.
func TestChartAgrees(t *testing.T) {
	var chart struct {
		Version    string
		AppVersion string `yaml:"appVersion"`
	}
	readYAML(t, "deploy/helm/pdproxy/Chart.yaml", &chart)
	if chart.Version != cmd.Version || chart.AppVersion != cmd.Version {
		t.Errorf("the chart has release %s of %s, the program %s", chart.Version, chart.AppVersion, cmd.Version)
	}
	var values map[string]any
	readYAML(t, "deploy/helm/pdproxy/values.yaml", &values)
	data, err := os.ReadFile("../deploy/helm/pdproxy/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema objectSchema
	if err := json.Unmarshal(data, &schema); err != nil {
		t.Fatal(err)
	}
	delete(schema.Properties, "global") // Helm sets it in a chart that contains this one
	schema.compare(t, "values", values)
}

// objectSchema is the part of a JSON schema that describes an object.
type objectSchema struct {
	Additional *bool `json:"additionalProperties"`
	Properties map[string]json.RawMessage
}

// compare compares the properties of a schema with the keys of the values, at every depth.
func (o objectSchema) compare(t *testing.T, path string, values map[string]any) {
	t.Helper()
	if o.Additional == nil || *o.Additional {
		t.Errorf("%s may have any key", path)
	}
	want, got := slices.Sorted(maps.Keys(values)), slices.Sorted(maps.Keys(o.Properties))
	if !slices.Equal(want, got) {
		t.Errorf("%s has keys %v, its schema %v", path, want, got)
	}
	for key, value := range values {
		inner, ok := value.(map[string]any)
		var s objectSchema
		if ok && json.Unmarshal(o.Properties[key], &s) == nil && s.Properties != nil {
			s.compare(t, path+"."+key, inner)
		}
	}
}
