package conformance

import (
	"fmt"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// A decode engine opens the answer of a request whose KV it cannot load, and fails only then. In
// releases with DropLoadErrors it ends such a stream as if it were complete. The proxy repeats
// the request on another decode engine, and the client sees nothing of the failure.
func TestKVLoadFailureBeforeContent(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMNixlPush, enginesim.ConnectorVLLMMooncake, enginesim.ConnectorVLLMStore} {
		for _, drops := range []bool{false, true} {
			t.Run(fmt.Sprint(connector, " drops ", drops), func(t *testing.T) {
				f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 2, engine: func(_ string, _ int, c *enginesim.Config) {
					c.DropLoadErrors = drops
				}, config: func(c *config.Config) { c.Circuit.Failures = 1000; c.Retry.Budget, c.Retry.MinBudget = 1, 1000 }})
				f.decode[0].SetFault("1:load", 0, "")
				for _, a := range apis {
					if a.path == "/generate" {
						continue
					}
					for _, stream := range []bool{true, false} {
						for n := range 3 {
							body := a.body(fmt.Sprintf("%d %t %s", n, stream, long), 9, stream)
							f.right(f.try(a.path, body), a.path, body)
						}
					}
				}
				for n := range 3 {
					for _, stream := range []bool{true, false} {
						body := chat(fmt.Sprintf("%d %t %s", n, stream, long), 9, stream)
						f.right(f.try(chatPath, body), chatPath, body)
						body = fmt.Sprintf(`{"model":"sim","prompt":"%d %t","max_tokens":9,"ignore_eos":true,"echo":true,"stream":%t}`, n, stream, stream)
						f.right(f.try(completionsPath, body), completionsPath, body)
					}
					body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"%d"}],"n":2,"max_tokens":5,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true}}`, n)
					if a := f.try(chatPath, body); a.status != 200 || a.errors > 0 || !a.done {
						t.Errorf("two choices: status %d: %s", a.status, a.body)
					}
				}
				if n := f.metric("pdproxy_leg_errors_total", `phase="decode"`); n == 0 {
					t.Error("no decode leg failed")
				}
				if n := f.metric("pdproxy_broken_streams_total"); n != 0 {
					t.Errorf("%v streams were broken", n)
				}
				f.decode[0].SetFault("", 0, "")
				f.settled()
			})
		}
	}
}
