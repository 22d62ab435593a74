package conformance

import (
	"context"
	"fmt"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// harnesses are the session headers that agents send: those of a root session, and those
// of a sub-agent. Each list is name, value, name, value.
var harnesses = []struct {
	name        string
	root, child func(tree string, child int) []string
}{
	{"claude-code",
		func(tree string, _ int) []string { return []string{"X-Claude-Code-Session-Id", tree} },
		func(tree string, n int) []string {
			h := []string{"X-Claude-Code-Session-Id", tree, "X-Claude-Code-Agent-Id", fmt.Sprint(tree, "-", n)}
			if n == 1 { // started by sub-agent 0
				h = append(h, "X-Claude-Code-Parent-Agent-Id", tree+"-0")
			}
			return h
		}},
	{"codex",
		func(tree string, _ int) []string { return []string{"session-id", "s" + tree, "thread-id", tree} },
		func(tree string, n int) []string {
			return []string{"session-id", "s" + tree, "thread-id", fmt.Sprint(tree, "-", n), "x-codex-parent-thread-id", tree}
		}},
	{"opencode",
		func(tree string, _ int) []string { return []string{"x-session-affinity", tree, "X-Session-Id", tree} },
		func(tree string, n int) []string {
			id := fmt.Sprint(tree, "-", n)
			return []string{"x-session-affinity", id, "X-Session-Id", id, "x-parent-session-id", tree}
		}},
	{"dynamo",
		func(tree string, _ int) []string { return []string{"X-Dynamo-Session-ID", tree} },
		func(tree string, n int) []string {
			return []string{"X-Dynamo-Session-ID", fmt.Sprint(tree, "-", n), "X-Dynamo-Parent-Session-ID", tree}
		}},
}

// TestSubAgentsStartAtTheParent: the first turns of two sub-agents go to the engine of
// their parent, and their later turns stay there. Without parent headers in the
// configuration, first turns are spread.
func TestSubAgentsStartAtTheParent(t *testing.T) {
	const trees, children = 8, 2
	for _, tt := range []struct {
		policy  string
		parents bool
	}{{"trtllm_conversation", true}, {"trtllm_conversation", false}, {"conversation", true}, {"conversation", false}} {
		parents := tt.parents
		t.Run(fmt.Sprint(tt.policy, ",parents=", parents), func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 4, decode: 1, config: func(c *config.Config) {
				if c.Policy.Place = tt.policy; !parents {
					c.Conversation.ParentHeaders = nil
				}
			}})
			turn := func(text string, header []string) string {
				body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":%q}],"max_tokens":1}`, text)
				a := f.post(context.Background(), f.url, chatPath, body, header...)
				if a.status != 200 {
					t.Fatalf("got status %d: %s", a.status, a.body)
				}
				return a.header.Get("X-Pdproxy-Prefill")
			}
			for _, h := range harnesses {
				away := 0
				for tree := range trees {
					id := fmt.Sprint(h.name, tree)
					home := turn("plan "+id, h.root(id, 0))
					for n := range children {
						text := fmt.Sprint("search ", id, n)
						first := turn(text, h.child(id, n))
						if first != home {
							away++
						}
						if second := turn(text+" more", h.child(id, n)); second != first {
							t.Errorf("%s: the second turn of a sub-agent is on %s, the first on %s", h.name, second, first)
						}
					}
				}
				if parents && away > 0 || !parents && away == 0 {
					t.Errorf("%s: %d of %d sub-agents started elsewhere than their parents", h.name, away, trees*children)
				}
			}
		})
	}
}
