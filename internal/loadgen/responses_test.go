package loadgen

import (
	"strings"
	"testing"
	"testing/synctest"
)

// responseEvents is an answer of the responses API in the form of vLLM.
func responseEvents(last string) []string {
	return []string{
		"event: response.created", `data: {"type":"response.created","response":{"usage":null}}`,
		`data: {"type":"response.output_item.added","item":{}}`,
		`data: {"type":"response.reasoning_text.delta","delta":"so"}`,
		`data: {"type":"response.output_text.delta","delta":""}`,
		`data: {"type":"response.output_text.delta","delta":"tide"}`,
		`data: {"type":"response.function_call_arguments.delta","delta":"{"}`,
		`data: {"type":"response.output_text.done","text":"tide"}`,
		last,
	}
}

func TestResponses(t *testing.T) {
	for name, tt := range map[string]struct {
		last    string
		failure string
		tokens  int
	}{
		"completed":  {`data: {"type":"response.completed","response":{"usage":{"input_tokens":9,"output_tokens":5,"input_tokens_details":{"cached_tokens":4}}}}`, "", 5},
		"incomplete": {`data: {"type":"response.incomplete","response":{"usage":{"input_tokens":9,"output_tokens":6,"input_tokens_details":{"cached_tokens":4}}}}`, "", 6},
		"no usage":   {`data: {"type":"response.completed","response":{}}`, "", 3},
		"failed":     {`data: {"type":"response.failed","response":{}}`, "error in the stream", 0},
		"error":      {`data: {"type":"error","message":"x"}`, "error in the stream", 0},
		"cut":        {`data: {"type":"response.output_text.done"}`, "stream cut off", 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &server{answers: func(int) (int, []string) { return 200, responseEvents(tt.last) }}
				c := config(s)
				c.Requests, c.API = 1, APIResponses
				r := measure(t, s, c)
				if got := r.Samples[0]; got.Failure != tt.failure || r.OutputTokens != tt.tokens || len(got.Gaps) != 2 {
					t.Errorf("%+v", got)
				}
				if tt.tokens > 3 && (r.PromptTokens != 9 || r.CachedTokens != 4) {
					t.Errorf("%+v", r)
				}
				if !strings.HasPrefix(s.asked[0], "/v1/responses {") || !strings.Contains(s.asked[0], `"max_output_tokens":10`) || strings.Contains(s.asked[0], "stream_options") {
					t.Errorf("request %s", s.asked[0])
				}
			})
		})
	}
}

// FuzzAnswer: no stream makes the reader fail otherwise than with an error.
func FuzzAnswer(f *testing.F) {
	f.Add(strings.Join(good(), "\n\n"))
	f.Add(strings.Join(responseEvents(`data: {"type":"response.completed"}`), "\n\n"))
	f.Add(`data: {"choices":null,"delta":{"a":1},"type":"response.x.delta"}`)
	f.Fuzz(func(t *testing.T, text string) {
		a := answer{keep: true}
		if err := a.read(strings.NewReader(text)); err == nil && a.completion < 0 && !strings.Contains(text, "-") {
			t.Errorf("%d tokens", a.completion)
		}
	})
}
