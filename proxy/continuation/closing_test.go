package continuation

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// TestClosing: the events that the proxy itself sends behind a complete answer.
func TestClosing(t *testing.T) {
	const head, usage = `data: {"id":"a","created":5,"model":"m","choices":`, `"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}`
	const options = `,"stream_options":{"include_usage":true}`
	for name, c := range map[string]struct {
		api        openai.API
		body, last string
		ended      bool
		want       string
	}{
		"ended": {openai.Completions, completion, head + `[{"index":0,"text":"x","finish_reason":"stop"}]}`, true, "data: [DONE]\n\n"},
		"ended, usage": {openai.Completions, completion + options, head + `[{"index":0,"text":"x","finish_reason":"stop","token_ids":[3]}],"usage":null}`, true,
			head + `[],` + usage + "\n\ndata: [DONE]\n\n"},
		"at its limit": {openai.Completions, completion, head + `[{"index":0,"text":"x","finish_reason":null}]}`, false,
			head + `[{"index":0,"text":"","logprobs":null,"finish_reason":"length"}]}` + "\n\ndata: [DONE]\n\n"},
		"a chat at its limit": {openai.Chat, chat, head + `[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}`, false,
			head + `[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]}` + "\n\ndata: [DONE]\n\n"},
		"tokens at their limit": {openai.VLLMGenerate, generate + "}", head + `[{"index":0,"token_ids":[3]}]}`, false,
			head + `[{"index":0,"token_ids":[],"logprobs":null,"finish_reason":"length"}]}` + "\n\ndata: [DONE]\n\n"},
		"garbage": {openai.Completions, completion, `data: {"x`, true, "data: [DONE]\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			got := string(Closing(nil, read(t, c.api, c.body+"}"), []byte(c.last+"\n\n"), c.ended, 7, 3))
			if got != c.want {
				t.Errorf("got\n%s, want\n%s", got, c.want)
			}
		})
	}
}

func TestHead(t *testing.T) {
	id, created := Head([]byte("data: {\"id\":\"a\",\"created\":5,\"choices\":[]}\n\n"))
	if string(id) != `"a"` || string(created) != "5" {
		t.Errorf("got %s, %s", id, created)
	}
	if id, created = Head([]byte("data: {\"request_id\":\"a\",\"choices\":[]}\n\n")); string(id) != `"a"` || created != nil {
		t.Errorf("got %s, %q", id, created)
	}
	if id, created = Head([]byte("data: {\"choices\":[]}\n\n")); id != nil || created != nil {
		t.Errorf("got %q, %q", id, created)
	}
}
