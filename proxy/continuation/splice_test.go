package continuation

import (
	"strings"
	"testing"
)

// TestSplice: the events of a second engine, and what the client sees of them.
func TestSplice(t *testing.T) {
	const head = `data: {"id":"new","object":"o","created":9,"model":"m","choices":[`
	const seen = `data: {"id":"old","object":"o","created":5,"model":"m","choices":[`
	for name, c := range map[string]struct {
		s    Splicer
		in   []string
		want string
	}{
		"completions": {Splicer{Kept: 4}, []string{
			head + `{"index":0,"text":" a","token_ids":null}]}`,
			head + `{"index":0,"text":"","finish_reason":"stop"}]}`,
			head + `],"usage":{"prompt_tokens":10,"total_tokens":12,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":9}}}`,
			`data: [DONE]`,
		}, seen + `{"index":0,"text":" a","token_ids":null}]}` + "\n\n" +
			seen + `{"index":0,"text":"","finish_reason":"stop"}]}` + "\n\n" +
			seen + `],"usage":{"prompt_tokens":6,"total_tokens":12,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":6}}}` + "\n\n" +
			"data: [DONE]\n\n"},
		"tokens": {Splicer{Kept: 4}, []string{
			`data: {"request_id":"new","usage":null,"choices":[{"index":0,"token_ids":[7]}]}`,
			`data: [DONE]`,
		}, `data: {"request_id":"old","usage":null,"choices":[{"index":0,"token_ids":[7]}]}` + "\n\n" + "data: [DONE]\n\n"},
		"chat without a second role": {Splicer{}, []string{
			head + `{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`,
			head + `{"index":0,"delta":{"content":"a"},"finish_reason":null}]}`,
			": keep-alive",
		}, seen + `{"index":0,"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n: keep-alive\n\n"},
		"repeated text": {Splicer{Repeated: " ab", Drop: 3}, []string{
			head + `{"index":0,"text":" a","token_ids":[1]}]}`,
			head + `{"index":0,"text":"","token_ids":[2]}]}`,
			head + `{"index":0,"text":"b\"c","token_ids":[3]}]}`,
			head + `{"index":0,"text":"d","token_ids":[4]}]}`,
		}, seen + `{"index":0,"text":"\"c","token_ids":[]}]}` + "\n\n" + seen + `{"index":0,"text":"d","token_ids":[4]}]}` + "\n\n"},
		"repeated text in a chat": {Splicer{Repeated: "a"}, []string{
			head + `{"index":0,"delta":{"role":"assistant","content":""}}]}`,
			head + `{"index":0,"delta":{"content":"aé"}}]}`,
		}, seen + `{"index":0,"delta":{"content":"é"}}]}` + "\n\n"},
		"repeated text up to the end": {Splicer{Repeated: "a"}, []string{head + `{"index":0,"text":"a","finish_reason":"length"}]}`},
			seen + `{"index":0,"text":"","finish_reason":"length"}]}` + "\n\n"},
		"known tokens": {Splicer{Drop: 2, Offset: 4}, []string{
			head + `{"index":0,"text":"","logprobs":{"text_offset":[0],"tokens":[""]},"token_ids":[1]}]}`,
			head + `{"index":0,"text":"é é","logprobs":{"text_offset":[0,1],"token_logprobs":[-1.0,null],"tokens":["é"," é"],"top_logprobs":[{"é":-1.0},null]},"token_ids":[2,3]}]}`,
		}, seen + `{"index":0,"text":"é é","logprobs":{"text_offset":[5],"token_logprobs":[null],"tokens":[" é"],"top_logprobs":[null]},"token_ids":[3]}]}` + "\n\n"},
		"known tokens of a chat": {Splicer{Drop: 1}, []string{
			head + `{"index":0,"delta":{"content":"é"},"logprobs":{"content":[{"token":"é"}]},"token_ids":[2]}]}`,
			head + `{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"a"}]},"token_ids":[3]}]}`,
		}, seen + `{"index":0,"delta":{"content":"é"},"logprobs":null,"token_ids":[]}]}` + "\n\n" + seen + `{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"a"}]},"token_ids":[3]}]}` + "\n\n"},
		"unknown lists of log probabilities": {Splicer{Drop: 1}, []string{
			head + `{"index":0,"text":"ab","logprobs":{"tokens":["a","b"],"x":[1,2]},"token_ids":[1,2]}]}`,
		}, seen + `{"index":0,"text":"ab","logprobs":{"tokens":["b"],"x":[1,2]},"token_ids":[2]}]}` + "\n\n"},
		"ids without text": {Splicer{}, []string{head + `{"index":0,"text":"","token_ids":[1]}]}`}, seen + `{"index":0,"text":"","token_ids":[1]}]}` + "\n\n"},
		"text offsets": {Splicer{Offset: 40}, []string{
			head + `{"index":0,"text":"a","logprobs":{"text_offset":[0,3],"tokens":["a","b"]}}]}`,
			head + `{"index":0,"text":"a","logprobs":null}]}`,
		}, seen + `{"index":0,"text":"a","logprobs":{"text_offset":[40,43],"tokens":["a","b"]}}]}` + "\n\n" + seen + `{"index":0,"text":"a","logprobs":null}]}` + "\n\n"},
		"continuous usage": {Splicer{Kept: 3}, []string{head + `{"index":0,"text":"a"}],"usage":{"prompt_tokens":5,"total_tokens":6,"completion_tokens":1}}`},
			seen + `{"index":0,"text":"a"}],"usage":{"prompt_tokens":2,"total_tokens":6,"completion_tokens":4}}` + "\n\n"},
		"another text":            {Splicer{Repeated: "ab"}, []string{head + `{"index":0,"text":"ax"}]}`}, "WRONG"},
		"an end instead":          {Splicer{Repeated: "ab"}, []string{head + `{"index":0,"text":"a","finish_reason":"stop"}]}`}, "WRONG"},
		"reasoning instead":       {Splicer{Repeated: "ab"}, []string{head + `{"index":0,"delta":{"reasoning":"ab"}}]}`}, "WRONG"},
		"not JSON":                {Splicer{}, []string{`data: {"choices":[{"text":"a"`}, "WRONG"},
		"reasoning, not repeated": {Splicer{}, []string{head + `{"index":0,"delta":{"reasoning":"ab"}}]}`}, seen + `{"index":0,"delta":{"reasoning":"ab"}}]}` + "\n\n"},
		"an error":                {Splicer{Repeated: "a"}, []string{`data: {"error":{"message":"x"}}`}, `data: {"error":{"message":"x"}}` + "\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			c.s.ID, c.s.Created = []byte(`"old"`), []byte("5")
			var out []byte
			for _, event := range c.in {
				out = c.s.Append(out, []byte(event+"\n\n"))
			}
			if c.want == "WRONG" {
				if !c.s.Wrong || len(out) > 0 {
					t.Errorf("wrong is %t, the client sees %s", c.s.Wrong, out)
				}
				return
			}
			if string(out) != c.want || c.s.Wrong || strings.Contains(string(out), `"new"`) {
				t.Errorf("wrong is %t, the client sees\n%s, want\n%s", c.s.Wrong, out, c.want)
			}
		})
	}
}
