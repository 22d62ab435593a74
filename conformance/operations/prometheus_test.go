package operations

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const deploy = "../../deploy/"

// server is a running Prometheus.
type server struct {
	*process
	url string
}

// prometheus starts Prometheus, which scrapes the target and evaluates the alert rules four
// times a second. labels are labels of the target, such as those that a ServiceMonitor adds, in YAML.
func prometheus(t *testing.T, target, labels string) *server {
	t.Helper()
	dir := t.TempDir()
	text, err := os.ReadFile(deploy + "prometheus/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	rules := regexp.MustCompile(`for: \d+m`).ReplaceAllString(string(text), "for: 1s")
	rules = strings.ReplaceAll(rules, "[5m]", "[10s]")
	config := fmt.Sprintf(`global: {scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 250ms}
rule_files: [rules.yaml]
scrape_configs:
  - job_name: pdproxy
    static_configs: [{targets: [%q], labels: {%s}}]
`, target, labels)
	for name, text := range map[string]string{"rules.yaml": rules, "prometheus.yaml": config} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command("promtool", "check", "config", filepath.Join(dir, "prometheus.yaml")).CombinedOutput(); err != nil {
		t.Fatalf("promtool: %v\n%s", err, out)
	}
	addr := freeAddr(t)
	s := &server{url: "http://" + addr, process: start(t, nil, "prometheus", "--config.file="+filepath.Join(dir, "prometheus.yaml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+addr, "--log.level=warn")}
	eventually(t, "Prometheus is ready", func() bool { status, _ := get(s.url + "/-/ready"); return status == 200 })
	return s
}

// ask returns the data of an answer of Prometheus' API.
func ask[T any](t *testing.T, s *server, path string) (data T) {
	t.Helper()
	_, body := get(s.url + path)
	var answer struct {
		Status, Error string
		Data          T
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil || answer.Status != "success" {
		t.Fatalf("%s: %v %s", path, err, body)
	}
	return answer.Data
}

// firing lists the alerts that fire.
func (s *server) firing(t *testing.T) (names []string) {
	t.Helper()
	list := ask[struct {
		Alerts []struct {
			Labels map[string]string
			State  string
		}
	}](t, s, "/api/v1/alerts")
	for _, a := range list.Alerts {
		if name := a.Labels["alertname"]; a.State == "firing" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// fires waits until the alerts fire.
func (s *server) fires(t *testing.T, tested map[string]bool, names ...string) {
	t.Helper()
	for _, name := range names {
		eventually(t, name+" fires", func() bool { return slices.Contains(s.firing(t), name) })
		tested[name] = true
	}
}

// query evaluates an expression and returns the number of its series.
func (s *server) query(t *testing.T, expr string) int {
	t.Helper()
	return len(ask[struct{ Result []json.RawMessage }](t, s, "/api/v1/query?query="+url.QueryEscape(expr)).Result)
}

// expressions returns every expression of the files for operators, by its place.
func expressions(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	var rules struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	readYAML(t, "prometheus/alerts.yaml", &rules)
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			found["alert "+r.Alert] = r.Expr
		}
	}
	for _, role := range []string{"prefill", "decode"} {
		var object struct {
			Spec struct {
				Triggers []struct{ Metadata map[string]string }
			}
		}
		readYAML(t, "keda/"+role+".yaml", &object)
		for n, trigger := range object.Spec.Triggers {
			found[fmt.Sprintf("ScaledObject %s, trigger %d", role, n)] = strings.ReplaceAll(trigger.Metadata["query"], "MODEL", "sim")
		}
	}
	text, err := os.ReadFile(deploy + "grafana/pdproxy.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	fill := strings.NewReplacer("$__rate_interval", "10s", "$model", ".*")
	for _, p := range dashboard.Panels {
		for n, target := range p.Targets {
			found[fmt.Sprintf("panel %q, query %d", p.Title, n)] = fill.Replace(target.Expr)
		}
	}
	return found
}

func readYAML(t *testing.T, path string, to any) {
	t.Helper()
	text, err := os.ReadFile(deploy + path)
	if err == nil {
		err = yaml.Unmarshal(text, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// alerts lists the names of all alerts.
func alerts(t *testing.T) (names []string) {
	for place := range expressions(t) {
		if name, ok := strings.CutPrefix(place, "alert "); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
