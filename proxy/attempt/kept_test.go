package attempt

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// idEvent is an event of completions with one id.
func idEvent(id int, text string) string {
	return fmt.Sprintf("data: {\"id\":\"c\",\"created\":5,\"choices\":[{\"index\":0,\"text\":%q,\"finish_reason\":null,\"token_ids\":[%d]}]}\n\n", text, id)
}

// relayed relays events one by one, and returns what the client gets.
func relayed(t *testing.T, k *Kept, events ...string) (public string, err error) {
	t.Helper()
	for _, e := range events {
		got, _, err := k.relay([]byte(e))
		if err != nil {
			return public, err
		}
		public += string(got)
	}
	return public, nil
}

func TestKeptTail(t *testing.T) {
	k := keptForTest(t)
	var all []string
	for i := range 300 {
		all = append(all, idEvent(i, strings.Repeat("x", i%40)))
		if got, err := relayed(t, k, all[i]); err != nil || strings.Contains(got, "token_ids") {
			t.Fatalf("%q, %v", got, err)
		}
		tail, whole := k.Tail()
		want := strings.Join(all, "")
		if whole != (len(want) <= ringSize) || !strings.HasSuffix(want, string(tail)) || len(tail) < min(len(want), ringSize-len(all[i])-200) || !strings.HasPrefix(string(tail), "data: ") {
			t.Fatalf("behind event %d: %t, %d of %d bytes: %.80q", i, whole, len(tail), len(want), tail)
		}
	}
	if k.Output() != 300 || !k.Load() || k.Output() != 300 || !slices.Equal(k.IDs[:5], []uint32{1, 2, 3, 0, 1}) {
		t.Errorf("%d ids: %v", k.Output(), k.IDs[:5])
	}
	if _, err := relayed(t, k, "data: {\"x\":\""+strings.Repeat("y", 3*ringSize)+"\"}\n\n"); err != nil {
		t.Fatal(err)
	}
	if tail, whole := k.Tail(); len(tail) > 0 || whole {
		t.Errorf("a part of a long event counts as an event: %.80q", tail)
	}
}

// TestHarmony: a chat of gpt-oss is not kept.
func TestHarmony(t *testing.T) {
	for prompt, want := range map[string]continuation.Reason{"200006,17360,200008": continuation.Reasoning, "200000,200006": ""} {
		k := keptOf(t, openai.Chat, `{"messages":[{"role":"user","content":"x"}],"stream":true}`, prompt)
		if k.Reason != want {
			t.Errorf("prompt %s: %q", prompt, k.Reason)
		}
	}
}

// TestKeptLost: nothing is kept of a stream that cannot be continued, and the client still gets no ids.
func TestKeptLost(t *testing.T) {
	for name, c := range map[string]struct {
		change func(k *Kept)
		event  string
		want   continuation.Reason
	}{
		"too long":     {func(k *Kept) { k.Limit = 20 }, idEvent(7, "x"), continuation.TooLong},
		"no memory":    {func(k *Kept) { k.Limit = 1 << 30 }, idEvent(7, strings.Repeat("x", 100)), continuation.Memory},
		"a call":       {func(k *Kept) { k.tools = true }, strings.Replace(idEvent(7, "x"), `"text"`, `"delta":{"tool_calls":[{"index":0}]},"text"`, 1), continuation.ToolCalls},
		"no number":    {nil, strings.Replace(idEvent(7, "x"), "[7]", `["7"]`, 1), continuation.NoIDs},
		"no empty one": {func(k *Kept) { k.tools = true }, strings.Replace(idEvent(7, "x"), `"text"`, `"delta":{"tool_calls":[]},"text"`, 1), ""},
	} {
		t.Run(name, func(t *testing.T) {
			k := keptForTest(t)
			if c.change != nil {
				c.change(k)
			}
			for range 400_000 {
				if _, err := relayed(t, k, c.event); err != nil {
					t.Fatal(err)
				}
				if k.Reason != "" || c.want == "" {
					break
				}
			}
			if k.Reason != c.want {
				t.Fatalf("the reason is %q, want %q", k.Reason, c.want)
			}
			if c.want == "" {
				return
			}
			if k.IDs != nil || k.ring != nil || k.counted != 0 {
				t.Errorf("%d ids, %d counted", len(k.IDs), k.counted)
			}
			if got, err := relayed(t, k, idEvent(8, "y")); err != nil || strings.Contains(got, "token_ids") || !strings.Contains(got, `"text":"y"`) {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

// TestKeptForTurn: the ids of a stream whose KV decode retains are kept, also if no engine could continue
// the stream.
func TestKeptForTurn(t *testing.T) {
	call := strings.Replace(idEvent(7, "x"), `"text"`, `"delta":{"tool_calls":[{"index":0}]},"text"`, 1)
	for name, c := range map[string]struct {
		change func(k *Kept)
		events []string
		want   string // reason
		cause  continuation.Reason
	}{
		"continued":         {nil, []string{idEvent(7, "x"), idEvent(8, "y")}, "", ""},
		"a call":            {nil, []string{call, idEvent(8, "y")}, "", continuation.ToolCalls},
		"a call, then long": {func(k *Kept) { k.Limit = 4 }, []string{call, idEvent(8, "y"), idEvent(9, "z")}, "too_long", continuation.ToolCalls},
		"long":              {func(k *Kept) { k.Limit = 4 }, []string{idEvent(7, "x"), idEvent(8, "y")}, "too_long", continuation.TooLong},
		"no number":         {nil, []string{strings.Replace(idEvent(7, "x"), "[7]", `["7"]`, 1), idEvent(8, "y")}, "no_token_ids", continuation.NoIDs},
		"fewer ids":         {nil, []string{idEvent(7, "x")}, "kv_ahead", ""},
		"no turn":           {func(k *Kept) { k.Turn = false }, []string{idEvent(7, "x"), idEvent(8, "y")}, "no_token_ids", ""},
	} {
		t.Run(name, func(t *testing.T) {
			k := keptForTest(t)
			k.Turn, k.tools = true, true
			if c.change != nil {
				c.change(k)
			}
			if public, err := relayed(t, k, c.events...); err != nil || strings.Contains(public, `"token_ids":[7`) || strings.Contains(public, `"token_ids":[8`) {
				t.Errorf("the client gets %s, %v", public, err)
			}
			ids, reason := k.proof(5)
			if reason != c.want || k.Reason != c.cause || reason == "" && !slices.Equal(ids, []uint32{1, 2, 3, 7, 8}) {
				t.Errorf("ids %v, %q; the stream: %q", ids, reason, k.Reason)
			}
			if k.Reason != "" && (k.ring != nil || k.Stub != nil) || c.want != "" && c.want != "kv_ahead" && c.want != "no_token_ids" && k.counted != 0 {
				t.Errorf("%d bytes are counted", k.counted)
			}
		})
	}
	k := new(Kept)
	k.Reason, k.Turn, k.Limit = continuation.Off, true, 9
	c, _ := openClient(t, 1<<20)
	defer k.End()
	k.take(c, headOf("1,2,3"))
	k.begin(c, requestOf(t, openai.Completions, `{"prompt":"x","stream":true}`))
	relayed(t, k, idEvent(7, "x"))
	if ids, reason := k.proof(4); reason != "" || !slices.Equal(ids, []uint32{1, 2, 3, 7}) || k.ring != nil || k.Stub != nil {
		t.Errorf("without continuation: %v, %q", ids, reason)
	}
}

// TestKeptForTurnOfALaterEngine: the KV of the engine that continues a stream is that of the prompt, of the
// relayed ids that it was sent, and of its own ids.
func TestKeptForTurnOfALaterEngine(t *testing.T) {
	k := keptForTest(t)
	k.Turn, k.tools = true, true
	if _, err := relayed(t, k, idEvent(10, "a"), idEvent(11, "b"), idEvent(12, "c")); err != nil {
		t.Fatal(err)
	}
	k.Load()
	k.Resume(&continuation.Splicer{Kept: 1, Repeated: "bc", Drop: 2}, 2)
	call := strings.Replace(idEvent(24, "f"), `"text"`, `"delta":{"tool_calls":[{"index":0}]},"text"`, 1)
	if _, err := relayed(t, k, idEvent(21, "b"), idEvent(22, "cd"), idEvent(23, "e"), call, idEvent(25, "g")); err != nil {
		t.Fatal(err)
	}
	if ids, reason := k.proof(9); reason != "" || !slices.Equal(ids, []uint32{1, 2, 3, 10, 21, 22, 23, 24, 25}) || k.Reason != continuation.ToolCalls {
		t.Errorf("ids %v, %q; the stream: %q", ids, reason, k.Reason)
	}
}

// TestKeptResume: the ids of a leg that continues a stream replace those behind the seam with its
// first event that is relayed, not before.
func TestKeptResume(t *testing.T) {
	k := keptForTest(t)
	if _, err := relayed(t, k, idEvent(10, "a"), idEvent(11, "b"), idEvent(12, "c")); err != nil {
		t.Fatal(err)
	}
	before, _ := k.Tail()
	resume := func() {
		k.Load()
		k.Resume(&continuation.Splicer{ID: []byte(`"old"`), Kept: 1, Repeated: "bc", Drop: 2}, 2)
	}
	resume()
	if got, err := relayed(t, k, idEvent(21, "b")); err != nil || got != "" {
		t.Fatalf("%q, %v", got, err)
	}
	// The leg breaks off before it has repeated the text.
	if tail, _ := k.Tail(); string(tail) != string(before) || !slices.Equal(k.IDs, []uint32{1, 2, 3, 10, 11, 12}) {
		t.Fatalf("ids %v, tail %s", k.IDs, tail)
	}
	resume()
	if !slices.Equal(k.Sent(), []uint32{1, 2, 3, 10}) {
		t.Fatalf("the new prompt is %v", k.Sent())
	}
	got, err := relayed(t, k, idEvent(21, "b"), idEvent(22, "cd"), idEvent(23, "e"))
	if err != nil || strings.Contains(got, "token_ids") || strings.Count(got, `"id":"old"`) != 2 || !strings.Contains(got, `"text":"d"`) || !strings.Contains(got, `"text":"e"`) {
		t.Errorf("the client gets %s, %v", got, err)
	}
	if !slices.Equal(k.IDs, []uint32{1, 2, 3, 10, 21, 22, 23}) || k.Output() != 4 {
		t.Errorf("the ids are %v", k.IDs)
	}
	if tail, _ := k.Tail(); strings.Count(string(tail), "data: ") != 2 {
		t.Errorf("the tail is %s", tail)
	}
	resume()
	if _, err := relayed(t, k, idEvent(1, "other")); err != errOtherText || k.Reason != continuation.Seam {
		t.Errorf("%v, %q", err, k.Reason)
	}
}

func FuzzKept(f *testing.F) {
	f.Add(idEvent(1, "a"), idEvent(2, "b"))
	f.Add("data: {\"choices\":[{\"delta\":{\"tool_calls\":[{", "\n\n: x\n\ndata: [DONE]\n\n")
	f.Fuzz(func(t *testing.T, first, second string) {
		k := keptForTest(t)
		k.tools, k.Turn = true, len(first)%2 == 0
		relayed(t, k, first, second)
		k.Tail()
		if k.Reason == "" {
			k.Load()
			k.Resume(&continuation.Splicer{Repeated: "b", Drop: min(1, k.Output())}, min(1, k.Output()))
			relayed(t, k, second, first)
			k.Tail()
		}
		k.proof(k.Prompt + k.Output())
	})
}
