package openai

import (
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"strings"
	"testing"
)

// facts has the fields of Request except those that have separate tests.
type facts struct {
	model                       string
	stream, usage, beam         bool
	max, n, bestOf              int64
	prompt                      PromptKind
	raw                         string
	count, messages, promptToks int
}

func factsOf(r *Request) facts {
	return facts{
		r.Model, r.Stream, r.IncludeUsage, r.BeamSearch, r.MaxTokens, r.N, r.BestOf,
		r.Prompt, string(r.PromptRaw()), r.PromptCount, r.MessageCount, int(r.PromptTokens),
	}
}

func TestParseRequest(t *testing.T) {
	for _, tt := range []struct {
		name string
		api  API
		body string
		want facts
	}{
		{"completion, text", Completions, `{"model":"m","prompt":"12345678"}`,
			facts{model: "m", max: -1, n: 1, bestOf: 1, prompt: PromptText, raw: `"12345678"`, count: 1, promptToks: 3}},
		{"completion, empty text", Completions, `{"prompt":""}`,
			facts{max: -1, n: 1, bestOf: 1, prompt: PromptText, raw: `""`, count: 1, promptToks: 1}},
		{"completion, tokens", Completions, `{"prompt":[5,6, 128000 ,7,8,9,10,11,12,13,14,15,16,-1],"max_tokens":7}`,
			facts{max: 7, n: 1, bestOf: 1, prompt: PromptTokens, raw: `[5,6, 128000 ,7,8,9,10,11,12,13,14,15,16,-1]`, count: 1, promptToks: 14}},
		{"completion, texts", Completions, `{"prompt":["a","b"],"n":2}`,
			facts{max: -1, n: 2, bestOf: 2, prompt: PromptTexts, raw: `["a","b"]`, count: 2, promptToks: 3}},
		{"completion, token lists", Completions, `{"prompt":[[1,2,3],[4],[]],"stream":true}`,
			facts{stream: true, max: -1, n: 1, bestOf: 1, prompt: PromptTokenLists, raw: `[[1,2,3],[4],[]]`, count: 3, promptToks: 4}},
		{"completion, embeddings for a prompt", Completions, `{"prompt":null,"prompt_embeds":"AAAA"}`,
			facts{max: -1, n: 1, bestOf: 1}},
		{"completion, best_of", Completions, `{"prompt":"a","n":2,"best_of":4}`,
			facts{max: -1, n: 2, bestOf: 4, prompt: PromptText, raw: `"a"`, count: 1, promptToks: 1}},
		{"completion, echo of the prompt alone", Completions, `{"max_tokens":0,"prompt":"a","echo":true}`,
			facts{max: 0, n: 1, bestOf: 1, prompt: PromptText, raw: `"a"`, count: 1, promptToks: 1}},
		{"chat", Chat, `{"model":"org\/m\u00e9","messages":[{"role":"user","content":"hi"},{}],"stream":true,"stream_options":{"x":{},"include\u005fusage":true},"max_tokens":5}`,
			facts{model: "org/mé", stream: true, usage: true, max: 5, n: 1, bestOf: 1, prompt: PromptMessages,
				raw: `[{"role":"user","content":"hi"},{}]`, count: 1, messages: 2, promptToks: 9}},
		{"chat, max_completion_tokens wins", Chat, `{"max_completion_tokens":6,"messages":[{}],"max_tokens":5}`,
			facts{max: 6, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"chat, max_completion_tokens wins behind", Chat, `{"max_tokens":5,"messages":[{}],"max_completion_tokens":6}`,
			facts{max: 6, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"chat, null max_completion_tokens does not", Chat, `{"max_completion_tokens":null,"messages":[{}],"max_tokens":5}`,
			facts{max: 5, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"chat, beam search", Chat, `{"messages":[{}],"use_beam_search":true}`,
			facts{beam: true, max: -1, n: 1, bestOf: 2, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"chat, beam search of three", Chat, `{"messages":[{}],"use_beam_search":true,"n":3}`,
			facts{beam: true, max: -1, n: 3, bestOf: 3, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"chat, nulls are absent", Chat, `{"model":null,"messages":[{}],"stream":null,"stream_options":null,"n":null,"best_of":null,"use_beam_search":null,"max_tokens":null,"sampling_params":null}`,
			facts{max: -1, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"chat, null include_usage", Chat, `{"model":"","messages":[{}],"stream_options":{"include_usage":null}}`,
			facts{max: -1, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"chat, keys of other cases and other APIs", Chat, `{"messages":[{}],"Stream":"x","N":0,"prompt":7,"input":7,"max_output_tokens":"x","sampling_params":7,"text":1}`,
			facts{max: -1, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"escaped keys", Chat, `{"m\u006fdel":"m","mess\u0061ges":[{}],"str\u0065am":true}`,
			facts{model: "m", stream: true, max: -1, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"responses, text", Responses, `{"model":"m","input":"abcd","max_output_tokens":9,"max_tokens":"not a field here"}`,
			facts{model: "m", max: 9, n: 1, bestOf: 1, prompt: PromptText, raw: `"abcd"`, count: 1, promptToks: 2}},
		{"responses, items", Responses, `{"input":[{},{}],"n":0}`,
			facts{max: -1, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{},{}]`, count: 1, messages: 2, promptToks: 2}},
		{"responses, a stored prompt", Responses, `{"previous_response_id":"r"}`, facts{max: -1, n: 1, bestOf: 1}},
		{"messages", Messages, `{"model":"m","max_tokens":3,"messages":[{}],"stream":true,"n":"x"}`,
			facts{model: "m", stream: true, max: 3, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"generate, text", Generate, `{"text":"abcd","sampling_params":{"max_new_tokens":8,"n":2,"max_tokens":99},"max_tokens":"x"}`,
			facts{max: 8, n: 2, bestOf: 2, prompt: PromptText, raw: `"abcd"`, count: 1, promptToks: 2}},
		{"generate, texts with a list of params", Generate, `{"text":["a","b"],"sampling_params":[{"max_new_tokens":8},{"n":3,"max_new_tokens":0}]}`,
			facts{max: 8, n: 3, bestOf: 3, prompt: PromptTexts, raw: `["a","b"]`, count: 2, promptToks: 3}},
		{"generate, ids", Generate, `{"input_ids":[1,2],"sampling_params":{"max_new_tokens":0}}`,
			facts{max: 0, n: 1, bestOf: 1, prompt: PromptTokens, raw: `[1,2]`, count: 1, promptToks: 2}},
		{"generate, ids and text", Generate, `{"input_ids":[[1,2],[3]],"text":"a"}`,
			facts{max: -1, n: 1, bestOf: 1, prompt: PromptTokenLists, raw: `[[1,2],[3]]`, count: 2, promptToks: 3}},
		{"generate, text and ids", Generate, `{"text":"a","input_ids":[1]}`,
			facts{max: -1, n: 1, bestOf: 1, prompt: PromptTokens, raw: `[1]`, count: 1, promptToks: 1}},
		{"vllm generate", VLLMGenerate, `{"token_ids":[1,2,3],"sampling_params":{"max_tokens":4,"n":null,"temperature":1.5},"stream":true,"stream_options":{"include_usage":true}}`,
			facts{stream: true, usage: true, max: 4, n: 1, bestOf: 1, prompt: PromptTokens, raw: `[1,2,3]`, count: 1, promptToks: 3}},
		{"embeddings", Embeddings, `{"model":"m","input":["a"]}`,
			facts{model: "m", max: -1, n: 1, bestOf: 1, prompt: PromptTexts, raw: `["a"]`, count: 1, promptToks: 2}},
		{"embeddings of messages", Embeddings, `{"messages":[{}]}`,
			facts{max: -1, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"tokenize", Tokenize, `{"prompt":"a"}`, facts{max: -1, n: 1, bestOf: 1, prompt: PromptText, raw: `"a"`, count: 1, promptToks: 1}},
		{"rerank", RerankV2, `{"model":"m","query":"a","documents":["b"]}`, facts{model: "m", max: -1, n: 1, bestOf: 1, promptToks: 11}},
		{"score with another API's prompt", Score, `{"prompt":7,"messages":"x","input":{}}`, facts{max: -1, n: 1, bestOf: 1, promptToks: 10}},
		{"count of tokens", CountTokens, `{"messages":[{}]}`, facts{max: -1, n: 1, bestOf: 1, prompt: PromptMessages, raw: `[{}]`, count: 1, messages: 1, promptToks: 1}},
		{"detokenize", Detokenize, `{"tokens":[1]}`, facts{max: -1, n: 1, bestOf: 1, prompt: PromptTokens, raw: `[1]`, count: 1, promptToks: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// The request has held another body before, as a request from a pool has.
			var r Request
			if err := ParseRequest(Chat, []byte(`{"model":"old","messages":[{},{},{}],"stream":true,"stream_options":{"include_usage":true},"n":5,"best_of":9,"use_beam_search":true,"max_completion_tokens":77}`), &r); err != nil {
				t.Fatal(err)
			}
			if err := ParseRequest(tt.api, []byte(tt.body), &r); err != nil {
				t.Fatalf("ParseRequest(tt.api, []byte(tt.body), &r) = %v, %#v, want nil, nil", err, err)
			}
			if got := factsOf(&r); got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			if r.API != tt.api || r.HasModel != (tt.want.model != "") {
				t.Errorf("API %v, HasModel %v", r.API, r.HasModel)
			}
			if r.Prompt != PromptNone && tt.body[r.PromptSpan.Start:r.PromptSpan.End] != tt.want.raw {
				t.Errorf("span %v", r.PromptSpan)
			}
			r.Reset()
			if r.Raw() != nil || r.Len() != 0 || r.Prompt != PromptNone || r.PromptRaw() != nil {
				t.Error("the Request is not empty after Reset")
			}
		})
	}
}

func TestParseRequestRefuses(t *testing.T) {
	chat := func(member string) string { return `{"messages":[{}],` + member + `}` }
	for _, tt := range []struct {
		api               API
		body, code, param string
	}{
		{Chat, `{"model":1}`, "invalid_type", "model"},
		{Chat, chat(`"model":["m"]`), "invalid_type", "model"},
		{Chat, chat(`"stream":"true"`), "invalid_type", "stream"},
		{Chat, chat(`"stream":1`), "invalid_type", "stream"},
		{Chat, chat(`"stream_options":true`), "invalid_type", "stream_options"},
		{Chat, chat(`"stream_options":[]`), "invalid_type", "stream_options"},
		{Chat, chat(`"stream_options":{"include_usage":1}`), "invalid_type", "stream_options.include_usage"},
		{Chat, chat(`"stream_options":{"include_usage":true,"include_usage":true}`), "duplicate_key", "stream_options"},
		{Chat, chat(`"n":0`), "integer_below_min_value", "n"},
		{Chat, chat(`"n":-1`), "integer_below_min_value", "n"},
		{Chat, chat(`"n":-99999999999999999999`), "integer_below_min_value", "n"},
		{Chat, chat(`"n":1.0`), "invalid_type", "n"},
		{Chat, chat(`"n":1e0`), "invalid_type", "n"},
		{Chat, chat(`"n":"1"`), "invalid_type", "n"},
		{Chat, chat(`"n":true`), "invalid_type", "n"},
		{Chat, chat(`"n":[1]`), "invalid_type", "n"},
		{Chat, chat(`"best_of":0`), "integer_below_min_value", "best_of"},
		{Chat, chat(`"use_beam_search":"yes"`), "invalid_type", "use_beam_search"},
		{Chat, chat(`"max_tokens":0`), "integer_below_min_value", "max_tokens"},
		{Chat, chat(`"max_tokens":-5`), "integer_below_min_value", "max_tokens"},
		{Chat, chat(`"max_tokens":16.5`), "invalid_type", "max_tokens"},
		{Chat, chat(`"max_tokens":"16"`), "invalid_type", "max_tokens"},
		{Chat, chat(`"max_tokens":2147483648`), "integer_above_max_value", "max_tokens"},
		{Chat, chat(`"max_tokens":123456789012345678901234567890`), "integer_above_max_value", "max_tokens"},
		{Chat, chat(`"max_tokens":{}`), "invalid_type", "max_tokens"},
		{Chat, chat(`"max_tokens":0,"max_completion_tokens":5`), "integer_below_min_value", "max_tokens"},
		{Chat, chat(`"max_completion_tokens":5,"max_tokens":0`), "integer_below_min_value", "max_tokens"},
		{Chat, chat(`"max_completion_tokens":0`), "integer_below_min_value", "max_completion_tokens"},
		{Chat, `{}`, "missing_required_parameter", "messages"},
		{Chat, `{"messages":null}`, "missing_required_parameter", "messages"},
		{Chat, `{"Messages":[{}]}`, "missing_required_parameter", "messages"},
		{Chat, `{"messages":[]}`, "empty_array", "messages"},
		{Chat, `{"messages":"hi"}`, "invalid_type", "messages"},
		{Chat, `{"messages":{}}`, "invalid_type", "messages"},
		{Chat, `{"messages":["hi"]}`, "invalid_type", "messages"},
		{Chat, `{"messages":[{},"hi"]}`, "invalid_type", "messages"},
		{Chat, `[]`, "invalid_json", ""},
		{Chat, ``, "invalid_json", ""},
		{Chat, `{"messages":[{}],"messages":[{}]}`, "duplicate_key", "messages"},
		{Messages, `{"max_tokens":1}`, "missing_required_parameter", "messages"},
		{Completions, `{}`, "missing_required_parameter", "prompt"},
		{Completions, `{"prompt":null,"prompt_embeds":null}`, "missing_required_parameter", "prompt"},
		{Completions, `{"prompt":[]}`, "empty_array", "prompt"},
		{Completions, `{"prompt":1}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":true}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":{}}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":[1,"a"]}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":[1,2,3,4,5,6.5,7,8,9,10,11,12]}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":[1,null]}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":[[1],2]}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":[[1],["a"]]}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":[[[1]]]}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":[{}]}`, "invalid_type", "prompt"},
		{Completions, `{"prompt":"a","max_tokens":0}`, "integer_below_min_value", "max_tokens"},
		{Completions, `{"prompt":"a","max_tokens":0,"echo":false}`, "integer_below_min_value", "max_tokens"},
		{Responses, `{"input":["a"]}`, "invalid_type", "input"},
		{Responses, `{"input":"a","max_output_tokens":0}`, "integer_below_min_value", "max_output_tokens"},
		{Generate, `{"text":[1]}`, "invalid_type", "text"},
		{Generate, `{"input_ids":["a"]}`, "invalid_type", "input_ids"},
		{Generate, `{"text":"a","sampling_params":"x"}`, "invalid_type", "sampling_params"},
		{Generate, `{"text":"a","sampling_params":[1]}`, "invalid_type", "sampling_params"},
		{Generate, `{"text":"a","sampling_params":{"max_new_tokens":-1}}`, "integer_below_min_value", "sampling_params.max_new_tokens"},
		{Generate, `{"text":"a","sampling_params":[{"n":0},{"n":1}]}`, "integer_below_min_value", "sampling_params.n"},
		{VLLMGenerate, `{"token_ids":[1],"sampling_params":[{}]}`, "invalid_type", "sampling_params"},
		{VLLMGenerate, `{"token_ids":[1],"sampling_params":{"max_tokens":0}}`, "integer_below_min_value", "sampling_params.max_tokens"},
		{VLLMGenerate, `{"token_ids":"a"}`, "invalid_type", "token_ids"},
		{VLLMGenerate, `{"token_ids":[]}`, "empty_array", "token_ids"},
		{Embeddings, `{"input":{}}`, "invalid_type", "input"},
		{Tokenize, `{"prompt":["a"]}`, "invalid_type", "prompt"},
		{RerankV1, `{"model":["m"]}`, "invalid_type", "model"},
		{Pooling, `{"input":"x","stream":1}`, "invalid_type", "stream"},
		{CountTokens, `{"model":"m"}`, "missing_required_parameter", "messages"},
		{CountTokens, `{"messages":"a"}`, "invalid_type", "messages"},
		{Detokenize, `{"tokens":[1.5]}`, "invalid_type", "tokens"},
	} {
		t.Run(tt.api.String()+" "+tt.body, func(t *testing.T) {
			var r Request
			var e *Error
			if err := ParseRequest(tt.api, []byte(tt.body), &r); !errors.As(err, &e) {
				t.Fatalf("got error %v, want an *Error", err)
			}
			if e.Status != 400 || e.Code.String() != tt.code || e.Param != tt.param {
				t.Errorf("got status %d, code %q, param %q; want 400, %q, %q", e.Status, e.Code, e.Param, tt.code, tt.param)
			}
			if tt.code != "invalid_json" && tt.code != "duplicate_key" && !strings.Contains(e.Message, "'"+tt.param+"'") {
				t.Errorf("the message does not name the field: %s", e.Message)
			}
		})
	}
}

// TestModelsNameIsBounded: a model name that is longer than any real name is rejected, in
// any spelling.
func TestModelsNameIsBounded(t *testing.T) {
	for _, letter := range []string{"m", `\u006d`} {
		for n, code := range map[int]string{MaxModel: "", MaxModel + 1: "string_above_max_length"} {
			var r Request
			err := ParseRequest(Completions, []byte(`{"prompt":"a","model":"`+strings.Repeat(letter, n)+`"}`), &r)
			var e *Error
			switch {
			case code == "" && (err != nil || len(r.Model) != n):
				t.Errorf("%d times %s: %v, a name of %d bytes", n, letter, err, len(r.Model))
			case code != "" && (!errors.As(err, &e) || e.Status != 400 || e.Code.String() != code || e.Param != "model"):
				t.Errorf("%d times %s: %#v", n, letter, err)
			}
		}
	}
}

// With a pooled Request, the same model and a reused buffer, Parse allocates no memory.
func TestParseRequestAllocatesNothing(t *testing.T) {
	for _, bb := range benchBodies[:5] {
		var r Request
		var dst []byte
		got := testing.AllocsPerRun(10, func() {
			if err := ParseRequest(bb.api, bb.body, &r); err != nil {
				t.Fatal(err)
			}
			dst = r.Append(dst[:0], benchEdits...)
			r.Reset()
		})
		if got != 0 {
			t.Errorf("%s: %v allocations", bb.name, got)
		}
	}
}

// The values that routing reads must equal those of any JSON parser, for every accepted
// body.
func FuzzParseRequest(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s), uint8(Chat))
	}
	f.Add([]byte(`{"prompt":[[1,2],[3]],"n":2,"best_of":3,"max_tokens":4,"stream":false}`), uint8(Completions))
	f.Add([]byte(`{"input_ids":[1],"sampling_params":{"max_new_tokens":2,"n":1}}`), uint8(Generate))
	f.Add([]byte(`{"messages":[{"role":"user"},{"content":"b","r\u006fle":"assistant"}],"client_metadata":{"session_id":" a\t"},"cache_salt":"s\n","prompt_token_ids":[1,2e0]}`), uint8(Chat))
	f.Add([]byte(`{"input":[{"type":"reasoning"}],"prompt_cache_key":"k","conversation_params":{"conversation_id":" "},"tools":[{}]}`), uint8(Responses))
	f.Fuzz(func(t *testing.T, body []byte, api uint8) {
		var r Request
		if ParseRequest(API(api), body, &r) != nil {
			return
		}
		m := decode(t, body)
		if s, _ := m["model"].(string); s != r.Model || r.HasModel != (s != "") {
			t.Fatalf("model %q, %v", r.Model, r.HasModel)
		}
		if b, _ := m["stream"].(bool); b != r.Stream {
			t.Fatalf("stream %v", r.Stream)
		}
		if r.N < 1 || r.BestOf < r.N || r.MaxTokens < -1 || r.PromptCount < 0 || r.PromptTokens < 0 {
			t.Fatalf("%+v", r)
		}
		if v, ok := decodeOr(t, r.PromptRaw()).([]any); ok {
			switch n := len(v); r.Prompt {
			case PromptTokens:
				ok = r.PromptTokens == int64(n) && r.PromptCount == 1
			case PromptMessages:
				ok = r.MessageCount == n && r.PromptCount == 1
			case PromptTexts:
				ok = r.PromptCount == n
			case PromptTokenLists:
				sum := 0
				for _, ids := range v {
					sum += len(ids.([]any))
				}
				ok = r.PromptCount == n && r.PromptTokens == int64(sum)
			}
			if !ok {
				t.Fatalf("%s: %+v", body, r)
			}
		}
		checkMatching(t, &r, m)
	})
}

// checkMatching compares the results of conversations and matching with the decoded body
// of a request.
func checkMatching(t *testing.T, r *Request, m map[string]any) {
	params, _ := m["conversation_params"].(map[string]any)
	metadata, _ := m["client_metadata"].(map[string]any)
	want := ""
	for _, v := range []any{params["conversation_id"], m["conversation_id"], m["session_id"], m["prompt_cache_key"], metadata["session_id"]} {
		if s, _ := v.(string); want == "" {
			want = strings.TrimSpace(s)
		}
	}
	if got := sources.ConversationID(r, func(string) string { return "" }); got != want {
		t.Fatalf("conversation %q, want %q", got, want)
	}
	salt, _ := m["cache_salt"].(string)
	extra, _ := m["extra_key"].(string)
	if got := r.CacheSalt(); got != salt+extra {
		t.Fatalf("salt %q", got)
	}
	holds := false
	items, known := decodeOr(t, r.PromptRaw()).([]any)
	known = known && r.Prompt == PromptMessages
	for _, item := range items {
		message, _ := item.(map[string]any)
		role, hasRole := message["role"].(string)
		kind, hasKind := message["type"].(string)
		holds = holds || role == "assistant" || role == "tool" || role == "function" || !hasRole && hasKind && kind != "message"
	}
	if r.API == Responses && m["previous_response_id"] != nil {
		holds, known = true, true
	}
	if gotHolds, gotKnown := r.HoldsAnswer(); gotHolds != holds && known || gotKnown != known {
		t.Fatalf("holds an answer: %v, %v; want %v, %v", gotHolds, gotKnown, holds, known)
	}
	ids, err := r.AppendTokenIDs(nil)
	if r.Prompt == PromptTokens {
		for i, item := range items {
			n, _ := strconv.ParseUint(item.(json.Number).String(), 10, 64)
			if whole := item.(json.Number).String() == strconv.FormatUint(n, 10) && n <= math.MaxUint32; err == nil && (!whole || ids[i] != uint32(n)) {
				t.Fatalf("token ids %v of %s", ids, r.PromptRaw())
			}
		}
	}
	if text := r.PromptText(); (text == nil) != (r.Prompt == PromptNone || r.PromptCount != 1) {
		t.Fatalf("got text %q", text)
	}
}

func decodeOr(t *testing.T, raw []byte) any {
	if raw == nil {
		return nil
	}
	return decodeValue(t, raw)
}

// TestReadTarget: the query of a route of an engine reaches the engine without PD fields, and
// names the model if the body does not.
func TestReadTarget(t *testing.T) {
	for _, tt := range []struct{ body, query, target, model, param string }{
		{`{}`, "", "/x", "", ""},
		{`{"model":"m"}`, "model=m&b=2&a=1", "/x?model=m&b=2&a=1", "m", ""},
		{`{"model":"m"}`, "model=&a=1", "/x?model=&a=1", "m", ""},
		{`{"model":"m"}`, "model=n&b=2&a=1", "", "", "model"},
		{`{"model":"m"}`, "Model=n", "", "", "Model"},
		{`{}`, "model[]=n", "", "", "model[]"},
		{`{}`, "b=%7e&rid=1&a=2", "/x?a=2&b=~", "", ""},
		{`{"model":null}`, "model=org%2Fn", "/x?model=org%2Fn", "org/n", ""},
		{`{}`, "rid=1&KV_Transfer_Params=2&bootstrap_room[0]=3&vllm_xargs[kv_transfer_params]=4&%72id=5", "/x", "", ""},
		{`{}`, "a=1;rid=2", "", "", "query"},
		{`{}`, "a=%zz", "", "", "query"},
		{`{}`, "model=" + strings.Repeat("m", MaxModel+1), "", "", "model"},
		{`{}`, "model=m%ff", "", "", "model"},
		{`{}`, "model=m&model=n", "", "", "model"},
	} {
		var r Request
		if err := ReadRequest(EngineRoute, "", []byte(tt.body), &r); err != nil {
			t.Fatal(err)
		}
		err := r.ReadTarget("/x", tt.query)
		var e *Error
		switch {
		case tt.param != "":
			if !errors.As(err, &e) || e.Status != 400 || e.Param != tt.param {
				t.Errorf("%s: %v", tt.query, err)
			}
		case err != nil || r.Path() != tt.target || r.Model != tt.model || r.HasModel != (tt.model != ""):
			t.Errorf("%s: got %q, model %q, %v", tt.query, r.Path(), r.Model, err)
		}
		if r.Reset(); r.Path() != "" {
			t.Errorf("after Reset: %q", r.Path())
		}
	}
}
