package exchange_test

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestFairnessHeader: flows that the header line names share the free places. A flow with many
// requests does not delay another one. Engines do not get the line.
func TestFairnessHeader(t *testing.T) {
	for header, want := range map[string]string{
		"X-Flow": "[a a b a a]",
		"":       "[a a a a b]",
	} {
		synctest.Test(t, func(t *testing.T) {
			proceed := make(chan bool)
			e := &world.Engine{Serve: func(c *world.Conn, _ int) {
				<-proceed
				c.JSON(200, `{"choices":[{"text":"x"}],"usage":{"prompt_tokens":100,"completion_tokens":100}}`)
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
				c.Limits.FairnessHeader, c.Limits.MaxExchanges, c.Limits.QueueTimeout = header, 1, config.Duration(1e12)
			}})
			ended := make(chan string, 10)
			for i, flow := range []string{"a", "a", "a", "a", "b"} {
				go func() {
					if a := w.Post(world.CompletionsPath, world.Completions(false), "X-Flow", flow); a.Status != 200 {
						t.Errorf("request %d: status %d: %s", i, a.Status, a.Body)
					}
					ended <- flow
				}()
				synctest.Wait()
			}
			var order []string
			for range 5 {
				proceed <- true
				order = append(order, <-ended)
				synctest.Wait()
			}
			if got := fmt.Sprint(order); got != want {
				t.Errorf("header %q: order %s, want %s", header, got, want)
			}
			for _, l := range e.Seen() {
				if v := l.Header.Get("X-Flow"); v != "" && header != "" {
					t.Errorf("the engine got the line %q", v)
				}
			}
		})
	}
}
