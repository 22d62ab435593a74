package openai

import (
	"testing"
)

func TestParseUsage(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		want       Usage
		ok         bool
	}{
		{"vLLM", `{"id":"x","choices":[{"usage":{"prompt_tokens":99}}],"usage":{"prompt_tokens":110,"total_tokens":115,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":96}}}`, Usage{110, 5, 96}, true},
		{"no details", `{"usage":{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":null}}`, Usage{1, 2, -1}, true},
		{"embeddings", `{"usage":{"prompt_tokens":7,"total_tokens":7}}`, Usage{7, -1, -1}, true},
		{"responses", `{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":3}}`, Usage{9, 3, 4}, true},
		{"messages", `{"usage":{"input_tokens":9,"cache_read_input_tokens":2,"output_tokens":3}}`, Usage{9, 3, 2}, true},
		{"SGLang native", `{"text":"usage","meta_info":{"id":"r","prompt_tokens":6,"completion_tokens":8,"cached_tokens":0,"finish_reason":{"type":"length"}}}`, Usage{6, 8, 0}, true},
		{"SGLang native batch", ` [{"meta_info":{"prompt_tokens":6,"completion_tokens":8}},{"meta_info":{"prompt_tokens":1,"completion_tokens":2,"cached_tokens":5}}]`, Usage{7, 10, 5}, true},
		{"null", `{"usage":null}`, noUsage, false},
		{"none", `{"id":"x"}`, noUsage, false},
		{"odd numbers", `{"usage":{"prompt_tokens":-4,"completion_tokens":1.5,"total_tokens":"x"}}`, noUsage, false},
		{"not an object", `{"usage":[1]}`, noUsage, false},
		{"meta_info of another kind", `{"meta_info":"x"}`, noUsage, false},
		{"no JSON", `usage`, noUsage, false},
		{"nothing", ``, noUsage, false},
		{"NaN elsewhere", `{"logprobs":[NaN],"usage":{"prompt_tokens":1,"completion_tokens":2}}`, Usage{1, 2, -1}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, ok := ParseUsage([]byte(tt.body)); got != tt.want || ok != tt.ok {
				t.Errorf("ParseUsage([]byte(tt.body)) = %+v, %v; want %+v", got, ok, tt.want)
			}
		})
	}
}

func TestRecountCached(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"chat", `{"usage": {"prompt_tokens":481,"prompt_tokens_details":{"cached_tokens":480,"created_cache_tokens":1},"completion_tokens":3} , "x":1.50}`,
			`{"usage": {"prompt_tokens":481,"prompt_tokens_details":{"cached_tokens":16,"created_cache_tokens":1},"completion_tokens":3} , "x":1.50}`},
		{"response", `{"metadata":{"usage":{"cached_tokens":"480"}},"usage":{"input_tokens":481,"input_tokens_details":{"cached_tokens":480}}}`,
			`{"metadata":{"usage":{"cached_tokens":"480"}},"usage":{"input_tokens":481,"input_tokens_details":{"cached_tokens":16}}}`},
		{"response.completed", `{"type":"response.completed","response":{"usage":{"input_tokens_details":{"cached_tokens":480}}}}`,
			`{"type":"response.completed","response":{"usage":{"input_tokens_details":{"cached_tokens":16}}}}`},
		{"messages", `{"usage":{"input_tokens":1,"output_tokens":2,"cache_read_input_tokens":480}}`, `{"usage":{"input_tokens":465,"output_tokens":2,"cache_read_input_tokens":16}}`},
		{"message_start", `{"type":"message_start","message":{"usage":{"input_tokens":1,"cache_read_input_tokens":480}}}`, `{"type":"message_start","message":{"usage":{"input_tokens":465,"cache_read_input_tokens":16}}}`},
		{"no details", `{"usage":{"prompt_tokens":1,"prompt_tokens_details":null}}`, `{"usage":{"prompt_tokens":1,"prompt_tokens_details":null}}`},
		{"null count", `{"usage":{"prompt_tokens_details":{"cached_tokens":null},"cache_read_input_tokens":null}}`, `{"usage":{"prompt_tokens_details":{"cached_tokens":null},"cache_read_input_tokens":null}}`},
		{"in a text", `{"choices":[{"text":"\"cached_tokens\":480"}]}`, `{"choices":[{"text":"\"cached_tokens\":480"}]}`},
		{"no JSON", `{"usage":{"prompt_tokens_details":{"cached_tokens":1`, `{"usage":{"prompt_tokens_details":{"cached_tokens":1`},
	} {
		if got := string(RecountCached([]byte(tt.in), 16)); got != tt.want {
			t.Errorf("%s: got %s", tt.name, got)
		}
	}
	events := "event: x\r\ndata: " + `{"usage":{"prompt_tokens_details":{"cached_tokens":480}}}` + "\r\n\r\ndata:{\"a\":1}\n\n: c\n\ndata: [DONE]\n\n"
	want := "event: x\r\ndata: " + `{"usage":{"prompt_tokens_details":{"cached_tokens":16}}}` + "\r\n\r\ndata:{\"a\":1}\n\n: c\n\ndata: [DONE]\n\n"
	if got := string(AppendRecounted(nil, []byte(events), 16)); got != want {
		t.Errorf("events: %q", got)
	}
	if got := (Usage{1, 2, 480}).Recounted(Messages, 16); got != (Usage{465, 2, 16}) {
		t.Errorf("usage of messages: %+v", got)
	}
	if got := (Usage{481, 2, -1}).Recounted(Chat, 16); got != (Usage{481, 2, 16}) {
		t.Errorf("usage of chat: %+v", got)
	}
}

// FuzzAppendRecounted: nothing but numbers of cached and input tokens changes.
func FuzzAppendRecounted(f *testing.F) {
	f.Add([]byte("data: {\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":480}}}\n\n"))
	f.Add([]byte("data: {\"message\":{\"usage\":{\"input_tokens\":1,\"cache_read_input_tokens\":480}}}\r\n\r\n"))
	f.Fuzz(func(t *testing.T, events []byte) {
		once := AppendRecounted(nil, events, 16)
		if !countsCached(events) && string(once) != string(events) {
			t.Fatalf("%q became %q", events, once)
		}
		if twice := AppendRecounted(nil, once, 16); string(twice) != string(once) {
			t.Fatalf("%q, then %q", once, twice)
		}
	})
}
