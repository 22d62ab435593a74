package exchange_test

import (
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestTokenTime: policies learn the limit of the header line, or else of the class, and the stream counts
// as met or missed. Engines do not get the line, and a wrong value is refused.
func TestTokenTime(t *testing.T) {
	for _, tt := range []struct {
		line   string
		micros uint32
		result string // "": the request is refused
	}{{"400", 400_000, "met"}, {"200", 200_000, "missed"}, {"", 250_000, "missed"}, {"0", 0, ""}, {"fast", 0, ""}} {
		world.Run(t, "line "+tt.line, func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) {
				c.Send(world.StreamHead)
				c.Chunks(world.EventA)
				time.Sleep(300 * time.Millisecond)
				c.Chunks(`data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":2}}`+"\n\n", world.Done)
				c.Send("0\r\n\r\n")
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Needs: abi.NeedTraits, Config: func(c *config.Config) {
				class := config.DefaultPriorityClass()
				class.Name, class.TokenTime = config.DefaultClass, config.Duration(250*time.Millisecond)
				c.PriorityClasses, c.Limits.TokenTimeHeader = []config.PriorityClass{class}, "x-llm-d-slo-tpot-ms"
			}})
			var header []string
			if tt.line != "" {
				header = []string{"X-Llm-D-Slo-Tpot-Ms", tt.line}
			}
			a := w.Post(world.CompletionsPath, world.Completions(true), header...)
			if tt.result == "" {
				if a.Status != 400 || !strings.Contains(a.Body, `"param":"x-llm-d-slo-tpot-ms"`) || len(e.Seen()) != 0 {
					t.Errorf("got %d %s", a.Status, a.Body)
				}
				return
			}
			if got := w.Decider.Asked.Load().(abi.RequestFacts).TokenMicros; got != tt.micros || e.Seen()[0].Header.Get("X-Llm-D-Slo-Tpot-Ms") != "" {
				t.Errorf("the policy gets %d µs, the engine %v", got, e.Seen()[0].Header)
			}
			for w.Running() > 0 {
				time.Sleep(time.Millisecond)
			}
			if n := w.Metric("pdproxy_token_time_requests_total", "default", tt.result); n != 1 {
				t.Errorf("%v streams are counted as %s", n, tt.result)
			}
		})
	}
}
