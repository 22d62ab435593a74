package discovery

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// Engines drain, whichever source removes them. They get no new requests, the prefill
// engine serves the pending transfer, and the decode engine ends its stream. Then the
// registry drops them.
func TestRemovalDrains(t *testing.T) {
	for name, from := range sources() {
		t.Run(name, func(t *testing.T) {
			s := from(t)
			p0, d0 := startGate(t, "p0", s.connector, "prefill"), startGate(t, "d0", s.connector, "decode")
			p1, d1 := startGate(t, "p1", s.connector, "prefill"), startGate(t, "d1", s.connector, "decode")
			alone := startEngine(t, s.connector, "both", 0)
			n := startNodeWith(t, func(c *config.Config) {
				s.configure(c)
				c.Server.DrainTimeout, c.Timeouts.StreamIdle = config.Duration(5*time.Minute), config.Duration(5*time.Minute)
			})
			s.has(n, p0, d0)
			n.is(s.name(p0), "ready")
			n.is(s.name(d0), "ready")
			n.from(s.name(p0), name)

			d0.hold(inAnswer)
			stream := n.open(40, true)
			testbed.Eventually(t, "the stream has begun", func() bool { return d0.holds() == 1 })
			if p0.hold(atAnswer); s.connector == config.ConnectorVLLMMoRIIO { // decode waits for prefill's write
				p0.hold(atRequest)
			}
			type answer struct{ text, prefill string }
			answers := make(chan answer, 1)
			go func() {
				text, prefill := say(t, n.url)
				answers <- answer{text, prefill}
			}()
			testbed.Eventually(t, "prefill has the other request", func() bool { return p0.holds() == 1 })

			s.has(n, p0, d0, p1, d1)
			n.is(s.name(p1), "ready")
			n.is(s.name(d1), "ready")
			s.has(n, p1, d1)
			n.is(s.name(p0), "draining")
			n.is(s.name(d0), "draining")
			for range 3 {
				if p, d := n.ask(); p != s.name(p1) || d != s.name(d1) {
					t.Errorf("served by %q and %q", p, d)
				}
			}

			if s.connector == config.ConnectorVLLMNixl { // prefill first: decode has not been asked yet
				d0.hold(atRequest)
				d1.hold(atRequest)
				p0.hold(open)
				testbed.Eventually(t, "decode is asked", func() bool { return d0.holds()+d1.holds() > 0 })
				n.is(s.name(p0), "draining")
			}
			for _, g := range []*gate{p0, d0, d1} {
				g.hold(open)
			}
			want, _ := say(t, alone.URL())
			if got := <-answers; got.text != want || got.prefill != s.name(p0) {
				t.Errorf("prefilled by %q: got %q, want %q", got.prefill, got.text, want)
			}
			n.whole(stream, 40)
			n.is(s.name(p0), "")
			n.is(s.name(d0), "")
			for _, g := range []*gate{p0, d0} {
				testbed.Eventually(t, "nothing is left on "+g.name, func() bool {
					state := g.engine.State()
					return state.BlocksPinned == 0 && state.RequestsRunning == 0
				})
			}
		})
	}
}

// say requests a completion of a prompt that no other request of the test has.
// It returns the text and the name of the prefill engine.
func say(t *testing.T, url string) (text, prefill string) {
	body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":12,"ignore_eos":true}`, strings.Repeat("the tide goes out ", 20))
	resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return "", ""
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	var answer struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err != nil || resp.StatusCode != 200 || json.Unmarshal(data, &answer) != nil || len(answer.Choices) != 1 {
		t.Errorf("got status %d: %s %v", resp.StatusCode, data, err)
		return "", ""
	}
	return answer.Choices[0].Message.Content, resp.Header.Get("X-Pdproxy-Prefill")
}
