package tokens

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestAnswersOfEachEndpoint(t *testing.T) {
	for _, tt := range []struct {
		name   string
		way    way
		answer string
		want   []uint32
	}{
		{"vllm tokenize", tokenizePrompt, `{"count":3,"max_model_len":4096,"tokens":[1,15043,3186],"token_strs":null}`, []uint32{1, 15043, 3186}},
		{"sglang", sglangPrompt, `{"tokens":[1, 2],"count":2,"max_model_len":131072}`, []uint32{1, 2}},
		{"trtllm", trtllmPrompt, `{"count":1,"tokens":[7]}`, []uint32{7}},
		{"no count", tokenizePrompt, `{"tokens":[4294967295]}`, []uint32{1<<32 - 1}},
		{"render chat", renderChat, `{"request_id":"chatcmpl-1","token_ids":[1,2],"features":null,"sampling_params":{"n":1},"model":"m","stream":false}`, []uint32{1, 2}},
		{"render messages", renderMessages, `{"request_id":"chatcmpl-1","token_ids":[1,2],"features":null,"sampling_params":{"n":1},"model":"m","stream":false}`, []uint32{1, 2}},
		{"render responses", renderResponses, `{"request_id":"resp_1","token_ids":[4],"features":null,"sampling_params":{"n":1},"model":"m","stream":false}`, []uint32{4}},
		{"render completions", renderPrompt, `[{"request_id":"cmpl-1","token_ids":[3],"sampling_params":{}}]`, []uint32{3}},
		{"count of another list", tokenizePrompt, `{"tokens":[1],"count":2}`, nil},
		{"count without tokens", trtllmPrompt, `{"count":1}`, nil},
		{"tokens of a list of prompts", sglangPrompt, `{"tokens":[[1]],"count":[1]}`, nil},
		{"null", trtllmPrompt, `{"count":1,"tokens":null}`, nil},
		{"empty", renderChat, `{"token_ids":[]}`, nil},
		{"negative", renderChat, `{"token_ids":[-1]}`, nil},
		{"fraction", renderChat, `{"token_ids":[1.5]}`, nil},
		{"exponent", renderChat, `{"token_ids":[1e3]}`, nil},
		{"too large", renderChat, `{"token_ids":[4294967296]}`, nil},
		{"text", renderChat, `{"token_ids":["1"]}`, nil},
		{"cut off", renderChat, `{"token_ids":[1,2`, nil},
		{"twice", renderChat, `{"token_ids":[1],"token_ids":[2]}`, nil},
		{"a list of none", renderPrompt, `[]`, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := tt.way.readAnswer(200, []byte(tt.answer))
			if !slices.Equal(got, tt.want) || (err == nil) != (tt.want != nil) {
				t.Errorf("got %v, %v", got, err)
			}
			if err != nil && !errors.Is(err, errAnswer) {
				t.Errorf("got error %v, want a marked one", err)
			}
		})
	}
}

func TestRenderOfAnotherVersionIsNoEndpoint(t *testing.T) {
	for way, answer := range map[way]string{
		renderChat:   `[[{"role":"user","content":"x"}],[{"prompt_token_ids":[1,2]}]]`,
		renderPrompt: `[{"prompt_token_ids":[1,2]}]`,
	} {
		if ids, err := way.readAnswer(200, []byte(answer)); ids != nil || reasonOf(t.Context(), err) != Unsupported {
			t.Errorf("got %v, %v", ids, err)
		}
	}
}

func TestAppendIDsReadsWhatJSONWrites(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	want := make([]uint32, 10000)
	for i := range want {
		want[i] = r.Uint32() >> r.IntN(32)
	}
	raw, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := AppendIDs([]uint32{42}, raw)
	if err != nil || got[0] != 42 || !slices.Equal(got[1:], want) {
		t.Errorf("lost ids: %v", err)
	}
	spaced := strings.ReplaceAll(string(raw), ",", " ,\n\t")
	if got, err := AppendIDs(nil, []byte(" "+spaced+"\r\n")); err != nil || !slices.Equal(got, want) {
		t.Errorf("white space: %v", err)
	}
}

func FuzzAppendIDs(f *testing.F) {
	for _, s := range []string{`[1,2]`, `[ 0 ]`, `[]`, `[01]`, `[4294967295]`, `[4294967296]`, `[99999999999999999999999]`, `[1`, `[1,]`, `[1]x`, `x`, ``, `[-1]`, `[1 2]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		got, err := AppendIDs(nil, raw)
		var want []uint32
		if jerr := json.Unmarshal(raw, &want); (jerr == nil && len(want) > 0) != (err == nil) {
			// encoding/json accepts null as an element; AppendIDs does not.
			if !strings.Contains(string(raw), "null") {
				t.Fatalf("%q: AppendIDs error %v, encoding/json error %v", raw, err, jerr)
			}
			return
		}
		if err == nil && !slices.Equal(got, want) {
			t.Fatalf("%q: got %v, want %v", raw, got, want)
		}
	})
}

func FuzzReadAnswer(f *testing.F) {
	f.Add(uint8(renderChat-1), 200, []byte(`{"token_ids":[1]}`))
	f.Add(uint8(renderResponses-1), 200, []byte(`{"token_ids":[1]}`))
	f.Add(uint8(tokenizePrompt-1), 200, []byte(`{"tokens":[1],"count":1}`))
	f.Add(uint8(renderPrompt-1), 200, []byte(`[{"token_ids":[1]}]`))
	f.Add(uint8(2), 404, []byte(`{"detail":"Not Found"}`))
	f.Add(uint8(renderMessages-1), 403, []byte(`{"error":{"type":"PermissionDeniedError"}}`))
	f.Fuzz(func(t *testing.T, w uint8, status int, answer []byte) {
		ids, err := (way(w)%(ways-1) + 1).readAnswer(status, answer)
		if (err == nil) != (len(ids) > 0) {
			t.Fatalf("%d ids with error %v", len(ids), err)
		}
	})
}

func TestMissingRoutesAreToldFromUnknownModels(t *testing.T) {
	for _, tt := range []struct {
		status int
		body   string
		want   bool
	}{
		{404, `{"detail":"Not Found"}`, true},
		{404, `404 page not found`, true},
		{404, `{"error":{"message":"The model does not exist.","type":"NotFoundError","param":"model","code":404}}`, false},
		{404, `{"object":"error","message":"m","type":"NotFoundError","param":null,"code":404}`, false},
		{405, `{"detail":"Method Not Allowed"}`, true},
		{501, ``, true},
		{403, `{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.","type":"PermissionDeniedError","param":null,"code":403}}`, true},
		{403, `{"error":{"message":"no","type":"Forbidden","param":null,"code":403}}`, false},
		{403, `forbidden`, false},
		{400, `{"detail":"x"}`, false},
		{500, ``, false},
	} {
		if got := absent(tt.status, []byte(tt.body)); got != tt.want {
			t.Errorf("got %d, %s: absent(tt.status, []byte(tt.body)) = %t, want %t", tt.status, tt.body, got, tt.want)
		}
	}
}
