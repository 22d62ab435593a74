package conformance

import (
	"fmt"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// Engines of every generation of the pull mode's parameters give the right
// text. Blocks that a client leaves between the legs are freed at once, also
// where the engines know a request only by the id that both legs have.
func TestNixlWires(t *testing.T) {
	for wire := enginesim.NixlWireFlat; wire <= enginesim.NixlWireSizes; wire++ {
		t.Run(fmt.Sprint(wire), func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{engine: func(_ string, _ int, c *enginesim.Config) { c.Nixl.Wire = wire }})
			for path, body := range map[string]string{
				chatPath:          chat(long, 9, true),
				"/v1/completions": `{"model":"sim","prompt":"once upon a time","max_tokens":9}`,
			} {
				f.right(f.try(path, body), path, body)
			}
			f.settled()
			for path, body := range map[string]string{
				chatPath:          chat(long+"left", 9, true),
				"/v1/completions": `{"model":"sim","prompt":"and left them","max_tokens":9}`,
			} {
				f.leaveBetweenLegs(path, body)
			}
			for _, p := range f.prefill {
				if s := p.State(); s.LeasesExpired > 0 {
					t.Errorf("prefill: %+v", s)
				}
			}
			f.eventually("two clean-ups are counted", func() bool { return f.metric("pdproxy_kv_cleanups_total", `how="abort_decode"`) == 2 })
		})
	}
}

// Prefill and decode have different widths, both ways. Decode plans its reads
// by the tp_size in prefill's answer, and prefill waits for all of decode's
// ranks.
func TestNixlTPSizes(t *testing.T) {
	for _, sizes := range [][2]int{{1, 4}, {4, 2}} {
		t.Run(fmt.Sprint(sizes), func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{engine: func(role string, _ int, c *enginesim.Config) {
				c.Nixl.TPSize = sizes[0]
				if role == enginesim.RoleDecode {
					c.Nixl.TPSize = sizes[1]
				}
			}})
			for n := range 4 {
				body := chat(fmt.Sprintf("%d %s", n, long), 9, n%2 == 0)
				f.right(f.try(chatPath, body), chatPath, body)
			}
			f.leaveBetweenLegs(chatPath, chat(long+"left", 9, true))
		})
	}
}

// decode's kv_load_failure_policy determines the result of a failed transfer.
// With "fail" the leg is retried. With "recompute" the answer is right and
// nothing is visible outside: prefill's blocks expire with their lease.
func TestKVLoadFailurePolicy(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMNixlPush} {
		for _, recompute := range []bool{false, true} {
			t.Run(fmt.Sprint(connector, " recompute ", recompute), func(t *testing.T) {
				f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 1, engine: func(_ string, _ int, c *enginesim.Config) {
					c.Nixl.Recompute = recompute
					c.Lease = 2 * time.Second
				}, config: func(c *config.Config) { c.Circuit.Failures = 1000 }})
				f.decode[0].SetFault("1:load", 0, "")
				for _, stream := range []bool{true, false} {
					body := chat(long, 9, stream)
					a := f.try(chatPath, body)
					if recompute {
						f.right(a, chatPath, body)
						continue
					}
					if a.status != 502 {
						t.Errorf("got status %d: %s", a.status, a.body)
					}
				}
				retries := f.metric("pdproxy_retries_total", `phase="decode"`)
				if want := map[bool]float64{false: 4, true: 0}[recompute]; retries != want {
					t.Errorf("got %v retries, want %v", retries, want)
				}
				f.settled()
				f.decode[0].SetFault("", 0, "")
				body := chat(long, 9, true)
				f.right(f.try(chatPath, body), chatPath, body)
			})
		}
	}
}
