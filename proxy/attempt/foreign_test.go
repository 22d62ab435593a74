package attempt_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// localAnswer names a host that means prefill only for engines on the same host.
var localAnswer = strings.Replace(world.NIXLAnswer, "p.test", "localhost", 1)

// TestMovedDecodeIsSentToPrefillOnly: the host in prefill's answer is right for the first
// decode engine, which is on prefill's host. That engine accepts no connection, so the
// proxy moves the leg to an engine on another host. There the name would mean that
// engine's own host.
func TestMovedDecodeIsSentToPrefillOnly(t *testing.T) {
	for _, stream := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			d2 := &world.Engine{Name: "d2", At: "127.0.0.2:80", Role: "decode", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) {
				if strings.Contains(c.Leg.Body, `"stream":true`) {
					c.Stream(`data: {"choices":[{"text":"right"}]}`+"\n\n", "data: [DONE]\n\n")
					return
				}
				c.JSON(200, `{"choices":[{"text":"right"}]}`)
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{
				{Name: "p", At: "127.0.0.1:80", Role: "prefill", Connector: "vllm-nixl", Serve: func(c *world.Conn, _ int) { c.JSON(200, localAnswer) }},
				{Name: "d1", At: "127.0.0.1:81", Role: "decode", Connector: "vllm-nixl", Refuse: true},
				d2,
			}})
			moved := 0
			for range 4 { // the first placement of some requests is d2
				a := w.Post(world.CompletionsPath, world.Completions(stream))
				if a.Status != 200 || !strings.Contains(a.Body, "right") {
					t.Fatalf("got status %d: %s", a.Status, a.Body)
				}
			}
			for _, row := range w.Ended() {
				e, _ := w.Explain(row.RequestID)
				for _, l := range e.Legs {
					if l.Engine == "d1" {
						moved++
					}
				}
			}
			for _, l := range d2.Seen() {
				if strings.Contains(l.Body, "localhost") || strings.Contains(l.Body, "kv_transfer_params") {
					t.Errorf("d2 received %s", l.Body)
				}
			}
			if n := w.Metric("pdproxy_fallbacks_total", "kv_transfer", "foreign_host"); moved == 0 || n != 4 {
				t.Errorf("got %d moved legs and %v fallbacks", moved, n)
			}
			time.Sleep(time.Minute) // clean-ups
			if n := len(d2.Seen()); n != 4 {
				t.Errorf("d2 received %d calls", n)
			}
		})
	}
}
