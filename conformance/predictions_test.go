package conformance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestPredictions: with a policy that uses predictions, the proxy learns the times of its legs,
// and shows the error of the predictions in the metrics. It learns the time of a token from
// streams whose engine reports the tokens.
func TestPredictions(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{
		prefill: 1, decode: 1, workers: 1,
		engine: func(role string, _ int, c *enginesim.Config) { c.PrefillUsPerToken, c.DecodeUsPerToken = 100, 100 },
		config: func(c *config.Config) { c.Policy.Place = "slo_aware" },
	})
	for n := range 40 {
		body := chat(strings.Repeat("word ", 1+n%7*20)+fmt.Sprint(n), 8, true)
		body = strings.TrimSuffix(body, "}") + `,"stream_options":{"include_usage":true}}`
		f.right(f.try(chatPath, body), chatPath, body)
	}
	for _, name := range []string{"prefill", "start", "token"} {
		if v := f.metric("pdproxy_prediction_error_ratio", fmt.Sprintf("time=%q", name)); v <= 0 {
			t.Errorf("no error of the predicted time %s", name)
		}
	}
}
