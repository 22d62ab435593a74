package attempt_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

const chatPath = "/v1/chat/completions"

// longChat is a chat that is long enough to be tokenized once for both legs.
var longChat = `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 1000) + `"}],"max_tokens":5}`

// withIDs returns an answer of prefill with n tokens in its prompt and that member.
func withIDs(n int, member string) string {
	return strings.Replace(world.NIXLAnswer, "{", fmt.Sprintf(`{"usage":{"prompt_tokens":%d,"completion_tokens":1},%s,`, n, member), 1)
}

// legMembers returns the members of a leg's body, and the token ids in its kv_transfer_params.
func legMembers(t *testing.T, body string) (members map[string]json.RawMessage, ids string) {
	t.Helper()
	var params struct {
		IDs json.RawMessage `json:"prompt_token_ids"`
	}
	if err := json.Unmarshal([]byte(body), &members); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	if raw := members["kv_transfer_params"]; raw != nil {
		json.Unmarshal(raw, &params)
	}
	return members, string(params.IDs)
}

// TestDecodeGetsTheIDsOfPrefill: decode gets the list of prefill's answer byte for byte. If the
// answer has no list, or another one than that of its prompt, decode gets the leg without ids.
func TestDecodeGetsTheIDsOfPrefill(t *testing.T) {
	for _, tt := range []struct{ name, answer, ids, fallback string }{
		{"the ids", withIDs(3, `"prompt_token_ids":[0,17,4294967295]`), "[0,17,4294967295]", ""},
		{"the ids behind a text", withIDs(2, `"text":"\"prompt_token_ids\":[9]","prompt_token_ids":[1,2]`), "[1,2]", ""},
		{"none", world.NIXLAnswer, "", "no_token_ids"},
		{"null", withIDs(3, `"prompt_token_ids":null`), "", "no_token_ids"},
		{"an empty list", withIDs(0, `"prompt_token_ids":[]`), "", "no_token_ids"},
		{"a list of lists", withIDs(1, `"prompt_token_ids":[[1]]`), "", "no_token_ids"},
		{"a text", withIDs(1, `"prompt_token_ids":["1"]`), "", "bad_token_ids"},
		{"a fraction", withIDs(1, `"prompt_token_ids":[1.5]`), "", "bad_token_ids"},
		{"a negative id", withIDs(1, `"prompt_token_ids":[-1]`), "", "bad_token_ids"},
		{"a null", withIDs(1, `"prompt_token_ids":[null]`), "", "bad_token_ids"},
		{"a truth", withIDs(1, `"prompt_token_ids":[true]`), "", "bad_token_ids"},
		{"an exponent", withIDs(1, `"prompt_token_ids":[1e5]`), "", "bad_token_ids"},
		{"an object", withIDs(1, `"prompt_token_ids":[{}]`), "", "bad_token_ids"},
		{"too few ids", withIDs(3, `"prompt_token_ids":[1,2]`), "", "bad_token_ids"},
		{"no usage", strings.Replace(world.NIXLAnswer, "{", `{"prompt_token_ids":[1],`, 1), "", "bad_token_ids"},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			p := &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl", Release: "0.32.0", Serve: func(c *world.Conn, _ int) { c.JSON(200, tt.answer) }}
			d := &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl", Release: "0.32.0", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}})
			if a := w.Post(chatPath, longChat, "X-Request-Id", "r"); a.Status != 200 || a.Body != world.Unary {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			synctest.Wait()
			if leg, _ := legMembers(t, p.Seen()[0].Body); string(leg["return_token_ids"]) != "true" {
				t.Errorf("the prefill leg asks for no ids: %.200s", p.Seen()[0].Body)
			}
			leg, ids := legMembers(t, d.Seen()[0].Body)
			if ids != tt.ids || leg["return_token_ids"] != nil || leg["messages"] == nil {
				t.Errorf("decode got the ids %s, want %s, in %.300s", ids, tt.ids, d.Seen()[0].Body)
			}
			if n := w.Metric("pdproxy_fallbacks_total", "prompt_ids", tt.fallback); tt.fallback != "" && n != 1 {
				t.Errorf("got %v fallbacks %s", n, tt.fallback)
			}
			e, _ := w.Explain("r")
			notes := strings.Join(e.Notes, ";")
			if told := strings.Contains(notes, "token ids of prefill"); told != (tt.ids != "") {
				t.Errorf("the notes are %q", notes)
			}
		})
	}
}

// TestNoIDsAreAskedFor: prefill answers no ids for a short prompt, for an engine whose release is
// too old or unknown, for a trusted client, and for APIs whose answers have none.
func TestNoIDsAreAskedFor(t *testing.T) {
	for _, tt := range []struct {
		name, release, path, body string
		trusted                   bool
	}{
		{"a short prompt", "0.32.0", chatPath, `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 400) + `"}],"max_tokens":5}`, false},
		{"an old engine", "0.31.4", chatPath, longChat, false},
		{"an unknown engine", "", chatPath, longChat, false},
		{"a build without a release", "0.1.dev1", chatPath, longChat, false},
		{"a trusted client", "0.32.0", chatPath, longChat, true},
		{"an echo", "0.32.0", chatPath, strings.Replace(longChat, "{", `{"echo":true,`, 1), false},
		{"the text of the prompt", "0.32.0", chatPath, strings.Replace(longChat, "{", `{"return_prompt_text":true,`, 1), false},
		{"messages", "0.32.0", "/v1/messages", longChat, false},
		{"responses", "0.32.0", "/v1/responses", strings.NewReplacer("messages", "input", "max_tokens", "max_output_tokens").Replace(longChat), false},
		{"a prompt of ids", "0.32.0", world.CompletionsPath, `{"model":"m","prompt":[1` + strings.Repeat(",1", 4000) + `]}`, false},
		{"a suffix", "0.32.0", world.CompletionsPath, `{"model":"m","suffix":"x","prompt":"` + strings.Repeat("word ", 1000) + `"}`, false},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			p := &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl", Release: tt.release, Serve: func(c *world.Conn, _ int) {
				c.JSON(200, withIDs(1, `"prompt_token_ids":[1]`))
			}}
			d := &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl", Release: tt.release, Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, d}, Config: func(c *config.Config) { c.Server.TrustPDFields = tt.trusted }})
			if a := w.Post(tt.path, tt.body); a.Status != 200 {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
			if leg, _ := legMembers(t, p.Seen()[0].Body); leg["return_token_ids"] != nil {
				t.Errorf("the prefill leg asks for ids: %.200s", p.Seen()[0].Body)
			}
			if _, ids := legMembers(t, d.Seen()[0].Body); ids != "" {
				t.Errorf("decode got the ids %s", ids)
			}
			if n := w.Metric("pdproxy_fallbacks_total", "prompt_ids"); n != 0 {
				t.Errorf("got %v fallbacks", n)
			}
		})
	}
}

// TestIDsWithoutMemory: the copy of the ids in the decode leg is counted. Without memory for it,
// decode tokenizes the prompt itself.
func TestIDsWithoutMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 100_000
		list := "[1" + strings.Repeat(",1", n-1) + "]"
		var w *world.World
		taken := int64(0)
		p := &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-nixl", Release: "0.32.0", Serve: func(c *world.Conn, _ int) {
			if taken = w.Memory.Limit() - w.Memory.Used() - 440<<10; taken > 0 { // room for the answer and the decode leg
				w.Memory.Take(taken)
			}
			c.JSON(200, withIDs(n, `"prompt_token_ids":`+list))
		}}
		d := &world.Engine{Name: "d", Role: "decode", Connector: "vllm-nixl", Release: "0.32.0", Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w = world.New(t, world.Setup{Engines: []*world.Engine{p, d}, Config: func(c *config.Config) { c.Limits.BufferMemory = 8 << 20 }})
		if a := w.Post(chatPath, longChat); a.Status != 200 {
			t.Fatalf("got status %d: %s", a.Status, a.Body)
		}
		if _, ids := legMembers(t, d.Seen()[0].Body); ids != "" {
			t.Errorf("decode got %d bytes of ids", len(ids))
		}
		if n := w.Metric("pdproxy_fallbacks_total", "prompt_ids", "memory"); n != 1 {
			t.Errorf("got %v fallbacks", n)
		}
		w.Memory.Release(taken)
		synctest.Wait()
		if n := w.Memory.Used(); n != 0 {
			t.Errorf("%d bytes are counted after the end", n)
		}
	})
}

// TestIDsOfAnotherDecode: a decode engine that takes over the leg gets the ids if its release takes
// them.
func TestIDsOfAnotherDecode(t *testing.T) {
	for release, want := range map[string]string{"0.32.0": "[1]", "0.31.0": ""} {
		world.Run(t, release, func(t *testing.T) {
			whole := func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }
			p := &world.Engine{Name: "p", Role: "prefill", Connector: "vllm-store", Release: "0.32.0", Serve: func(c *world.Conn, _ int) {
				c.JSON(200, withIDs(1, `"prompt_token_ids":[1]`))
			}}
			dead := &world.Engine{Name: "d1", Role: "decode", Connector: "vllm-store", Release: "0.32.0", Refuse: true}
			d := &world.Engine{Name: "d2", Role: "decode", Connector: "vllm-store", Release: release, Serve: whole}
			w := world.New(t, world.Setup{Engines: []*world.Engine{p, dead, d}})
			const requests = 4 // some of them go to the dead engine first
			for range requests {
				if a := w.Post(chatPath, longChat); a.Status != 200 {
					t.Fatalf("got status %d: %s", a.Status, a.Body)
				}
			}
			if n := w.Metric("pdproxy_leg_errors_total", "decode", "d1"); n == 0 {
				t.Error("no leg moved")
			}
			if n := len(p.Seen()); n != requests {
				t.Errorf("prefill got %d legs", n)
			}
			for _, leg := range d.Seen() {
				if _, ids := legMembers(t, leg.Body); ids != want {
					t.Errorf("decode got the ids %q, want %q", ids, want)
				}
			}
		})
	}
}
