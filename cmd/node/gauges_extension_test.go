package node

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestPoolSaturation: the gauge has the score of the phase with more work, and without limits it is
// absent.
func TestPoolSaturation(t *testing.T) {
	e := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
		case "/v1/models":
			_, _ = io.WriteString(w, `{"data":[{"id":"sim"}]}`)
		case "/metrics":
			_, _ = io.WriteString(w, "vllm:num_requests_running{engine=\"0\"} 4\nvllm:num_requests_waiting{engine=\"0\"} 10\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.6\n")
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(e.Close)
	scrape := func(depth int) string {
		n := servingNode(t, func(c *config.Config) {
			c.Metrics.Listen, c.Metrics.Names = "127.0.0.1:0", []string{config.MetricNamesLLMD}
			c.Limits.SaturationQueueDepth, c.Limits.SaturationKVUsage = depth, 0.2
			spec := config.DefaultEngine()
			spec.Name, spec.URL, spec.Role, spec.Connector = "e", e.URL, "both", "vllm-nixl"
			c.Engines = append(c.Engines, spec)
		})
		var text string
		testbed.Eventually(t, "the engine has reported its load", func() bool {
			resp, err := http.Get("http://" + n.MetricsAddr().String() + "/metrics")
			if err != nil {
				return false
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			text = string(body)
			return err == nil && strings.Contains(text, `llm_d_epp_average_queue_size{name="pdproxy"} 10`)
		})
		return text
	}
	const series = `llm_d_epp_flow_control_pool_saturation{inference_pool="pdproxy",stage="effective"} `
	if text := scrape(5); !strings.Contains(text, series+"3\n") && !strings.Contains(text, series+"3.0000") && !strings.Contains(text, series+"2.9999") {
		t.Errorf("no saturation of 3 in\n%s", text)
	}
	if strings.Contains(scrape(0), "pool_saturation") {
		t.Error("a saturation without limits")
	}
	http.DefaultClient.CloseIdleConnections()
}
