package openai

import "testing"

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
