package conformance

import (
	"fmt"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// A prefill leg generates one token, and engines reject a thinking budget that is not below the
// limit of tokens.
func TestThinkingBudget(t *testing.T) {
	for _, connector := range []string{
		enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMNixlPush, enginesim.ConnectorVLLMStore, enginesim.ConnectorVLLMMoRIIO,
		enginesim.ConnectorVLLMMoRIIORead, enginesim.ConnectorVLLMMooncake, enginesim.ConnectorVLLMP2PTier,
	} {
		t.Run(connector, func(t *testing.T) {
			f := startFleet(t, connector, fleetOptions{})
			for n, thinking := range []string{`{"type":"enabled","budget_tokens":1024}`, `{"budget_tokens":2000, "type" : "enabled"}`, `{"type":"adaptive"}`, `{"type":"disabled"}`, `null`} {
				for _, stream := range []bool{true, false} {
					body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d %t %s"}],"max_tokens":2048,"thinking":%s,"stream":%t}`, n, stream, long, thinking, stream)
					f.right(f.try("/v1/messages", body), "/v1/messages", body)
				}
			}
			body := `{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":100,"thinking":{"type":"enabled","budget_tokens":1024}}`
			if a := f.try("/v1/messages", body); a.status != 400 {
				t.Errorf("a budget above the client's own limit: status %d: %s", a.status, a.body)
			}
		})
	}
}
