package prompt_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// knowing starts a world whose policies need block hashes and conversations. Its engine
// has KV events and blocks of 4 tokens.
func knowing(t *testing.T, serve func(c *world.Conn, nth int)) *world.World {
	t.Helper()
	o := world.Setup{
		Engines: []*world.Engine{{Blocks: 4, Serve: serve, Key: "k"}},
		Needs:   abi.NeedBlocks | abi.NeedConversation,
		Known:   coordinator.State{Index: kvindex.New(kvindex.Options{}), Conversations: conversation.New(10)},
	}
	var asker prompt.Asker
	o.Options = func(d *proxy.Options) {
		asker.Registry = d.Registry
		d.Tokens = tokens.New(tokens.Options{Asker: asker})
	}
	w := world.New(t, o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); w.Local.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

// of returns the explanation of the request with that id.
func explanationOf(w *world.World, id string) journal.Explanation {
	w.T.Helper()
	e, ok := w.Explain(id)
	if !ok {
		w.T.Fatalf("no explanation of %s", id)
	}
	return e
}

// matched returns the blocks that, in the facts for the policy, the only candidate holds.
func matched(w *world.World, id string) (blocks, tokens any) {
	facts := explanationOf(w, id).Candidates[0].Facts
	return facts["blocks_gpu"], facts["block_tokens"]
}

// TestPromptsAreMatchedByTheirTokens: the token ids are those of the client or of the
// engine. The proxy expects the blocks of an earlier prompt on the engine that served it.
func TestPromptsAreMatchedByTheirTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		w := knowing(t, func(c *world.Conn, _ int) {
			if !strings.HasPrefix(c.Leg.Path, "/tokenize") {
				c.JSON(200, world.Unary)
				return
			}
			asked++
			if got := c.Leg.Header.Get("Authorization"); got != "Bearer k" {
				t.Errorf("got the key %q", got)
			}
			c.JSON(200, `{"count":9,"max_model_len":100,"tokens":[1,2,3,4,5,6,7,8,9]}`)
		})
		for i, tt := range []struct {
			body   string
			blocks int
		}{
			{`{"model":"m","prompt":[1,2,3,4,5],"max_tokens":1}`, 0},
			{`{"model":"m","prompt":[1,2,3,4,5,6,7,8,9],"max_tokens":1}`, 1},
			{`{"model":"m","prompt":"nine words","max_tokens":1}`, 2},
			{`{"model":"m","prompt":"nine words","max_tokens":1,"cache_salt":"s"}`, 0},
			{`{"model":"m","prompt":[9,2,3,4],"max_tokens":1}`, 0},
		} {
			id := fmt.Sprint("r", i)
			if a := w.Post(world.CompletionsPath, tt.body, "X-Request-Id", id); a.Status != 200 {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			synctest.Wait()
			if blocks, size := matched(w, id); fmt.Sprint(blocks, size) != fmt.Sprint(tt.blocks, 4) {
				t.Errorf("request %d: got %v blocks of %v tokens, want %d of 4", i, blocks, size, tt.blocks)
			}
		}
		if asked != 1 {
			t.Errorf("got %d tokenize requests for one prompt", asked)
		}
		if n := w.Metric("pdproxy_prompt_token_ids_total", "client"); n != 3 {
			t.Errorf("got %v prompts with ids from the client", n)
		}
		if n := w.Metric("pdproxy_prompt_token_ids_total", "engine"); n != 2 {
			t.Errorf("got %v prompts with ids from the engine", n)
		}
	})
}

// TestWithoutTokensARequestIsPlacedAllTheSame: if an engine does not tokenize, or fails
// to, the proxy places the request without block hashes.
func TestWithoutTokensARequestIsPlacedAllTheSame(t *testing.T) {
	for name, serve := range map[string]func(*world.Conn){
		"no such endpoint": func(c *world.Conn) { c.JSON(404, `{"detail":"Not Found"}`) },
		"an error":         func(c *world.Conn) { c.JSON(500, `{}`) },
		"rubbish":          func(c *world.Conn) { c.JSON(200, `{"tokens":"none"}`) },
		"a hang-up":        func(c *world.Conn) { c.Over = true },
		"silence":          func(c *world.Conn) { c.Hold() },
	} {
		world.Run(t, name, func(t *testing.T) {
			w := knowing(t, func(c *world.Conn, _ int) {
				if strings.Contains(c.Leg.Path, "tokenize") || strings.Contains(c.Leg.Path, "render") {
					serve(c)
					return
				}
				c.JSON(200, world.Unary)
			})
			a := w.Post(world.CompletionsPath, `{"model":"m","prompt":"some words","max_tokens":1}`, "X-Request-Id", "r")
			if a.Status != 200 {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			synctest.Wait()
			if blocks, size := matched(w, "r"); fmt.Sprint(blocks, size) != "0 0" {
				t.Errorf("got %v blocks of %v tokens without ids", blocks, size)
			}
			if n := w.Metric("pdproxy_prompt_token_ids_total", "none"); n != 1 {
				t.Errorf("got %v counted prompts without ids", n)
			}
		})
	}
}

// TestSessionHeaders: the session headers of agents identify a conversation.
// X-Correlation-ID does not, because many agents change it with each request.
func TestSessionHeaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := knowing(t, func(c *world.Conn, _ int) { c.JSON(200, world.Unary) })
		n := 0
		// turn sends the next turn of a conversation that the proxy could also recognize
		// by its prompts.
		turn := func(prompt string, header ...string) int32 {
			t.Helper()
			n++
			id := fmt.Sprint("r", n)
			if a := w.Post(world.CompletionsPath, `{"model":"m","prompt":"`+prompt+`","max_tokens":1}`, append(header, "X-Request-Id", id)...); a.Status != 200 {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			synctest.Wait()
			return explanationOf(w, id).Turn
		}
		for _, name := range config.Default().Conversation.Headers {
			if first, second := turn(name+" one", name, "s-"+name), turn(name+" two", name, "s-"+name); first != 1 || second != 2 {
				t.Errorf("%s: got turns %d and %d", name, first, second)
			}
		}
		start := strings.Repeat("tide ", 1000)
		if first, second := turn(start, "X-Correlation-ID", "a"), turn(start+strings.Repeat("ebb ", 500), "X-Correlation-ID", "b"); first != 1 || second != 2 {
			t.Errorf("with a new X-Correlation-ID: got turns %d and %d", first, second)
		}
	})
}

// TestConversationsAreNamed: each field and header for the name of a conversation works.
// The proxy recognizes later turns.
func TestConversationsAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := knowing(t, func(c *world.Conn, _ int) { c.JSON(200, world.Unary) })
		var keys []string
		for i, tt := range []struct {
			body, session string
			turn          int32
		}{
			{`{"model":"m","prompt":"a","max_tokens":1}`, "s-1", 1},
			{`{"model":"m","prompt":"b","max_tokens":1,"session_id":"s-1"}`, "", 2},
			{`{"model":"m","prompt":"c","max_tokens":1}`, "s-2", 1},
			{`{"model":"m","prompt":"d","max_tokens":1}`, "s-1", 3},
		} {
			id := fmt.Sprint("r", i)
			header := []string{"X-Request-Id", id}
			if tt.session != "" {
				header = append(header, "X-Session-ID", tt.session)
			}
			if a := w.Post(world.CompletionsPath, tt.body, header...); a.Status != 200 {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			synctest.Wait()
			e := explanationOf(w, id)
			if e.Turn != tt.turn || len(e.Conversation) != 16 || strings.Contains(e.Conversation, "s-") {
				t.Errorf("request %d: got turn %d of %q, want turn %d", i, e.Turn, e.Conversation, tt.turn)
			}
			keys = append(keys, e.Conversation)
		}
		if keys[0] != keys[1] || keys[0] != keys[3] || keys[0] == keys[2] {
			t.Errorf("keys %q", keys)
		}
	})
}
