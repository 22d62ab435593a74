package deploy

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/BurntSushi/toml"
	"go.yaml.in/yaml/v3"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// chart is the folder of the Helm chart.
const chart = recipes + "/helm/pdproxy"

// helmProgram builds the pinned Helm, once for each version.
var helmProgram = sync.OnceValues(func() (string, error) {
	program := "build/release/helm"
	if out, err := exec.Command("make", "-s", "-C", "../..", program).CombinedOutput(); err != nil {
		return "", errors.New(string(out))
	}
	return filepath.Abs("../../" + program)
})

// helm runs a command of Helm, without a cluster. It returns the output without Helm's notes.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	program, err := helmProgram()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cmd := exec.Command(program, args...)
	cmd.Env = append(os.Environ(), "HOME="+dir, "HELM_CACHE_HOME="+dir, "HELM_CONFIG_HOME="+dir, "HELM_DATA_HOME="+dir, "KUBECONFIG=")
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Run(); err != nil {
		return "", errors.New(log.String())
	}
	return out.String(), nil
}

// rendered is a chart with values: its objects by kind and name.
type rendered map[string]map[string]any

// render renders the chart with further arguments of helm template.
func render(t *testing.T, args ...string) rendered {
	t.Helper()
	out, err := helm(t, append([]string{"template", "pdproxy", chart, "--namespace=llm"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	objects := rendered{}
	for d := yaml.NewDecoder(strings.NewReader(out)); ; {
		var o map[string]any
		if err := d.Decode(&o); errors.Is(err, io.EOF) {
			return objects
		} else if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if o != nil {
			objects[o["kind"].(string)+" "+at(o, "metadata", "name").(string)] = o
		}
	}
}

// at returns a member of an object; nil without one.
func at(o any, names ...string) any {
	for _, name := range names {
		m, _ := o.(map[string]any)
		o = m[name]
	}
	return o
}

// config returns the configuration of the pods.
func (r rendered) config() string {
	text, _ := at(r["ConfigMap pdproxy"], "data", "config.toml").(string)
	return text
}

// readmeConfig returns the first configuration of README.md.
func readmeConfig(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```toml\n(.*?)```").FindSubmatch(text)
	if m == nil {
		t.Fatal("README.md has no configuration")
	}
	return string(m[1])
}

// tree decodes TOML.
func tree(t *testing.T, text string) map[string]any {
	t.Helper()
	var m map[string]any
	if err := toml.Unmarshal([]byte(text), &m); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return m
}

// TestChartTakesConfigurations: the chart takes each configuration as it is. Only the addresses and
// the token file of the pods differ.
func TestChartTakesConfigurations(t *testing.T) {
	reference, err := os.ReadFile("../../config.toml")
	if err != nil {
		t.Fatal(err)
	}
	engines := "[[engine]]\nname = \"e\"\nurl = \"http://10.0.0.5:8000\"\nrole = \"both\"\nconnector = \"none\"\n"
	picker := manifestConfig(t, "gateway/picker.yaml", "pdproxy-epp")
	for name, c := range map[string]struct {
		text, server, admin, epp, fleet string
		node                            any // fleet.node_id
	}{
		"the README's":       {text: readmeConfig(t), server: "0.0.0.0:8080", admin: "0.0.0.0:9090", node: int64(-1)},
		"the reference":      {text: string(reference), server: "0.0.0.0:8080", admin: "0.0.0.0:9090", node: int64(0)},
		"the picker's":       {text: picker, server: "0.0.0.0:8080", admin: "0.0.0.0:9090", epp: "0.0.0.0:9002", node: int64(-1)},
		"own ports":          {text: "admin.listen = \"localhost:7001\"\n[server]\nlisten = \"[::1]:7000\"\n" + engines, server: "0.0.0.0:7000", admin: "0.0.0.0:7001", node: int64(-1)},
		"IPv6":               {text: "[server]\nlisten = \"[::]:7000\"\n" + engines, server: "[::]:7000", admin: "0.0.0.0:9090", node: int64(-1)},
		"tables without it":  {text: "[admin]\nallowed_hosts = [\"x\"]\n[server.auth]\nkeys_file = \"keys\"\n[fleet]\npatience = \"3s\"\n" + engines, server: "0.0.0.0:8080", admin: "0.0.0.0:9090", node: int64(-1)},
		"an own token file":  {text: "[admin]\nlisten = \"0.0.0.0:9090\"\ntoken_file = \"other\"\n" + engines, server: "0.0.0.0:8080", admin: "0.0.0.0:9090", node: int64(-1)},
		"workers":            {text: "[fleet]\nworkers = 2\n" + engines, server: "0.0.0.0:8080", admin: "0.0.0.0:9090"},
		"a Lease":            {text: "[fleet]\nworkers = 1\nlisten = \"127.0.0.1:8331\"\ntoken_file = \"token\"\n[fleet.lease]\nname = \"pdproxy\"\n" + engines, server: "0.0.0.0:8080", admin: "0.0.0.0:9090", fleet: "0.0.0.0:8331"},
		"a text of a plugin": {text: engines + "[[plugin]]\nname = \"p\"\npath = \"p.wasm\"\nconfig = \"\"\"\n{\"a\": 1.50,\n\t\"b\": \"\\u00e9{{ x }}\"}\n\"\"\"\n[policy]\nparams = {kv_aware.queue_weight = 1.0, pair_aware.x = 20_000}\n", server: "0.0.0.0:8080", admin: "0.0.0.0:9090", node: int64(-1)},
	} {
		t.Run(name, func(t *testing.T) {
			got := render(t, "--set-file", "config="+write(t, filepath.Join(t.TempDir(), "my.toml"), c.text, 0o644)).config()
			want := tree(t, c.text)
			for _, table := range []string{"server", "admin", "fleet"} {
				if want[table] == nil {
					want[table] = map[string]any{}
				}
			}
			want["server"].(map[string]any)["listen"] = c.server
			maps.Copy(want["admin"].(map[string]any), map[string]any{"listen": c.admin, "token_file": "/etc/pdproxy/admin/token"})
			if c.node != nil {
				want["fleet"].(map[string]any)["node_id"] = c.node
			}
			if c.epp != "" {
				want["epp"].(map[string]any)["listen"] = c.epp
			}
			if c.fleet != "" {
				want["fleet"].(map[string]any)["listen"] = c.fleet
			}
			if result := tree(t, got); !reflect.DeepEqual(result, want) {
				t.Errorf("got\n%v\nwant\n%v", result, want)
			}
			if _, err := config.Parse([]byte(got)); err != nil && name != "a text of a plugin" { // its values are only types
				t.Error(err)
			}
		})
	}
}

// manifestConfig returns the configuration of a ConfigMap in a manifest.
func manifestConfig(t *testing.T, file, name string) string {
	t.Helper()
	for d := yaml.NewDecoder(strings.NewReader(recipe(t, file))); ; {
		var o map[string]any
		if err := d.Decode(&o); err != nil {
			t.Fatalf("%s: no ConfigMap %s: %v", file, name, err)
		}
		if o["kind"] == "ConfigMap" && at(o, "metadata", "name") == name {
			return at(o, "data", "config.toml").(string)
		}
	}
}

// TestChartRefuses: Helm refuses wrong values, and names the value.
func TestChartRefuses(t *testing.T) {
	for set, want := range map[string]string{
		"config=[server":                           "config",
		"config=server.listen=8080":                `server.listen is "8080"; it must be HOST:PORT`,
		"config=admin.listen=\"host\"":             `admin.listen is "host"; it must be HOST:PORT`,
		"config=server.drain_timeout=\"1h2m\"":     "server.drain_timeout",
		"replica=3":                                "replica",
		"hpa.enabled=true,keda.enabled=true":       "not both",
		"ingress.enabled=true":                     "ingress/hosts",
		"httpRoute.enabled=true":                   "httpRoute/parentRefs",
		"inferencePool.enabled=true":               "inferencePool/matchLabels",
		"inferencePool={enabled: true}":            "inferencePool",
		"inferencePool.failureMode=open":           "failureMode",
		"dashboards.labels.grafana_dashboard=true": "grafana_dashboard",
	} {
		if out, err := helm(t, "template", "pdproxy", chart, "--set", set); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v\n%s", set, err, out)
		}
	}
	if _, err := helm(t, "template", "pdproxy", chart, "--set", "inferencePool.enabled=true,inferencePool.matchLabels.app=decode"); err == nil || !strings.Contains(err.Error(), "needs epp.listen in config") {
		t.Errorf("a pool without a picker: %v", err)
	}
}

// TestChartSchema: values.schema.json has every value of values.yaml, and no other one.
func TestChartSchema(t *testing.T) {
	var values, schema map[string]any
	if err := yaml.Unmarshal([]byte(recipe(t, "helm/pdproxy/values.yaml")), &values); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(recipe(t, "helm/pdproxy/values.schema.json")), &schema); err != nil {
		t.Fatal(err)
	}
	var compare func(path string, value, schema map[string]any)
	compare = func(path string, value, schema map[string]any) {
		properties, closed := schema["properties"].(map[string]any)
		if !closed { // the keys are the user's
			return
		}
		if schema["additionalProperties"] != false {
			t.Errorf("%s: the schema permits other keys", path)
		}
		keys := slices.Sorted(maps.Keys(value))
		if path == "" {
			keys = append(keys, "global") // Helm adds this value
		}
		if known := slices.Sorted(maps.Keys(properties)); !slices.Equal(slices.Sorted(slices.Values(keys)), known) {
			t.Errorf("%s: the values are %q, the schema has %q", path, keys, known)
		}
		for key, v := range value {
			if table, ok := v.(map[string]any); ok {
				property, _ := properties[key].(map[string]any)
				compare(path+"."+key, table, property)
			}
		}
	}
	compare("", values, schema)
}

// TestChartPackage: the packaged chart has the alerts and the dashboard of this repository, and
// renders them.
func TestChartPackage(t *testing.T) {
	dir := t.TempDir()
	if _, err := helm(t, "package", "-d", dir, chart); err != nil {
		t.Fatal(err)
	}
	archives, err := filepath.Glob(filepath.Join(dir, "*.tgz"))
	if err != nil || len(archives) != 1 {
		t.Fatal(archives, err)
	}
	packed := unpack(t, archives[0])
	for name, source := range map[string]string{"files/alerts.yaml": "prometheus/alerts.yaml", "files/dashboard.json": "grafana/pdproxy.json"} {
		if packed[name] != recipe(t, source) {
			t.Errorf("the %s of the package is not deploy/%s", name, source)
		}
	}
	for name := range packed {
		if strings.HasPrefix(name, "ci/") {
			t.Errorf("the package has %s", name)
		}
	}
	objects := render(t, "--set", "prometheusRule.enabled=true,dashboards.enabled=true,serviceMonitor.enabled=true")
	var alerts map[string]any
	if err := yaml.Unmarshal([]byte(packed["files/alerts.yaml"]), &alerts); err != nil {
		t.Fatal(err)
	}
	if got := objects["PrometheusRule pdproxy"]["spec"]; !reflect.DeepEqual(got, any(alerts)) {
		t.Errorf("the rules are %v", got)
	}
	if got := at(objects["ConfigMap pdproxy-dashboards"], "data", "pdproxy.json"); strings.TrimSpace(got.(string)) != strings.TrimSpace(packed["files/dashboard.json"]) {
		t.Errorf("the dashboard is %v", got)
	}
	// The alerts expect the job pdproxy: the value of this label of the Service.
	label := at(objects["ServiceMonitor pdproxy"], "spec", "jobLabel").(string)
	if got := at(objects["Service pdproxy-admin"], "metadata", "labels", label); got != "pdproxy" {
		t.Errorf("the job is %v", got)
	}
}

// unpack returns the files of a packaged chart by their paths in the chart.
func unpack(t *testing.T, archive string) map[string]string {
	t.Helper()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		text, err := io.ReadAll(r)
		if h == nil || err != nil {
			t.Fatal(err)
		}
		files[strings.TrimPrefix(path.Clean(h.Name), "pdproxy/")] = string(text)
	}
}
