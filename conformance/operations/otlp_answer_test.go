package operations

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	common "go.opentelemetry.io/proto/otlp/common/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
)

// answered is one request, the engine's answer, and the attributes of the answer in the spans.
type answered struct {
	name, path, request string
	answer              string // a stream of events if it begins with no brace
	broken              bool   // the engine's connection breaks after the answer
	model               string // "": no attribute
	reasons             []string
}

var answers = []answered{
	{name: "chat", path: "/v1/chat/completions", request: `"messages":[{"role":"user","content":"x"}]`,
		answer: `{"id":"c","object":"chat.completion","model":"served-1","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`,
		model:  "served-1", reasons: []string{"stop"}},
	{name: "chat, two choices", path: "/v1/chat/completions", request: `"messages":[{"role":"user","content":"x"}],"n":2`,
		answer: `{"id":"c","object":"chat.completion","model":"served-1","choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"},{"index":1,"message":{"role":"assistant","content":"b"},"finish_reason":"length"}]}`,
		model:  "served-1", reasons: []string{"stop", "length"}},
	{name: "chat stream, two choices", path: "/v1/chat/completions", request: `"messages":[{"role":"user","content":"x"}],"n":2,"stream":true`,
		answer: `data: {"id":"c","model":"served-1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}

data: {"id":"c","model":"served-1","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}

data: {"id":"c","model":"served-1","choices":[{"index":1,"delta":{"content":"b"},"finish_reason":"length"}]}

data: {"id":"c","model":"served-1","choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}

data: [DONE]

`, model: "served-1", reasons: []string{"tool_calls", "length"}},
	{name: "chat stream that breaks", path: "/v1/chat/completions", request: `"messages":[{"role":"user","content":"x"}],"stream":true`,
		answer: "data: {\"id\":\"c\",\"model\":\"served-1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n", broken: true,
		model: "served-1"},
	{name: "chat stream that the engine aborts", path: "/v1/chat/completions", request: `"messages":[{"role":"user","content":"x"}],"stream":true`,
		answer: "data: {\"id\":\"c\",\"model\":\"served-1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\ndata: {\"id\":\"c\",\"model\":\"served-1\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n",
		model:  "served-1", reasons: []string{"abort"}},
	{name: "completions", path: "/v1/completions", request: `"prompt":"x"`,
		answer: `{"id":"c","object":"text_completion","model":"served-1","choices":[{"index":0,"text":"a","finish_reason":"length"}]}`,
		model:  "served-1", reasons: []string{"length"}},
	{name: "completions stream", path: "/v1/completions", request: `"prompt":"x","stream":true`,
		answer: "data: {\"id\":\"c\",\"model\":\"served-1\",\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
		model:  "served-1", reasons: []string{"stop"}},
	{name: "responses", path: "/v1/responses", request: `"input":"x"`,
		answer: `{"id":"r","incomplete_details":null,"model":"served-1","object":"response","output":[{"type":"message","content":[{"type":"output_text","text":"a"}]}],"status":"completed"}`,
		model:  "served-1", reasons: []string{"completed"}},
	{name: "responses stream", path: "/v1/responses", request: `"input":"x","stream":true`,
		answer: `event: response.created
data: {"type":"response.created","sequence_number":0,"response":{"id":"r","incomplete_details":null,"model":"served-1","output":[],"status":"in_progress"}}

event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":1,"delta":"a"}

event: response.completed
data: {"type":"response.completed","sequence_number":2,"response":{"id":"r","incomplete_details":{"reason":"max_output_tokens"},"model":"served-1","output":[],"status":"incomplete","usage":{"input_tokens":1,"output_tokens":1}}}

`, model: "served-1", reasons: []string{"max_output_tokens"}},
	{name: "messages", path: "/v1/messages", request: `"messages":[{"role":"user","content":"x"}]`,
		answer: `{"id":"m","type":"message","role":"assistant","model":"served-1","content":[{"type":"text","text":"a"}],"stop_reason":"max_tokens","usage":{"input_tokens":1,"output_tokens":1}}`,
		model:  "served-1", reasons: []string{"max_tokens"}},
	{name: "messages stream", path: "/v1/messages", request: `"messages":[{"role":"user","content":"x"}],"stream":true`,
		answer: `event: message_start
data: {"type":"message_start","message":{"id":"m","model":"served-1","content":[],"stop_reason":null,"usage":{"input_tokens":1,"output_tokens":0}}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":1}}

event: message_stop
data: {"type":"message_stop"}

`, model: "served-1", reasons: []string{"end_turn"}},
	{name: "embeddings", path: "/v1/embeddings", request: `"input":"x"`,
		answer: `{"object":"list","model":"served-1","data":[{"index":0,"embedding":[0.5]}]}`, model: "served-1"},
	{name: "an answer that names no model and no reason", path: "/v1/completions", request: `"prompt":"x"`,
		answer: `{"id":"c","choices":[{"index":0,"text":"a"}]}`},
}

// TestOTLPAnswer: the exported spans name the model that has answered and the reason for the end
// of each choice, for all routes, streamed or not.
func TestOTLPAnswer(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // an incomplete body has no case
		for i, a := range answers {
			if !strings.Contains(string(body), fmt.Sprintf(`"user":"%d"`, i)) {
				continue
			}
			w.Header().Set("Content-Type", "application/json")
			if !strings.HasPrefix(a.answer, "{") {
				w.Header().Set("Content-Type", "text/event-stream")
			}
			_, _ = io.WriteString(w, a.answer) // the test sees the client's side
			if a.broken {
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			return
		}
		if r.URL.Path == "/v1/models" {
			_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"sim","object":"model"}]}`)
		}
	}))
	t.Cleanup(engine.Close)
	for _, server := range []string{"", "[fleet]\nworkers = 1\n"} {
		r, url := listen(t, "http")
		p := run(t, []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=" + url + "/v1/traces", "OTEL_BSP_SCHEDULE_DELAY=100"},
			server+fmt.Sprintf("[[engine]]\nname = \"e\"\nurl = %q\nrole = \"both\"\nmodel = \"sim\"\n", engine.URL), "")
		p.ready(t)
		for i, a := range answers {
			t.Run(a.name+" "+server, func(t *testing.T) {
				id := fmt.Sprint("answer-", i)
				req, err := http.NewRequest(http.MethodPost, p.url+a.path, strings.NewReader(fmt.Sprintf(`{"model":"sim",%s,"user":"%d"}`, a.request, i)))
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set("X-Request-Id", id)
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body) // one of the streams breaks
				resp.Body.Close()
				if resp.StatusCode != 200 {
					t.Fatalf("got status %d", resp.StatusCode)
				}
				for _, span := range r.spansOf(t, id) {
					model, reasons := answerOf(span.Attributes)
					if model != a.model || !slices.Equal(reasons, a.reasons) {
						t.Errorf("span %q has the model %q and the reasons %q, want %q and %q", span.Name, model, reasons, a.model, a.reasons)
					}
				}
			})
		}
	}
}

// spansOf waits for the two spans that describe the request with that id: the span of the
// exchange, and its child in the terms of the conventions.
func (r *receiver) spansOf(t *testing.T, id string) []*trace.Span {
	t.Helper()
	var found []*trace.Span
	eventually(t, "the spans of "+id, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		found = nil
		for _, s := range r.spans {
			if attributes(s.Attributes)["pdproxy.request_id"] == id {
				found = append(found, s)
			}
		}
		for _, s := range r.spans {
			if len(found) == 1 && slices.Equal(s.ParentSpanId, found[0].SpanId) && s.Kind == trace.Span_SPAN_KIND_CLIENT {
				found = append(found, s)
			}
		}
		return len(found) == 2
	})
	return found
}

// answerOf returns the attributes of the answer: a string and a list of strings.
func answerOf(list []*common.KeyValue) (model string, reasons []string) {
	for _, a := range list {
		switch a.Key {
		case "gen_ai.response.model":
			model = a.Value.GetStringValue()
		case "gen_ai.response.finish_reasons":
			for _, v := range a.Value.GetArrayValue().GetValues() {
				reasons = append(reasons, v.GetStringValue())
			}
		}
	}
	return model, reasons
}
