package attempt

import (
	"runtime"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// many are 200,000 ids of a prompt or an event.
var many = strings.TrimSuffix(strings.Repeat("1234,", 200_000), ",")

// allocated returns the bytes that f allocates.
func allocated(f func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// TestKeptCountsFirst: what a stream keeps is counted before it is allocated. If there is no room, it is
// not allocated, and the stream is not kept.
func TestKeptCountsFirst(t *testing.T) {
	const room = 256 << 10 // what is kept takes more
	generate := requestOf(t, openai.VLLMGenerate, `{"token_ids":[`+many+`],"sampling_params":{},"stream":true}`)
	tools := requestOf(t, openai.Chat, `{"messages":[{"role":"user","content":"`+many+`"}],"tools":[{"type":"function"}],"stream":true}`)
	event := func(members string) []byte {
		return []byte(`data: {"choices":[{"index":0,"text":"a",` + members + `}]}` + "\n\n")
	}
	var head *buffer.Buffer
	var ids, text []byte // new ones for each try, because relay changes them
	pieces := func() (head *buffer.Buffer, ids, text []byte) {
		return headOf(many), event(`"token_ids":[` + many + `]`), event(`"token_ids":[1],"x":"` + many + `"`)
	}
	for name, c := range map[string]struct {
		before func(k *Kept) // with room
		keep   func(k *Kept) error
		least  int64 // that is counted for it
		fails  bool  // the leg cannot go on
	}{
		"ids of the prompt":      {nil, func(k *Kept) error { k.take(k.client, head); return nil }, 1_000_000, false},
		"ids of the client":      {nil, func(k *Kept) error { k.begin(k.client, generate); return nil }, 800_000, false},
		"request":                {func(k *Kept) { k.take(k.client, headOf("1,2")) }, func(k *Kept) error { k.begin(k.client, tools); return nil }, 1_000_000, false},
		"ids of an event":        {keptSmall, func(k *Kept) error { k.relay(ids); return nil }, 800_000, false},
		"ids before the seam":    {func(k *Kept) { k.take(k.client, headOf(many)); keptSmall(k) }, func(k *Kept) error { k.Load(); return nil }, 800_000 - 1_000_000, false},
		"ids that come again":    {func(k *Kept) { k.take(k.client, headOf(many)); keptSmall(k); k.Load() }, func(k *Kept) error { k.Resume(new(continuation.Splicer), 200_000); return nil }, 800_000, false},
		"events behind the seam": {func(k *Kept) { keptSmall(k); k.Load(); k.Resume(new(continuation.Splicer), 0) }, func(k *Kept) error { _, _, err := k.relay(text); return err }, 16_000_000, true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, enough := range []bool{true, false} {
				client, memory := openClient(t, 1<<30)
				k := &Kept{Limit: 1 << 20, client: client}
				t.Cleanup(k.End)
				if c.before != nil {
					c.before(k)
				}
				used := memory.Used()
				if !enough {
					memory.SetLimit(used + room)
				}
				head, ids, text = pieces()
				var err error
				took := allocated(func() { err = c.keep(k) })
				switch counted := memory.Used() - used; {
				case enough:
					if err != nil || k.Reason != "" || counted < c.least-1000 || counted > 4*max(c.least, 1<<20) {
						t.Errorf("%v, %q: %d bytes are counted, want %d", err, k.Reason, counted, c.least)
					}
				case k.Reason != continuation.Memory || (err != nil) != c.fails || counted > 0 || took > room:
					t.Errorf("%v, %q: %d bytes are allocated and %d counted", err, k.Reason, took, counted)
				}
			}
		})
	}
}

// keptSmall keeps a stream with few ids, and a prompt with few unless take has seen another.
func keptSmall(k *Kept) {
	k.take(k.client, headOf("1,2,3"))
	r := new(openai.Request)
	if err := openai.ParseRequest(openai.Completions, []byte(`{"prompt":"x","stream":true}`), r); err != nil {
		panic(err)
	}
	k.begin(k.client, r)
	k.relay([]byte(idEvent(7, "a")))
}

// TestKeptLimit: ids above the limit are not read, wherever they come from.
func TestKeptLimit(t *testing.T) {
	client, memory := openClient(t, 1<<30)
	for name, keep := range map[string]func(k *Kept){
		"prompt": func(k *Kept) { k.take(client, headOf(many)) },
		"client": func(k *Kept) {
			k.begin(client, requestOf(t, openai.VLLMGenerate, `{"token_ids":[`+many+`],"sampling_params":{},"stream":true}`))
		},
		"event": func(k *Kept) { keptSmall(k); k.relay([]byte(`data: {"a":1,"token_ids":[` + many + "]}\n\n")) },
	} {
		k := &Kept{Limit: 100_000, client: client}
		if keep(k); k.Reason != continuation.TooLong || memory.Used() != 0 {
			t.Errorf("%s: %q, %d bytes are counted", name, k.Reason, memory.Used())
		}
	}
}

// TestKeptRestart: a leg that failed before its content leaves nothing to the next leg.
func TestKeptRestart(t *testing.T) {
	client, memory := openClient(t, 1<<20)
	k := &Kept{Limit: 1 << 20}
	k.take(client, headOf("1,2,3"))
	if memory.Used() == 0 || k.Prompt != 3 {
		t.Fatalf("%d ids, %d bytes", k.Prompt, memory.Used())
	}
	if k.restart(); memory.Used() != 0 {
		t.Errorf("%d bytes are counted", memory.Used())
	}
	k.take(client, headOf("4,5"))
	if k.begin(client, requestOf(t, openai.Completions, `{"prompt":"x","stream":true}`)); k.Prompt != 2 || !k.Load() || k.IDs[0] != 4 {
		t.Errorf("the ids are %v, %q", k.IDs, k.Reason)
	}
	k.End()
}
