package operations

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// foreignExpressions returns the expressions of the dashboard and of the alert rules of the Inference
// Extension, by their place. They are read from its Go module, which conformance/kubernetes/crds pins.
// An alert's threshold is left out.
func foreignExpressions(t *testing.T) map[string]string {
	t.Helper()
	list := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api-inference-extension")
	list.Dir = "../kubernetes/crds"
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	tools := filepath.Join(strings.TrimSpace(string(out)), "tools")
	text, err := os.ReadFile(filepath.Join(tools, "dashboards", "inference_gateway.json"))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	var board any
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	var search func(v any)
	search = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			if expr, ok := v["expr"].(string); ok {
				found["dashboard: "+expr] = strings.ReplaceAll(expr, "$__rate_interval", "10s")
			}
			for _, inner := range v {
				search(inner)
			}
		case []any:
			for _, inner := range v {
				search(inner)
			}
		}
	}
	search(board)
	var rules struct {
		Groups []struct {
			Rules []struct{ Alert, Expr string }
		}
	}
	if text, err = os.ReadFile(filepath.Join(tools, "alerts", "alert.yaml")); err == nil {
		err = yaml.Unmarshal(text, &rules)
	}
	if err != nil {
		t.Fatal(err)
	}
	threshold := regexp.MustCompile(` *> *[0-9.]+$`)
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			found["alert "+r.Alert] = strings.ReplaceAll(threshold.ReplaceAllString(r.Expr, ""), "[5m]", "[10s]")
		}
	}
	if len(found) < 30 {
		t.Fatalf("only %d expressions are found", len(found))
	}
	return found
}

// shownNames returns the rows of the table of docs/howto/grafana.md that have an equal here: names of
// the Extension, and of llm-d. What has none begins with a dash.
func shownNames(t *testing.T) (names []string) {
	t.Helper()
	text, err := os.ReadFile("../../docs/howto/grafana.md")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		if len(cells) != 6 || strings.HasPrefix(strings.TrimSpace(cells[3]), "none") {
			continue
		}
		for _, cell := range cells[1:3] {
			if name := strings.Trim(cell, " `"); strings.HasPrefix(name, "inference_") || strings.HasPrefix(name, "llm_d_") {
				names = append(names, name)
			}
		}
	}
	if len(names) < 30 {
		t.Fatalf("the table has only %d names with an equal: %q", len(names), names)
	}
	return names
}

// TestForeignDashboards: every expression of the dashboard and the alert rules of the Inference Extension
// returns data, except those about the engines' own metrics. Every name of the table in grafana.md that
// has an equal is a series. In a fleet the values are the sums of all workers.
func TestForeignDashboards(t *testing.T) {
	for _, workers := range []int{0, 2} {
		t.Run(fmt.Sprint(workers, " workers"), func(t *testing.T) {
			_, lines := engines(t, "vllm-nixl", map[string][]string{"p0": nil, "d0": nil})
			sections := fmt.Sprintf("names = [\"inference_extension\", \"llm_d\"]\n[epp]\n[limits]\nsaturation_queue_depth = 1000\n[fleet]\nworkers = %d\n%s", workers, lines)
			p := run(t, nil, sections, "")
			p.ready(t)
			s := prometheus(t, p.metrics, "")
			stop := p.load(t, 4, 20)
			defer stop()
			ended := make(chan struct{})
			defer close(ended)
			go func() { // errors: ends with the test
				for {
					select {
					case <-ended:
						return
					default:
					}
					resp, err := http.Post(p.url+"/v1/completions", "application/json", strings.NewReader(`{"model":"unknown","prompt":"x"}`))
					if err == nil {
						resp.Body.Close()
					}
				}
			}()
			for place, expr := range foreignExpressions(t) {
				if strings.Contains(expr, "vllm:") { // a metric of the engines
					continue
				}
				eventually(t, place+" returns data", func() bool { return s.query(t, expr) > 0 })
			}
			for _, name := range shownNames(t) {
				eventually(t, name+" has a series", func() bool { return s.query(t, fmt.Sprintf(`{__name__=~"%s(_count)?"}`, name)) > 0 })
			}
			eventually(t, "the values are equal", func() bool {
				return s.query(t, `sum(rate(inference_objective_request_total{target_model_name="sim"}[5s])) > 0 and sum(inference_objective_request_total) == sum(pdproxy_exchanges_total)`) == 1 &&
					s.query(t, `sum(inference_objective_input_tokens_sum) == sum(pdproxy_prompt_tokens_sum) and sum(llm_d_epp_request_total) == sum(pdproxy_exchanges_total)`) == 1
			})
		})
	}
}
