package continuation

import (
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// read parses a request of a route.
func read(t *testing.T, api openai.API, body string) *openai.Request {
	t.Helper()
	r := new(openai.Request)
	if err := openai.ParseRequest(api, []byte(body), r); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return r
}

const (
	completion = `{"model":"m","prompt":"hi","stream":true`
	chat       = `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true`
	native     = `{"text":"hi","stream":true`
	generate   = `{"token_ids":[1],"stream":true,"sampling_params":{"temperature":0`
)

func TestCheck(t *testing.T) {
	for _, c := range []struct {
		d    tokens.Dialect
		api  openai.API
		body string // without its last braces
		want Reason
	}{
		{tokens.VLLM, openai.Completions, completion, ""},
		{tokens.VLLM, openai.Chat, chat, ""},
		{tokens.VLLM, openai.VLLMGenerate, generate + "}", ""},
		{tokens.SGLang, openai.Completions, completion, ""},
		{tokens.SGLang, openai.Chat, chat, NoIDs},
		{tokens.SGLang, openai.Generate, native, Cumulative},
		{tokens.TRTLLM, openai.Completions, completion, NoIDs},
		{tokens.TRTLLM, openai.Chat, chat, NoIDs},
		{tokens.NoTokenizer, openai.Completions, completion, NoIDs},
		{tokens.VLLM, openai.Responses, `{"model":"m","input":"hi","stream":true`, NoIDs},
		{tokens.VLLM, openai.Messages, `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"hi"}]`, NoIDs},
		{tokens.VLLM, openai.Embeddings, `{"model":"m","input":"hi"`, NoIDs},

		{tokens.VLLM, openai.Chat, chat + `,"include_reasoning":false`, NoIDs},
		{tokens.VLLM, openai.Chat, chat + `,"include_reasoning":true`, ""},
		{tokens.VLLM, openai.Completions, completion + `,"n":2`, Sequences},
		{tokens.VLLM, openai.Completions, completion + `,"best_of":2`, Sequences},
		{tokens.VLLM, openai.Completions, completion + `,"use_beam_search":true`, Sequences},
		{tokens.VLLM, openai.Completions, `{"model":"m","prompt":["a","b"]`, Sequences},
		{tokens.VLLM, openai.Completions, `{"model":"m","prompt":["a"]`, ""},
		{tokens.VLLM, openai.VLLMGenerate, generate + `,"n":2}`, Sequences},
		{tokens.VLLM, openai.Chat, chat + `,"response_format":{"type":"text"}`, ""},
		{tokens.VLLM, openai.Chat, chat + `,"response_format":{"type":"json_object"}`, Guided},
		{tokens.VLLM, openai.Chat, chat + `,"response_format":{}`, Guided},
		{tokens.VLLM, openai.Chat, chat + `,"response_format":null,"structured_outputs":null`, ""},
		{tokens.VLLM, openai.Chat, chat + `,"structured_outputs":{"regex":"a"}`, Guided},
		{tokens.VLLM, openai.VLLMGenerate, generate + `,"structured_outputs":{}}`, Guided},
		{tokens.SGLang, openai.Completions, completion + `,"regex":"a"`, Guided},
		{tokens.VLLM, openai.Chat, chat + `,"tools":[],"tool_choice":"auto"`, ""},
		{tokens.VLLM, openai.Chat, chat + `,"tools":[],"tool_choice":"required"`, Guided},
		{tokens.VLLM, openai.Chat, chat + `,"tools":[],"tool_choice":{"type":"function"}`, Guided},
		{tokens.VLLM, openai.Completions, completion + `,"presence_penalty":0,"frequency_penalty":0.0`, ""},
		{tokens.VLLM, openai.Completions, completion + `,"presence_penalty":0.1`, Sampling},
		{tokens.VLLM, openai.VLLMGenerate, generate + `,"frequency_penalty":1}`, Sampling},
		{tokens.VLLM, openai.VLLMGenerate, generate + `,"stop":["a"]}`, Sampling},
		{tokens.VLLM, openai.VLLMGenerate, generate + `,"stop":[],"stop_token_ids":[1]}`, ""},
		{tokens.VLLM, openai.Completions, completion + `,"repetition_penalty":1.1`, ""},
		{tokens.SGLang, openai.Completions, completion + `,"repetition_penalty":1.0`, ""},
		{tokens.SGLang, openai.Completions, completion + `,"repetition_penalty":1.1`, Sampling},
		{tokens.SGLang, openai.Completions, completion + `,"stop_regex":"a"`, Sampling},
		{tokens.VLLM, openai.Completions, completion + `,"bad_words":[],"seed":7,"temperature":1,"stop":["a"],"logprobs":1`, ""},
		{tokens.VLLM, openai.Completions, completion + `,"bad_words":["a"]`, Sampling},
		{tokens.VLLM, openai.Chat, chat + `,"thinking_token_budget":9`, Sampling},
		{tokens.VLLM, openai.Completions, completion + `,"echo":false,"suffix":""`, ""},
		{tokens.VLLM, openai.Completions, completion + `,"echo":true`, Prompt},
		{tokens.VLLM, openai.Completions, completion + `,"suffix":"a"`, Prompt},
		{tokens.VLLM, openai.Chat, chat + `,"prompt_logprobs":1`, Prompt},
		{tokens.VLLM, openai.Chat, `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]`, Prompt},
		{tokens.VLLM, openai.VLLMGenerate, generate + `},"features":{}`, Prompt},
	} {
		body := c.body + "}"
		if got := Check(c.d, read(t, c.api, body)); got != c.want {
			t.Errorf("%v %s: %q, want %q", c.d, body, got, c.want)
		}
	}
}

func TestBody(t *testing.T) {
	for _, c := range []struct {
		api        openai.API
		body, want string
		left       int64
	}{
		{openai.Completions, completion + "}", `{"max_tokens":13,"return_token_ids":true,"model":"m","prompt":[7,8,9,10,4294967295],"stream":true}`, 13},
		{openai.Completions, completion + `,"max_tokens":100,"min_tokens":5,"truncate_prompt_tokens":4}`,
			`{"return_token_ids":true,"model":"m","prompt":[7,8,9,10,4294967295],"stream":true,"max_tokens":97,"min_tokens":2}`, 97},
		{openai.Completions, `{"model":"m","prompt":["hi"],"max_tokens":4,"min_tokens":1,"return_token_ids":false}`,
			`{"model":"m","prompt":[7,8,9,10,4294967295],"max_tokens":1,"min_tokens":0,"return_token_ids":true}`, 1},
		{openai.Completions, completion + `,"max_tokens":3}`, "", 0},
		{openai.Chat, chat + "}", `{"return_token_ids":true,"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`, -1},
		{openai.Chat, chat + `,"max_tokens":9,"max_completion_tokens":8,"truncation_side":"left"}`,
			`{"return_token_ids":true,"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":6,"max_completion_tokens":5}`, 5},
		{openai.VLLMGenerate, generate + "}}", `{"token_ids":[7,8,9,10,4294967295],"stream":true,"sampling_params":{"temperature":0}}`, -1},
		{openai.VLLMGenerate, generate + `,"max_tokens":9,"min_tokens":4}}`,
			`{"token_ids":[7,8,9,10,4294967295],"stream":true,"sampling_params":{"temperature":0,"max_tokens":6,"min_tokens":1}}`, 6},
	} {
		r := read(t, c.api, c.body)
		if got := Left(r, 3); got != c.left {
			t.Errorf("%s: %d tokens left, want %d", c.body, got, c.left)
		}
		if c.left == 0 {
			continue
		}
		ids := []uint32{7, 8, 9, 10, 1<<32 - 1}
		room := make([]byte, 0, BodyRoom(r, TextOf(ids)))
		got, err := Body(room, r, ids, 3)
		if err == nil && &got[0] != &room[:1][0] {
			t.Errorf("%s has no room in %d bytes", got, cap(room))
		}
		if err != nil || string(got) != c.want {
			t.Errorf("%s: %v\n%s, want\n%s", c.body, err, got, c.want)
		}
	}
}

// TestBodyRoom: the largest limits have room too.
func TestBodyRoom(t *testing.T) {
	const limits = `"min_tokens":2147483647,"max_tokens":2147483647`
	for api, body := range map[openai.API]string{
		openai.Completions:  `{"prompt":"","max_completion_tokens":2147483647,` + limits + `}`,
		openai.Chat:         `{"messages":[{"role":"user","content":""}],"max_completion_tokens":2147483647,` + limits + `}`,
		openai.VLLMGenerate: `{"token_ids":[1],"sampling_params":{` + limits + `}}`,
	} {
		r := read(t, api, body)
		for _, ids := range [][]uint32{{0}, {9, 10, 99, 100, 1<<32 - 1}, make([]uint32, 5000)} {
			text := AppendIDs(nil, ids)
			if len(text) != TextOf(ids) {
				t.Errorf("%.50s has %d bytes, want %d", text, len(text), TextOf(ids))
			}
			room := make([]byte, 0, BodyRoom(r, len(text)))
			if got, err := Body(room, r, ids, 0); err != nil || &got[0] != &room[:1][0] {
				t.Errorf("%.200s has no room in %d bytes: %v", got, cap(room), err)
			}
		}
	}
}

func TestAsk(t *testing.T) {
	for body, want := range map[string]string{
		completion + "}": `{"return_token_ids":true,"model":"m","prompt":"hi","stream":true}`,
		completion + `,"return_token_ids":false}`: `{"model":"m","prompt":"hi","stream":true,"return_token_ids":true}`,
	} {
		r := read(t, openai.Completions, body)
		if got := string(r.Append(nil, Ask(nil, r)...)); got != want || Asked(r) {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if r := read(t, openai.VLLMGenerate, generate+"}}"); len(Ask(nil, r)) != 0 {
		t.Error("a route that always has ids is asked for them")
	}
	if !Asked(read(t, openai.Completions, completion+`,"return_token_ids":true}`)) || strings.Contains(completion, askMember) {
		t.Error("a client's own question is not seen")
	}
}

func TestStub(t *testing.T) {
	const user = `{"role":"user","content":"-"}`
	for _, c := range []struct {
		api        openai.API
		body, want string
	}{
		{openai.Completions, completion + `,"seed":1}`, `{"model":"m","prompt":[0],"stream":true,"seed":1}`},
		{openai.VLLMGenerate, generate + "}}", strings.Replace(generate+"}}", "[1]", "[0]", 1)},
		{openai.Chat, chat + `,"tools":[]}`, `{"model":"m","messages":[` + user + `],"stream":true,"tools":[]}`},
		{openai.Chat, chat + `,"tools":[{"type":"function"}]}`, chat + `,"tools":[{"type":"function"}]}`},
	} {
		r := read(t, c.api, c.body)
		room := make([]byte, 0, StubRoom(r))
		stub := Stub(room, r)
		if &stub[0] != &room[:1][0] {
			t.Errorf("%s has no room in %d bytes", stub, cap(room))
		}
		got := string(stub)
		if got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
		ids := []uint32{1, 2, 3}
		whole, _ := Body(nil, r, ids, 1)
		want := string(whole)
		if strings.Contains(c.want, user) {
			want = strings.Replace(want, `{"role":"user","content":"hi"}`, user, 1)
		}
		if stub, err := Body(nil, read(t, c.api, got), ids, 1); err != nil || string(stub) != want {
			t.Errorf("the stub gives %s, %v, want %s", stub, err, want)
		}
	}
}
