package openai

import (
	"strings"
	"testing"
)

// headOf returns the classification of a whole text.
func headOf(api API, text string) StreamHead {
	h := StreamHead{API: api}
	h.Read([]byte(text))
	return h
}

func TestStreamHead(t *testing.T) {
	const comment = ": ping\n\n"
	for _, tt := range []struct {
		name, text string
		verdict    Verdict
		data       string
		status     int
		open       int // number of bytes after the end of the verdict
	}{
		{"nothing", "", NeedMore, "", 0, 0},
		{"half an event", "data: {\"a\":1}\n", NeedMore, "", 0, 14},
		{"comment", comment, CommentOnly, "", 0, 0},
		{"comment and half an event", comment + "data: {", CommentOnly, "", 0, 7},
		{"two comments, CRLF", ": a\r\n\r\n: b\r\n\r\n", CommentOnly, "", 0, 0},
		{"event without data", "event: ping\nid: 3\n\n", CommentOnly, "", 0, 0},
		{"data", "data: {\"a\":1}\n\n", ContentEvent, `{"a":1}`, 0, 0},
		{"data behind a comment", comment + "data: {\"a\":1}\n\ndata: {\"error\":{}}\n\n", ContentEvent, `{"a":1}`, 0, 20},
		{"done at once", "data: [DONE]\n\n", EmptyAnswer, "[DONE]", 500, 0},
		{"data and type", "event: message_start\r\ndata: {\"type\":\"message_start\"}\r\n\r\n", Opening, "", 0, 0},
		{"two lines of data", "data: {\ndata: }\n\n", ContentEvent, "{", 0, 0},
		{"vLLM error", "data: {\"error\": {\"message\":\"x\",\"type\":\"InternalServerError\",\"code\":500}}\n\ndata: [DONE]\n\n",
			ErrorEvent, `{"error": {"message":"x","type":"InternalServerError","code":500}}`, 500, 14},
		{"code in words", "data: {\"error\":{\"code\":\"x\",\"type\":\"rate_limit_error\"}}\n\n", ErrorEvent, `{"error":{"code":"x","type":"rate_limit_error"}}`, 429, 0},
		{"code in quotes", "data: {\"error\":{\"code\":\"404\"}}\n\n", ErrorEvent, `{"error":{"code":"404"}}`, 404, 0},
		{"code that is no status", "data: {\"error\":{\"code\":40003}}\n\n", ErrorEvent, `{"error":{"code":40003}}`, 500, 0},
		{"error as text", "data: {\"error\":\"x\"}\n\n", ErrorEvent, `{"error":"x"}`, 500, 0},
		{"SGLang flat error", "data: {\"object\":\"error\",\"message\":\"x\",\"code\":400}\n\n", ErrorEvent, `{"object":"error","message":"x","code":400}`, 400, 0},
		{"typed error", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"not_found_error\"}}\n\n", ErrorEvent, `{"type":"error","error":{"type":"not_found_error"}}`, 404, 0},
		{"error type alone", "event: error\n\n", ErrorEvent, "", 500, 0},
		{"response.failed", "event: response.failed\ndata: {\"type\":\"response.failed\"}\n\n", ErrorEvent, `{"type":"response.failed"}`, 500, 0},
		{"response announced", "event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent: response.in_progress\ndata: {\"type\":\"response.in_progress\"}\n\n",
			CommentOnly, "", 0, 0},
		{"response announced and begun", "event: response.created\ndata: {}\n\nevent: response.output_item.added\ndata: {\"a\":1}\n\n", ContentEvent, `{"a":1}`, 0, 0},
		{"response announced and failed", "event: response.created\ndata: {}\n\nevent: response.failed\ndata: {\"a\":1}\n\n", ErrorEvent, `{"a":1}`, 500, 0},
		{"ping of messages", "event: ping\ndata: {\"type\":\"ping\"}\n\n", CommentOnly, "", 0, 0},
		{"abort with a status", "data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"status_code\":503}}}\n\n",
			ErrorEvent, `{"text":"","meta_info":{"finish_reason":{"type":"abort","status_code":503}}}`, 503, 0},
		{"abort", "data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n", ErrorEvent, `{"choices":[{"finish_reason":"abort"}]}`, 500, 0},
		{"error as a reason", "data: {\"choices\":[{\"finish_reason\": \"error\"}]}\n\n", ErrorEvent, `{"choices":[{"finish_reason": "error"}]}`, 500, 0},
		{"finished at once", "data: {\"choices\":[{\"finish_reason\":{\"type\":\"length\"}}]}\n\n", ContentEvent, `{"choices":[{"finish_reason":{"type":"length"}}]}`, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			api := Chat
			if strings.Contains(tt.text, "event: response") {
				api = Responses
			} else if strings.Contains(tt.text, "event: message") {
				api = Messages
			}
			f := headOf(api, tt.text)
			if f.Verdict != tt.verdict || string(f.Data) != tt.data || f.Status != tt.status || len(tt.text)-f.End != tt.open {
				t.Errorf("verdict %d, data %q, status %d, %d bytes after the verdict", f.Verdict, f.Data, f.Status, len(tt.text)-f.End)
			}
			// No shorter prefix of the text may have a different verdict.
			for n := range f.End {
				if g := headOf(api, tt.text[:n]); g.Verdict > Opening || g.End > n {
					t.Fatalf("the first %d bytes: %+v", n, g)
				}
			}
		})
	}
}

// The heads of answers that an engine opens before it has a token. The names in the comments are
// files of vLLM; the forms of the other engines are those of their streams.
const (
	roleChunk    = `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":[1,2]}` + "\n\n"
	sglangRole   = `data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":"","reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}` + "\n\n"
	emptyText    = `data: {"id":"c","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[]}]}` + "\n\n"
	usageChunk   = `data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"total_tokens":9,"completion_tokens":0}}` + "\n\n"
	doneChunk    = "data: [DONE]\n\n"
	errorChunk   = `data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n"
	announced    = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{}}\n\nevent: response.in_progress\ndata: {\"type\":\"response.in_progress\"}\n\n"
	itemAdded    = `event: response.output_item.added` + "\n" + `data: {"item":{"id":"msg","content":[],"role":"assistant","status":"in_progress","type":"message"},"output_index":0,"sequence_number":2,"type":"response.output_item.added"}` + "\n\n"
	partAdded    = `event: response.content_part.added` + "\n" + `data: {"content_index":0,"part":{"annotations":[],"text":"","type":"output_text","logprobs":[]},"type":"response.content_part.added"}` + "\n\n"
	messageStart = `event: message_start` + "\n" + `data: {"type":"message_start","message":{"id":"m","content":[],"usage":{"input_tokens":9,"output_tokens":0}}}` + "\n\n"
	blockStart   = `event: content_block_start` + "\n" + `data: {"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}` + "\n\n"
	messageStop  = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
	pingEvent    = "event: ping\ndata: {\"type\": \"ping\"}\n\n"
)

func chatDelta(delta string) string {
	return `data: {"choices":[{"index":0,"delta":{` + delta + `},"finish_reason":null}]}` + "\n\n"
}

func typed(kind, rest string) string {
	return "event: " + kind + "\ndata: {\"type\":\"" + kind + "\"," + rest + "}\n\n"
}

// TestHeadsWithoutContent: what an engine sends before its first token decides nothing, and a
// stream that ends there is a failure.
func TestHeadsWithoutContent(t *testing.T) {
	completed := func(output, tokens string) string {
		return typed("response.completed", `"response":{"status":"completed","output":`+output+`,"usage":{"output_tokens":`+tokens+`}}`)
	}
	stop := func(reason, tokens string) string {
		return typed("message_delta", `"delta":{"stop_reason":`+reason+`},"usage":{"output_tokens":`+tokens+`}`)
	}
	for _, tt := range []struct {
		name string
		api  API
		head string
		end  string // what follows the head
		want Verdict
	}{
		{"role, error", Chat, roleChunk, errorChunk, ErrorEvent},
		{"roles of two choices, error", Chat, roleChunk + roleChunk, errorChunk, ErrorEvent},
		{"role, comment, error", Chat, roleChunk + ": keep-alive\n\n", errorChunk, ErrorEvent},
		{"role, end", Chat, roleChunk, doneChunk, EmptyAnswer},
		{"SGLang's role, end", Chat, sglangRole, doneChunk, EmptyAnswer},
		{"role, usage, end", Chat, roleChunk + usageChunk, doneChunk, EmptyAnswer},
		{"usage, end", Completions, usageChunk, doneChunk, EmptyAnswer},
		{"end", Completions, "", doneChunk, EmptyAnswer},
		{"empty text, end", Completions, emptyText, doneChunk, EmptyAnswer},
		{"empty delta, error as a reason", Chat, roleChunk, `data: {"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}` + "\n\n", ErrorEvent},
		{"role, then reasons stop and abort", Chat, roleChunk, `data: {"choices":[{"delta":{},"finish_reason":"stop"},{"delta":{},"finish_reason":"abort"}]}` + "\n\n", ErrorEvent},
		{"token ids, none", VLLMGenerate, `data: {"request_id":"g","choices":[{"index":0,"token_ids":[],"logprobs":null,"finish_reason":null}]}` + "\n\n", doneChunk, EmptyAnswer},
		{"response, failed", Responses, announced + itemAdded + partAdded, typed("response.failed", `"response":{}`), ErrorEvent},
		{"response without output", Responses, announced, completed("[]", "0"), EmptyAnswer},
		{"response with an empty message", Responses, announced + itemAdded + partAdded + typed("response.output_text.delta", `"delta":""`) + typed("response.output_text.done", `"text":""`), completed(`[{"type":"message","content":[{"type":"output_text","text":""}]}]`, "0"), EmptyAnswer},
		{"message, error", Messages, messageStart + pingEvent, typed("error", `"error":{"type":"internal_error","message":"x"}`), ErrorEvent},
		{"message, end", Messages, messageStart, messageStop, EmptyAnswer},
		{"message, usage, end", Messages, messageStart + blockStart + stop(`"end_turn"`, "0"), messageStop, EmptyAnswer},
		{"message without types", Messages, `data: {"type":"message_start","message":{"content":[]}}` + "\n\n", `data: {"type":"message_stop"}` + "\n\n", EmptyAnswer},

		{"text", Chat, roleChunk + chatDelta(`"content":""`), chatDelta(`"content":"x"`), ContentEvent},
		{"text with the role", Chat, "", chatDelta(`"role":"assistant","content":"x"`), ContentEvent},
		{"reasoning", Chat, roleChunk, chatDelta(`"reasoning":"x"`), ContentEvent},
		{"reasoning_content", Chat, sglangRole, chatDelta(`"content":null,"reasoning_content":"x"`), ContentEvent},
		{"tool call", Chat, roleChunk, chatDelta(`"tool_calls":[{"index":0,"function":{"name":"f"}}]`), ContentEvent},
		{"refusal", Chat, roleChunk, chatDelta(`"refusal":"no"`), ContentEvent},
		{"sound", Chat, roleChunk, chatDelta(`"audio":{"data":"x"}`), ContentEvent},
		{"a later member", Chat, roleChunk, chatDelta(`"content":"","novelty":1`), ContentEvent},
		{"end by a reason", Chat, roleChunk, `data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}` + "\n\n", ContentEvent},
		{"max_tokens 0", Completions, "", `data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}` + "\n\n", ContentEvent},
		{"token without text", Completions, emptyText, `data: {"choices":[{"index":0,"text":"","logprobs":{"tokens":["x"]},"finish_reason":null}]}` + "\n\n", ContentEvent},
		{"token ids", VLLMGenerate, "", `data: {"choices":[{"index":0,"token_ids":[7],"finish_reason":null}]}` + "\n\n", ContentEvent},
		{"SGLang's own form", Generate, "", `data: {"text":"","output_ids":[1],"meta_info":{"finish_reason":null}}` + "\n\n", ContentEvent},
		{"delta of a response", Responses, announced + itemAdded + partAdded, typed("response.output_text.delta", `"delta":"x"`), ContentEvent},
		{"call of a response", Responses, announced, typed("response.output_item.added", `"item":{"type":"function_call","name":"f"}`), ContentEvent},
		{"reasoning of a response", Responses, announced + typed("response.output_item.added", `"item":{"type":"reasoning","summary":[]}`), typed("response.reasoning_text.delta", `"delta":"x"`), ContentEvent},
		{"response of one end token", Responses, announced, completed("[]", "1"), ContentEvent},
		{"incomplete response", Responses, announced, typed("response.incomplete", `"response":{"output":[]}`), ContentEvent},
		{"delta of a message", Messages, messageStart + blockStart + pingEvent, typed("content_block_delta", `"delta":{"type":"text_delta","text":"x"}`), ContentEvent},
		{"thinking", Messages, messageStart + typed("content_block_start", `"content_block":{"type":"thinking","thinking":""}`), typed("content_block_delta", `"delta":{"type":"thinking_delta","thinking":"x"}`), ContentEvent},
		{"tool use", Messages, messageStart, typed("content_block_start", `"content_block":{"type":"tool_use","name":"f","input":{}}`), ContentEvent},
		{"message of one end token", Messages, messageStart, stop(`"end_turn"`, "1"), ContentEvent},
		{"message of max_tokens 0", Messages, messageStart, stop(`"max_tokens"`, "0"), ContentEvent},
		{"any event of another route", Transcriptions, "", doneChunk, ContentEvent},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for n := range len(tt.head + tt.end) {
				if h := headOf(tt.api, (tt.head + tt.end)[:n]); h.Verdict >= ContentEvent {
					t.Fatalf("verdict %d after %q", h.Verdict, (tt.head + tt.end)[:n])
				}
			}
			h := headOf(tt.api, tt.head+tt.end)
			if h.Verdict != tt.want || h.End != len(tt.head+tt.end) || (h.Status >= 500) != (tt.want > ContentEvent) {
				t.Errorf("verdict %d, status %d, %d of %d bytes", h.Verdict, h.Status, h.End, len(tt.head+tt.end))
			}
			grown := StreamHead{API: tt.api}
			for n := 1; n <= len(tt.head+tt.end); n++ {
				grown.Read([]byte((tt.head + tt.end)[:n]))
			}
			if grown.Verdict != h.Verdict || grown.End != h.End || grown.Status != h.Status || string(grown.Data) != string(h.Data) {
				t.Errorf("byte by byte: %+v, at once: %+v", grown, h)
			}
		})
	}
}

// TestEchoedHead: a chat request with echo repeats its last message, once for each choice, and no
// token follows.
func TestEchoedHead(t *testing.T) {
	var r Request
	if err := ParseRequest(Chat, []byte(`{"model":"m","messages":[{"role":"assistant","content":"x"}],"echo":true,"n":2,"stream":true}`), &r); err != nil {
		t.Fatal(err)
	}
	echo := chatDelta(`"content":"x"`)
	for _, tt := range []struct {
		text string
		want Verdict
	}{
		{roleChunk + roleChunk + echo + echo, Opening},
		{roleChunk + roleChunk + echo + echo + errorChunk, ErrorEvent},
		{roleChunk + roleChunk + echo + echo + doneChunk, EmptyAnswer},
		{roleChunk + roleChunk + echo + echo + echo, ContentEvent},
		{roleChunk + `data: {"choices":[{"delta":{"content":""},"finish_reason":"stop"}]}` + "\n\n", ContentEvent},
	} {
		h := r.StreamHead()
		if v := h.Read([]byte(tt.text)); v != tt.want {
			t.Errorf("%q: %d", tt.text, v)
		}
	}
}

func FuzzStreamHead(f *testing.F) {
	for _, tt := range streams {
		f.Add(uint8(Chat), []byte(tt.text))
	}
	f.Add(uint8(Chat), []byte(roleChunk+errorChunk))
	f.Add(uint8(Responses), []byte(announced+itemAdded+partAdded+doneChunk))
	f.Add(uint8(Messages), []byte(messageStart+blockStart+messageStop))
	f.Fuzz(func(t *testing.T, api uint8, b []byte) {
		h := headOf(API(api), string(b))
		if h.End < 0 || h.End > len(b) || (h.Status != 0) != (h.Verdict > ContentEvent) {
			t.Fatalf("%+v", h)
		}
		if h.Verdict < ContentEvent && h.Data != nil {
			t.Fatalf("data without a decision: %+v", h)
		}
		// The scanner of the relay must find the failures in the same bytes.
		var s EventScanner
		s.Feed(b[:h.End])
		if bad := s.Failed || s.Aborted; bad && h.Verdict != ErrorEvent || h.Verdict == ContentEvent && s.Events == 0 && !s.Done {
			t.Fatalf("%+v, but %+v", h, s)
		}
	})
}

func TestErrorStatus(t *testing.T) {
	for kind, want := range map[string]int{
		"BadRequestError": 400, "invalid_request_error": 400, "ValueError": 400,
		"authentication_error": 401, "permission_error": 403, "NotFoundError": 404, "RateLimitError": 429,
		"SERVICE_UNAVAILABLE": 503, "overloaded_error": 503, "InternalServerError": 500, "": 500, "new": 500,
	} {
		if got := errorStatus([]byte(`{"type":"` + kind + `"}`)); got != want {
			t.Errorf("%s: errorStatus = %d, want %d", kind, got, want)
		}
	}
}

// TestFirstStatusCounts: a type without a status does not replace the status that the
// error names, for any order of the two.
func TestFirstStatusCounts(t *testing.T) {
	for name, event := range map[string]string{
		"data, then the type":    "data: {\"error\":{\"code\":429}}\nevent: error\n\n",
		"the type, then data":    "event: error\ndata: {\"error\":{\"code\":429}}\n\n",
		"a second status":        "data: {\"error\":{\"code\":429}}\ndata: {\"error\":{\"code\":503}}\n\n",
		"a second data, a guess": "data: {\"error\":{\"code\":429}}\ndata: {\"error\":{}}\n\n",
	} {
		t.Run(name, func(t *testing.T) {
			if h := headOf(Chat, event); h.Verdict != ErrorEvent || h.Status != 429 {
				t.Errorf("first event: verdict %d, status %d", h.Verdict, h.Status)
			}
			var s EventScanner
			if s.Feed([]byte(event)); !s.Failed || s.Status != 429 {
				t.Errorf("stream: failed %v, status %d", s.Failed, s.Status)
			}
		})
	}
}

func TestBeforeFailure(t *testing.T) {
	const (
		data  = "data: {\"choices\":[{\"text\":\"finish_reason\",\"finish_reason\":null}]}\n\n"
		abort = "data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\r\n\r\n"
		typed = "event: response.completed\ndata: {\"metadata\":{\"finish_reason\":\"abort\"}}\n\n"
	)
	for _, tt := range [][2]string{
		{"", ""}, {data, data}, {abort, ""}, {data + abort + data, data}, {data + data + abort + abort, data + data},
		{": x\n\n" + data + abort, ": x\n\n" + data}, {typed + abort, typed}, {data + "data: {\"finish_reason\":\"abort\"}", data}, {data + "data: {", data + "data: {"},
	} {
		if got := string(BeforeFailure([]byte(tt[0]), false)); got != tt[1] {
			t.Errorf("%q: got %q, want %q", tt[0], got, tt[1])
		}
	}
}
