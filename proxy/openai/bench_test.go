package openai

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// textBody returns a chat request of about n bytes: messages with some escapes, followed
// by the usual fields.
func textBody(n int, sentence string) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"llama","messages":[{"role":"system","content":"Answer in one sentence."}`)
	for b.Len() < n-200 {
		b.WriteString(`,{"role":"user","content":"`)
		for range 20 {
			if b.Len() >= n-200 {
				break
			}
			b.WriteString(sentence)
		}
		b.WriteString(`"}`)
	}
	b.WriteString(`],"max_tokens":128,"temperature":0.7,"top_p":0.9,"stream":true,"stream_options":{"include_usage":true},"n":1,"stop":["</s>"],"user":"u-1"}`)
	return []byte(b.String())
}

const (
	english = `\"Where to?\" asked the driver.\nThe old man only pointed at the hills, and the car went on as before. `
	chinese = `雨停了以后，孩子们又跑到河边去了，`
)

// tokenBody returns a completion request of about n bytes whose prompt is a list of token
// ids with the separator sep.
func tokenBody(n int, sep string) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"llama","prompt":[1`)
	for i := 0; b.Len() < n-60; i++ {
		fmt.Fprintf(&b, "%s%d", sep, (i*7919)%128000)
	}
	b.WriteString(`],"max_tokens":128,"stream":true}`)
	return []byte(b.String())
}

var benchBodies = []struct {
	name string
	api  API
	body []byte
}{
	{"text-4K", Chat, textBody(4<<10, english)},
	{"text-32K", Chat, textBody(32<<10, english)},
	{"text-256K", Chat, textBody(256<<10, english)},
	{"chinese-32K", Chat, textBody(32<<10, chinese)},
	{"tokens-256K", Completions, tokenBody(256<<10, ",")},
	{"tokens-spaced-256K", Completions, tokenBody(256<<10, ", ")},
}

var benchEdits = []Edit{
	{Key: "max_tokens", Value: []byte("1")},
	{Key: "stream", Value: []byte("false")},
	{Key: "stream_options", Remove: true},
	{Key: "kv_transfer_params", Value: []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)},
}

// BenchmarkSplice measures all work on the body of one prefill leg: scan, routing fields,
// edits. BenchmarkMap makes the same edits with encoding/json.
func BenchmarkSplice(b *testing.B) {
	for _, bb := range benchBodies {
		b.Run(bb.name, func(b *testing.B) {
			var r Request
			var dst []byte
			b.SetBytes(int64(len(bb.body)))
			b.ReportAllocs()
			for b.Loop() {
				if err := ParseRequest(bb.api, bb.body, &r); err != nil {
					b.Fatal(err)
				}
				dst = r.Append(dst[:0], benchEdits...)
			}
		})
	}
}

func BenchmarkMap(b *testing.B) {
	for _, bb := range benchBodies {
		b.Run(bb.name, func(b *testing.B) {
			b.SetBytes(int64(len(bb.body)))
			b.ReportAllocs()
			for b.Loop() {
				var m map[string]any
				if err := json.Unmarshal(bb.body, &m); err != nil {
					b.Fatal(err)
				}
				m["max_tokens"], m["stream"] = 1, false
				delete(m, "stream_options")
				m["kv_transfer_params"] = json.RawMessage(benchEdits[3].Value)
				if _, err := json.Marshal(m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkValid(b *testing.B) {
	for _, bb := range benchBodies {
		b.Run(bb.name, func(b *testing.B) {
			b.SetBytes(int64(len(bb.body)))
			for b.Loop() {
				if !json.Valid(bb.body) {
					b.Fatal("invalid")
				}
			}
		})
	}
}

// BenchmarkLookup compares the two readers of JSON: the scan, which checks each byte, and the
// cursor, which skips values in JSON that was checked before. The text is an answer with a
// transfer after a long text.
func BenchmarkLookup(b *testing.B) {
	answer := []byte(`{"id":"chatcmpl-7d0c1f","choices":[{"index":0,"message":{"role":"assistant","content":"` + strings.Repeat(english, 300) +
		`"},"finish_reason":"length"}],"usage":{"prompt_tokens":11,"total_tokens":12},"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1,2,3,4,5,6,7,8]],"remote_host":"10.0.0.1"}}`)
	for _, bb := range []struct {
		name string
		read func() bool
	}{
		{"checked", func() bool {
			_, ok, err := Lookup(answer, "kv_transfer_params", "remote_host")
			return ok && err == nil
		}},
		{"skipped", func() bool { _, ok := Find(answer, "kv_transfer_params", "remote_host"); return ok }},
	} {
		b.Run(bb.name, func(b *testing.B) {
			b.SetBytes(int64(len(answer)))
			b.ReportAllocs()
			for b.Loop() {
				if !bb.read() {
					b.Fatal("not found")
				}
			}
		})
	}
}

// BenchmarkHead measures the search for the first content of a chat stream.
func BenchmarkHead(b *testing.B) {
	head := []byte(`data: {"id":"chatcmpl-7d0c1f","object":"chat.completion.chunk","created":1763690000,"model":"llama","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}

data: {"id":"chatcmpl-7d0c1f","object":"chat.completion.chunk","created":1763690000,"model":"llama","choices":[{"index":0,"delta":{"content":" hills"},"logprobs":null,"finish_reason":null}]}

`)
	b.SetBytes(int64(len(head)))
	b.ReportAllocs()
	for b.Loop() {
		h := StreamHead{API: Chat}
		if h.Read(head) != ContentEvent {
			b.Fatal(h.Verdict)
		}
	}
}

// BenchmarkLeg measures the work on a small body for one leg: scan, PD fields, edits.
func BenchmarkLeg(b *testing.B) {
	body := []byte(`{"model":"llama","stream":true,"max_tokens":8,"messages":[{"role":"user","content":"hello world, tell me a story about a house"}]}`)
	var r Request
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		if err := ParseRequest(Chat, body, &r); err != nil {
			b.Fatal(err)
		}
		for range 2 { // legs
			var room [4 + PDCuts]Edit
			dst = r.Append(dst[:0], CutPD(append(room[:0], benchEdits...), &r)...)
		}
	}
}

// BenchmarkAppendEdited measures new sampling parameters for one leg.
func BenchmarkAppendEdited(b *testing.B) {
	params := []byte(`{"temperature":0.7,"top_p":0.9,"max_tokens":128,"stop":["</s>"],"extra_args":{"a":1},"seed":7}`)
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		dst = AppendEdited(dst[:0], params, Edit{Key: "max_tokens", Value: []byte("1")}, Edit{Key: "extra_args", Value: []byte(`{"kv_transfer_params":{}}`)}, Edit{Key: "min_tokens", Remove: true})
	}
}
