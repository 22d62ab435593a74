package openai

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// chunk is an event of a chat or completions stream.
func chunk(choices string) string {
	return `data: {"id":"c","model":"llama","choices":[` + choices + "]}\n\n"
}

var finishes = []struct {
	name          string
	api           API
	stream, whole string // "": none
	model         string
	want          []string
}{
	{"chat", Chat, ": ping\n\n" + chunk(`{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}`) +
		chunk(`{"index":0,"delta":{"content":"say \"finish_reason\":\"length\", \"model\":\"x\""},"finish_reason":null}`) +
		chunk(`{"index":0,"delta":{},"finish_reason":"stop"}`) + "data: [DONE]\n\n",
		`{"id":"c","model":"llama","choices":[{"index":0,"message":{"content":"\"finish_reason\":\"length\""},"finish_reason":"stop"}]}`, "llama", []string{"stop"}},
	{"three choices that end in another order", Completions,
		chunk(`{"index":2,"text":"a","finish_reason":"length"}`) + chunk(`{"index":0,"text":"a","finish_reason":null},{"index":1,"text":"a","finish_reason":"stop"}`) + chunk(`{"index":0,"finish_reason":"tool_calls"}`),
		`{"model":"llama","choices":[{"index":2,"finish_reason":"length"},{"index":0,"finish_reason":"tool_calls"},{"index":1,"finish_reason":"stop"}]}`, "llama", []string{"tool_calls", "stop", "length"}},
	{"choices without an index", Chat, "", `{"model":"llama","choices":[{"finish_reason":"stop"},{"finish_reason":null},{"finish_reason":"length"}]}`, "llama", []string{"stop", "length"}},
	{"an aborted choice", Chat, chunk(`{"index":0,"finish_reason":"stop"},{"index":1,"finish_reason":"abort"}`), "", "llama", []string{"stop", "abort"}},
	{"an empty reason in each event", Chat, chunk(`{"index":0,"finish_reason":""}`) + chunk(`{"index":0,"finish_reason":""}`), "", "llama", nil},
	{"SGLang's native form", Generate,
		"data: {\"text\":\"a\",\"meta_info\":{\"finish_reason\":null}}\n\ndata: {\"text\":\"ab\",\"meta_info\":{\"finish_reason\":{\"type\":\"stop\",\"matched\":2}}}\n\n",
		`{"text":"ab","meta_info":{"finish_reason":{"type":"stop","matched":2}}}`, "", []string{"stop"}},
	{"SGLang's native form, two prompts", Generate,
		"data: {\"meta_info\":{\"finish_reason\":{\"type\":\"length\"}},\"index\":1}\n\ndata: {\"meta_info\":{\"finish_reason\":{\"type\":\"stop\"}},\"index\":0}\n\n",
		`[{"meta_info":{"finish_reason":{"type":"stop"}}},{"meta_info":{"finish_reason":{"type":"length"}}}]`, "", []string{"stop", "length"}},
	{"messages", Messages,
		"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude\",\"stop_reason\":null}}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":2}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
		`{"model":"claude","content":[{"type":"text","text":"a"}],"stop_reason":"end_turn"}`, "claude", []string{"end_turn"}},
	{"responses", Responses,
		"event: response.created\r\ndata: {\"type\":\"response.created\",\"response\":{\"metadata\":{\"finish_reason\":\"x\"},\"model\":\"gpt\",\"status\":\"in_progress\"}}\r\n\r\nevent: response.completed\r\ndata: {\"type\":\"response.completed\",\"response\":{\"incomplete_details\":null,\"output\":[{\"status\":\"x\"}],\"status\":\"completed\"}}\r\n\r\n",
		`{"incomplete_details":null,"model":"gpt","status":"completed"}`, "gpt", []string{"completed"}},
	{"responses at the limit, as vLLM names the event", Responses,
		"event: response.created\ndata: {\"response\":{\"model\":\"gpt\"}}\n\nevent: response.completed\ndata: {\"response\":{\"incomplete_details\":{\"reason\":\"max_output_tokens\"},\"status\":\"incomplete\"}}\n\n",
		`{"model":"gpt","status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}`, "gpt", []string{"max_output_tokens"}},
	{"responses that are incomplete", Responses, "event: response.incomplete\ndata: {\"response\":{\"model\":\"gpt\",\"status\":\"incomplete\"}}\n\n", "", "gpt", []string{"incomplete"}},
	{"responses that fail", Responses, "event: response.failed\ndata: {\"response\":{\"model\":\"gpt\",\"status\":\"failed\"}}\n\n", "", "gpt", []string{"failed"}},
	{"values of other types", Chat, "data: {\"model\":{\"a\":1},\"choices\":[{\"index\":0,\"finish_reason\":7},{\"index\":-1,\"finish_reason\":[]}]}\n\n",
		`{"model":["a"],"choices":{"finish_reason":7}}`, "", nil},
	{"escapes", Chat, chunk(`{"index":0,"finish_reason":"\u0073top"}`), `{"model":"l\u006cama","choices":[{"finish_reason":"\u0073top"}]}`, "llama", []string{"stop"}},
	{"bytes that are no UTF-8", Chat, "data: {\"model\":\"a\xff\",\"choices\":[{\"finish_reason\":\"s\xff\"}]}\n\n", "{\"model\":\"\xff\",\"choices\":[{\"finish_reason\":\"\xff\"}]}", "", nil},
	{"no JSON", Chat, "data: {\"choices\":[{\"finish_reason\":\n\ndata: [[[\n\n", "<html>", "", nil},
	{"embeddings", Embeddings, "", `{"object":"list","model":"bge","data":[]}`, "bge", nil},
	{"tokens in, tokens out", VLLMGenerate, "", `{"request_id":"r","choices":[{"index":0,"token_ids":[1],"finish_reason":"stop"}]}`, "", []string{"stop"}},
}

// TestFinish: the model and the finish reasons of answers in the forms of the engines.
func TestFinish(t *testing.T) {
	for _, tt := range finishes {
		t.Run(tt.name, func(t *testing.T) {
			if tt.whole != "" {
				if got := ModelOf([]byte(tt.whole)); got != tt.model {
					t.Errorf("model %q of the whole answer", got)
				}
				if got := FinishReasons(tt.api, []byte(tt.whole)); !slices.Equal(got, tt.want) {
					t.Errorf("reasons %q of the whole answer, want %q", got, tt.want)
				}
			}
			if tt.stream == "" {
				return
			}
			if got := tt.api.StreamModel([]byte(tt.stream)); got != tt.model {
				t.Errorf("model %q of the stream", got)
			}
			for size := 1; size <= len(tt.stream); size++ {
				s := EventScanner{Reasons: true}
				run(t, &s, []byte(tt.stream), func(n int) int { return min(n, size) })
				if got := s.FinishReasons(); !slices.Equal(got, tt.want) {
					t.Fatalf("reasons %q of pieces of %d, want %q", got, size, tt.want)
				}
			}
			var s EventScanner
			run(t, &s, []byte(tt.stream), func(n int) int { return n })
			if got := s.FinishReasons(); got != nil {
				t.Errorf("reasons %q that nobody asked for", got)
			}
		})
	}
}

// TestFinishIsBounded: an engine cannot make the proxy keep long names or many reasons.
func TestFinishIsBounded(t *testing.T) {
	long := strings.Repeat("a", 5000)
	if got := ModelOf([]byte(`{"model":"` + long[:256] + `"}`)); got != long[:256] {
		t.Errorf("the longest model became %q", got)
	}
	for _, model := range []string{long, long[:257]} {
		if got := Chat.StreamModel([]byte(`data: {"model":"` + model + "\"}\n\n")); got != "" {
			t.Errorf("a model of %d bytes", len(got))
		}
	}
	var choices []string
	for i := range 1000 {
		choices = append(choices, fmt.Sprintf(`{"index":%d,"finish_reason":"stop"}`, i))
	}
	text := strings.Join(choices, ",")
	s := EventScanner{Reasons: true}
	for _, list := range []string{text, `{"index":9223372036854775807,"finish_reason":"stop"}`, `{"index":0,"finish_reason":"` + long + `"}`} {
		s.Feed([]byte(chunk(list)))
	}
	whole := FinishReasons(Chat, []byte(`{"choices":[`+text+`]}`))
	if got := s.FinishReasons(); len(got) != 128 || !reflect.DeepEqual(got, whole) {
		t.Errorf("%d reasons of the stream, %d of the whole answer", len(got), len(whole))
	}
}

// Until the last event of a choice, the finish reasons cost no allocation.
func TestReasonsCopyNothing(t *testing.T) {
	read := []byte(chunk(`{"index":0,"delta":{"content":"x"},"finish_reason":null}`))
	s := EventScanner{Reasons: true}
	if n := testing.AllocsPerRun(100, func() { s.Feed(read) }); n != 0 {
		t.Errorf("%v allocations per read", n)
	}
}

// FuzzFinish: no bytes of an engine stop the reader, and the result is bounded.
func FuzzFinish(f *testing.F) {
	for _, tt := range finishes {
		f.Add(uint8(tt.api), []byte(tt.stream))
		f.Add(uint8(tt.api), []byte(tt.whole))
	}
	f.Fuzz(func(t *testing.T, number uint8, data []byte) {
		api := API(number)
		s := EventScanner{Reasons: true}
		s.Feed(data)
		s.Finish()
		for _, list := range [][]string{s.FinishReasons(), FinishReasons(api, data)} {
			if len(list) > 128 || slices.ContainsFunc(list, func(r string) bool { return r == "" || len(r) > 64 }) {
				t.Errorf("reasons %q", list)
			}
		}
		if len(api.StreamModel(data)) > 256 || len(ModelOf(data)) > 256 {
			t.Error("a longer model")
		}
	})
}
