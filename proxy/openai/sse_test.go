package openai

import (
	"bytes"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

// Streams in the form of the engines (vllm.md 8.1, sglang.md 4), with the facts that they
// contain.
var streams = []struct {
	name, text string
	want       sseFacts
}{
	{"vLLM chat", `data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}

data: {"id":"c","choices":[{"index":0,"delta":{"content":"say \"finish_reason\":\"abort\" 中文 😀"},"finish_reason":null}]}

data: {"id":"c","choices":[{"index":0,"delta":{"content":""},"finish_reason":"length"}]}

data: {"id":"c","choices":[],"usage":{"prompt_tokens":11,"total_tokens":13,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8}}}

data: [DONE]

`, sseFacts{events: 4, done: true, usage: Usage{11, 2, 8}}},
	{"continuous usage", `data: {"usage":{"prompt_tokens":3,"completion_tokens":1}}

data: {"usage" : {"prompt_tokens":3,"completion_tokens":2}}

data: {"choices":[{"text":"usage","finish_reason":"stop"}],"usage":null}

data:[DONE]

`, sseFacts{events: 3, done: true, usage: Usage{3, 2, -1}}},
	{"keep-alive and CRLF", ": ping\r\n\r\ndata: {\"a\":1}\r\n\r\n: ping\r\n\r\nid: 7\r\nretry: 10\r\n\r\ndata: [DONE]\r\n\r\n",
		sseFacts{events: 1, done: true}},
	{"vLLM error", `data: {"choices":[]}

data: {"error": {"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}

data: [DONE]

`, sseFacts{events: 2, done: true, failed: true, status: 500}},
	{"SGLang flat error", `data: { "object" : "error" , "message":"bad","type":"BadRequestError","param":null,"code":400}

`, sseFacts{events: 1, failed: true, status: 400}},
	{"SGLang native abort", `data: {"text":"a","meta_info":{"id":"r","finish_reason":null,"prompt_tokens":5,"completion_tokens":1,"cached_tokens":2}}

data: {"text":"a","meta_info":{"id":"r","finish_reason": {"message":"Prefill transfer failed","type":"abort","status_code":503},"prompt_tokens":5,"completion_tokens":2,"cached_tokens":2}}

data: [DONE]

`, sseFacts{events: 2, done: true, aborted: true, status: 503, usage: Usage{5, 2, 2}}},
	{"SGLang abort without a status", `data: {"meta_info":{"finish_reason":{"type":"abort","status_code":null}}}

`, sseFacts{events: 1, aborted: true, status: 500}},
	{"OpenAI abort", `data: {"choices":[{"finish_reason":"stop"},{"finish_reason" : "abort"}]}

`, sseFacts{events: 1, aborted: true, status: 500}},
	{"error after abort", `data: {"choices":[{"finish_reason":"abort"}]}

data: {"error":{"type":"ServiceUnavailableError"}}

`, sseFacts{events: 2, aborted: true, failed: true, status: 503}},
	{"null errors", `data: {"error":null,"choices":[]}

data: {"object":"text_completion","error":{"x":1}}

data: {"type":"ping"}

data: {"errors":1}

data: {"error" 1}

data: "error"

data: {

data:

`, sseFacts{events: 8}},
	{"messages", `event: message_start
data: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":9,"cache_read_input_tokens":4,"output_tokens":1}}}

event: ping
data: {"type": "ping"}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}

event: message_stop
data: {"type":"message_stop"}

`, sseFacts{events: 4, done: true, usage: Usage{9, 15, 4}}},
	{"messages error", `event: error
data: {"type":"error","error":{"type":"overloaded_error","message":"x"}}

`, sseFacts{events: 1, failed: true, status: 503}},
	{"responses", `event: response.created
data: {"type":"response.created","response":{"usage":null}}

event: response.completed
data: {"type":"response.completed","response":{"usage":{"input_tokens":2,"output_tokens":3,"input_tokens_details":{"cached_tokens":1}}}}

`, sseFacts{events: 2, done: true, usage: Usage{2, 3, 1}}},
	{"responses incomplete", "event: response.incomplete\ndata: {}\n\n", sseFacts{events: 1, done: true}},
	{"responses failed", "event: response.failed\ndata: {\"type\":\"response.failed\"}\n\n", sseFacts{events: 1, done: true, failed: true, status: 500}},
	{"data over several lines", "data: {\"a\":\n:\ndata: 1}\n\ndata: 2\n\n", sseFacts{events: 2}},
	{"blank lines", "\n\n\r\n\ndata: {}\n\n\n\n", sseFacts{events: 1}},
	{"open end", "data: {}\n\ndata: [DONE]\n", sseFacts{events: 1, done: true}},
	{"broken usage", "data: {\"usage\":{\"prompt_tokens\":1\n\ndata: {\"usage\":3}\n\ndata: {\"usage\n\n", sseFacts{events: 3}},
	{"nothing", "", sseFacts{}},
}

type sseFacts struct {
	events                int64
	done, failed, aborted bool
	status                int
	usage                 Usage
}

func (s *EventScanner) facts() sseFacts {
	f := sseFacts{s.Events, s.Done, s.Failed, s.Aborted, s.Status, Usage{}}
	if u, ok := s.Usage(); ok {
		f.usage = u
	}
	return f
}

// run feeds the text in pieces and checks the properties on which every relay relies.
func run(t *testing.T, s *EventScanner, text []byte, pieces func(rest int) int) sseFacts {
	t.Helper()
	var out []byte
	for rest := text; len(rest) > 0; {
		n := pieces(len(rest))
		got := s.Feed(bytes.Clone(rest[:n]))
		rest = rest[n:]
		out = append(out, got...)
		if !bytes.HasPrefix(text, out) {
			t.Fatalf("output %q is no prefix of the input %q", out, text)
		}
		tail := bytes.ReplaceAll(out, []byte{'\r'}, nil)
		if len(got) > 0 && !s.MidEvent() && !bytes.HasSuffix(tail, []byte("\n\n")) {
			t.Fatalf("%q ends inside an event", out)
		}
	}
	if out = append(out, s.Finish()...); !bytes.Equal(out, text) {
		t.Fatalf("%q became %q", text, out)
	}
	return s.facts()
}

func TestEventScanner(t *testing.T) {
	for _, tt := range streams {
		t.Run(tt.name, func(t *testing.T) {
			text := []byte(tt.text)
			if got := run(t, new(EventScanner), text, func(n int) int { return n }); got != tt.want {
				t.Fatalf("facts of the whole stream %+v, want %+v", got, tt.want)
			}
			for size := 1; size < 40; size++ {
				if got := run(t, new(EventScanner), text, func(n int) int { return min(n, size) }); got != tt.want {
					t.Fatalf("pieces of %d: %+v, want %+v", size, got, tt.want)
				}
			}
			for seed := range uint64(50) {
				r := rand.New(rand.NewPCG(seed, 1))
				if got := run(t, new(EventScanner), text, func(n int) int { return 1 + r.IntN(n) }); got != tt.want {
					t.Fatalf("seed %d: %+v, want %+v", seed, got, tt.want)
				}
			}
		})
	}
}

// A usual read contains whole events, and the scanner returns it without a copy.
func TestFeedCopiesNothing(t *testing.T) {
	read := []byte("data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":null}]}\n\n")
	var s EventScanner
	if n := testing.AllocsPerRun(100, func() {
		if got := s.Feed(read); len(got) != len(read) || &got[0] != &read[0] {
			t.Fatal("not the bytes of the read")
		}
	}); n != 0 {
		t.Errorf("%v allocations per read", n)
	}
	both := append(bytes.Clone(read), "data: {\"us"...)
	if got := s.Feed(both); len(got) != len(read) || &got[0] != &both[0] {
		t.Error("not the front of the read")
	}
	if got := s.Feed([]byte("age\":{\"prompt_tokens\":1}}\n\n")); string(got) != "data: {\"usage\":{\"prompt_tokens\":1}}\n\n" {
		t.Errorf("got %q", got)
	}
	// The steady state: reads cut events, and each event has usage.
	a, b := []byte("data: {\"usage\":{\"prompt_tokens\":1}}\n\ndata: {\"usage\":{\"prompt"), []byte("_tokens\":2}}\n\n")
	if n := testing.AllocsPerRun(100, func() { s.Feed(a); s.Feed(b) }); n != 0 {
		t.Errorf("%v allocations per cut event", n)
	}
	if s.Feed(nil) != nil {
		t.Error("Feed(nil) returned bytes")
	}
}

func TestLongEvents(t *testing.T) {
	long := "data: {\"text\":\"" + strings.Repeat("x", 300) + "\"}\n\n"
	text := []byte("data: 1\n\n" + long + "data: 2\n\n" + long + "data: [DONE]\n\n")
	for size := 1; size < 700; size += 3 {
		s := EventScanner{Limit: 100}
		got := run(t, &s, text, func(n int) int { return min(n, size) })
		if want := (sseFacts{events: 4, done: true}); got != want {
			t.Fatalf("pieces of %d: %+v", size, got)
		}
	}

	s := EventScanner{Limit: 10}
	if got := s.Feed([]byte("data: 1\n\ndata: 0123456789")); string(got) != "data: 1\n\ndata: 0123456789" || !s.MidEvent() {
		t.Fatalf("%q, mid %v", got, s.MidEvent())
	}
	for _, step := range []struct {
		in, out string
		mid     bool
	}{
		{"0", "0", true}, {"12\n", "12\n", true}, {"\r", "\r", true}, {"\ndata: 2", "\n", false}, {"\n\n", "data: 2\n\n", false},
	} {
		if got := s.Feed([]byte(step.in)); string(got) != step.out || s.MidEvent() != step.mid {
			t.Fatalf("%q: %q, mid %v", step.in, got, s.MidEvent())
		}
	}
	if s.Events != 3 {
		t.Errorf("got %d events", s.Events)
	}

	s = EventScanner{}
	if got := s.Feed(bytes.Repeat([]byte("x"), maxEvent)); len(got) != 0 {
		t.Error("the scanner gave up a long event too early")
	}
	if got := s.Feed([]byte("xx")); len(got) != maxEvent+2 || !s.MidEvent() || s.Finish() != nil {
		t.Error("the scanner holds back more than maxEvent bytes")
	}
}

// FuzzAfter compares the search with a regular expression.
func FuzzAfter(f *testing.F) {
	for _, data := range []string{`{"usage":1}`, `"usage`, `usage"`, `xusage"usage": 1`, `"usage"usage"`, `\"usage\""usage" :`, `usage"usage"usage":`, "\"usage\"\"usage\"\r\n:\t", `"usage";"usage":2`, ``} {
		f.Add([]byte(data))
	}
	member := regexp.MustCompile(`"usage"[ \t\r\n]*:[ \t\r\n]*`)
	f.Fuzz(func(t *testing.T, data []byte) {
		rest, ok := after(data, usageName)
		if at := member.FindIndex(data); ok != (at != nil) || ok && !bytes.Equal(rest, data[at[1]:]) {
			t.Errorf("%q: %q, %v", data, rest, ok)
		}
	})
}

// FuzzFeed: for any division of a stream into reads, the output bytes and the facts are
// the same.
func FuzzFeed(f *testing.F) {
	for _, tt := range streams {
		f.Add([]byte(tt.text), uint64(1), uint8(0))
		f.Add([]byte(tt.text), uint64(2), uint8(30))
	}
	f.Fuzz(func(t *testing.T, text []byte, seed uint64, limit uint8) {
		r := rand.New(rand.NewPCG(seed, 2))
		pieces := func(n int) int { return 1 + r.IntN(min(n, 20)) }
		want := run(t, new(EventScanner), text, func(n int) int { return n })
		if got := run(t, new(EventScanner), text, pieces); got != want {
			t.Fatalf("run(new(EventScanner), text, pieces) = %+v, want %+v", got, want)
		}
		run(t, &EventScanner{Limit: int(limit)}, text, pieces)
	})
}

func BenchmarkFeed(b *testing.B) {
	for name, text := range map[string]string{
		"null":  `data: {"id":"chatcmpl-7d0c1f","object":"chat.completion.chunk","created":1763690000,"model":"llama","choices":[{"index":0,"delta":{"content":" hills"},"logprobs":null,"finish_reason":null}]}`,
		"usage": `data: {"id":"chatcmpl-7d0c1f","object":"chat.completion.chunk","created":1763690000,"model":"llama","choices":[{"index":0,"delta":{"content":" hills"},"logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":11,"total_tokens":13,"completion_tokens":2}}`,
	} {
		b.Run(name, func(b *testing.B) {
			event := []byte(text + "\n\n")
			var s EventScanner
			b.SetBytes(int64(len(event)))
			b.ReportAllocs()
			for b.Loop() {
				s.Feed(event)
			}
		})
	}
}
