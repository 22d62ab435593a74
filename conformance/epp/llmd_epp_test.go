package epp

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// eppConfig is the configuration of llm-d's EPP: every request has two legs, and the engines come
// from a file.
const eppConfig = `apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- name: files
  type: file-discovery
  parameters:
    path: %s
- type: queue-scorer
- type: prefill-filter
- type: decode-filter
- type: max-score-picker
- type: always-disagg-pd-decider
- type: disagg-profile-handler
  parameters:
    deciders:
      prefill: always-disagg-pd-decider
schedulingProfiles:
- name: prefill
  plugins:
  - pluginRef: prefill-filter
  - pluginRef: max-score-picker
  - pluginRef: queue-scorer
    weight: 1
- name: decode
  plugins:
  - pluginRef: decode-filter
  - pluginRef: max-score-picker
  - pluginRef: queue-scorer
    weight: 1
dataLayer:
  discovery:
    pluginRef: files
`

// write writes a file of the test and returns its path.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestLLMDEPP: pdproxy is the data plane of llm-d's own EPP. Each request has two legs, on the
// engines that the EPP has chosen, and the text is that of one engine alone. The EPP sees the end
// and the usage of each answer. LLMD_EPP is the path of the built EPP.
func TestLLMDEPP(t *testing.T) {
	if os.Getenv("LLMD_EPP") == "" {
		t.Skip("LLMD_EPP does not name llm-d's EPP: go build ./cmd/epp in a checkout of llm-d-router")
	}
	w := &world{engines: map[string]*process{}, addrs: map[string]string{}}
	list, engines := "endpoints:\n", ""
	for _, role := range []string{"prefill", "decode"} {
		for n := range 2 {
			name := fmt.Sprint(role[:1], n)
			addr := w.engine(t, name, role)
			list += fmt.Sprintf("- name: %s\n  address: \"127.0.0.1\"\n  port: \"%d\"\n  labels:\n    llm-d.ai/role: %s\n", name, portOf(addr), role)
			engines += fmt.Sprintf("[[engine]]\nname = %q\nurl = \"http://%s\"\nrole = %q\nconnector = \"vllm-nixl\"\n", name, addr, role)
		}
	}
	epp, health, metrics := free(t), free(t), free(t)
	start(t, "llm-d-epp", os.Getenv("LLMD_EPP"), "--pool-name=epp", "--config-file="+write(t, "epp.yaml", fmt.Sprintf(eppConfig, write(t, "endpoints.yaml", list))),
		"--grpc-port="+strconv.Itoa(portOf(epp)), "--grpc-health-port="+strconv.Itoa(portOf(health)), "--metrics-port="+strconv.Itoa(portOf(metrics)),
		"--metrics-endpoint-auth=false", "--tracing=false", "--drain-timeout=1s")
	until(t, "llm-d's EPP", func() bool { status, _ := get("http://" + metrics + "/metrics"); return status == 200 })
	public, admin := free(t), free(t)
	w.admin = "http://" + admin
	run(t, "proxy", fmt.Sprintf("server.listen = %q\nadmin.listen = %q\nserver.expose_placement = true\n[sidecar]\npicker = \"ext_procs://%s\"\npicker_insecure_skip_verify = true\npicker_timeout = \"30s\"\n%s",
		public, admin, epp, engines))
	until(t, "the proxy and the picker are ready", func() bool {
		status, _ := get("http://" + public + "/health")
		resp, err := clients["H1"].Post("http://"+public+"/v1/completions", "application/json", strings.NewReader(body("first", 10, 1, false)))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return status == 200 && resp.StatusCode == 200
	})
	alone := "http://" + w.engine(t, "alone", "both")
	before := w.metric(t, "pdproxy_picker_requests_total", `result="picked"`)
	seen := eppRequests(metrics)
	n := 0
	for version, c := range clients {
		for _, size := range []int{500, 200_000} {
			for _, stream := range []bool{false, true} {
				n++
				name := fmt.Sprintf("%s %d %t", version, size, stream)
				want, err := textOf(answer(t, clients["H1"], alone, body(name, size, 8, stream)))
				if err != nil {
					t.Fatal(err)
				}
				resp, text := answer(t, c, "http://"+public, body(name, size, 8, stream))
				if got, err := textOf(resp, text); err != nil || got != want {
					t.Errorf("%s: got %q, %v, want %q", name, got, err, want)
				}
				if p, d := resp.Header.Get("X-Pdproxy-Prefill"), resp.Header.Get("X-Pdproxy-Decode"); p == "" || d == "" {
					t.Errorf("%s: placed on %q and %q", name, p, d)
				}
			}
		}
	}
	if got := w.metric(t, "pdproxy_picker_requests_total", `result="picked"`) - before; got != float64(n) {
		t.Errorf("%v of %d requests were picked", got, n)
	}
	until(t, "the EPP has seen the end of each request", func() bool {
		_, text := get("http://" + metrics + "/metrics")
		return eppRequests(metrics)-seen == n && strings.Contains(text, "\ninference_objective_running_requests{model_name=\"sim\"} 0\n")
	})
	w.idle(t)
	for _, name := range []string{"p0", "p1"} {
		until(t, name+" holds nothing", func() bool { s, alive := w.state(t, name); return alive && s.BlocksPinned == 0 })
	}
}

// eppRequests returns how many answers llm-d's EPP has seen to their end, by its metrics.
func eppRequests(metrics string) (n int) {
	_, text := get("http://" + metrics + "/metrics")
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "llm_d_epp_request_duration_seconds_count{") {
			one, _ := strconv.Atoi(strings.TrimSpace(line[strings.LastIndexByte(line, ' '):])) // 0 fails the comparison
			n += one
		}
	}
	return n
}
