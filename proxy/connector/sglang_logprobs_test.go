package connector

import (
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Answers of /generate with return_logprob, in the form of SGLang's tokenizer manager,
// merged with prefill's lists first.
func TestMergeLogprobs(t *testing.T) {
	const (
		meta    = `{"id":"a","finish_reason":{"type":"length","length":1},"input_token_logprobs":[[null,1,null],[-0.5,2,"b"]],"input_top_logprobs":[null,[[-0.1,9,null]]],"output_token_logprobs":[[-1.25,3,null]]}`
		prefill = `{"text":"x","meta_info":` + meta + `}`
		batch   = `[` + prefill + `, {"text":"y","meta_info":{"input_token_logprobs":[[null,7,null]]}}]`
		lists   = `"input_token_logprobs":[[null,1,null],[-0.5,2,"b"]],"input_top_logprobs":[null,[[-0.1,9,null]]]`
	)
	for _, tt := range []struct {
		name, prefill, answer string
		events                bool
		want                  string // "": an error
	}{
		{"whole", prefill, `{"text":"x y","meta_info":{"input_token_logprobs": [ ],"input_top_logprobs":null,"n":18446744073709551615}}`, false,
			`{"text":"x y","meta_info":{"input_token_logprobs": ` + lists[len(`"input_token_logprobs":`):] + `,"n":18446744073709551615}}`},
		{"decode has some", prefill, `{"meta_info":{"input_token_logprobs":[[-2,4,null]]}}`, false,
			`{"meta_info":{"input_token_logprobs":[[null,1,null],[-0.5,2,"b"],[-2,4,null]]}}`},
		{"prefill has none", `{"meta_info":{"input_token_logprobs":[]}}`, `{"meta_info":{"input_token_logprobs":[[-2,4,null]]}}`, false,
			`{"meta_info":{"input_token_logprobs":[[-2,4,null]]}}`},
		{"not asked for", prefill, `{"text":"x","meta_info":{"id":"a"}}`, false, `{"text":"x","meta_info":{"id":"a"}}`},
		{"batch", batch, `[{"meta_info":{"input_token_logprobs":[]}},{"meta_info":{"input_token_logprobs":[]}}]`, false,
			`[{"meta_info":{"input_token_logprobs":[[null,1,null],[-0.5,2,"b"]]}},{"meta_info":{"input_token_logprobs":[[null,7,null]]}}]`},
		{"events", prefill, ": ping\n\ndata: {\"meta_info\":{\"input_token_logprobs\":[]}}\r\n\r\ndata:{\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n", true,
			": ping\n\ndata: {\"meta_info\":{\"input_token_logprobs\":[[null,1,null],[-0.5,2,\"b\"]]}}\n\r\ndata: {\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n"},
		{"events of a batch", batch, "data: {\"meta_info\":{\"input_token_logprobs\":[]},\"index\":1}\n\n", true,
			"data: {\"meta_info\":{\"input_token_logprobs\":[[null,7,null]]},\"index\":1}\n\n"},
		{"answers more than prompts", batch, `[{"meta_info":{}},{"meta_info":{}},{"meta_info":{}}]`, false, ""},
		{"an event of no prompt", batch, "data: {\"meta_info\":{},\"index\":2}\n\n", true, ""},
		{"no JSON", prefill, `{"meta_info":`, false, ""},
		{"no answer", prefill, `"x"`, false, ""},
		{"half an event", prefill, "data: {\"meta_info\":{\n\n", true, ""},
	} {
		got, err := sglang{}.Merge([]byte("> "), &Handoff{Extra: []byte(tt.prefill)}, []byte(tt.answer), tt.events)
		if tt.want == "" && err == nil || tt.want != "" && (err != nil || string(got) != "> "+tt.want) {
			t.Errorf("%s: %v\n got %s\nwant %s", tt.name, err, got, tt.want)
		}
	}
}

func TestMerges(t *testing.T) {
	for body, want := range map[string]bool{
		`{"text":"x","return_logprob":true}`:               true,
		`{"text":["x","y"],"return_logprob":[false,true]}`: true,
		`{"text":"x","return_logprob":false}`:              false,
		`{"text":"return_logprob true"}`:                   false,
	} {
		if got := (sglang{}).Merges(request(t, "/generate", body)); got != want {
			t.Errorf("%s: (sglang{}).Merges = %v, want %v", body, got, want)
		}
	}
	if (sglang{}).Merges(request(t, "/v1/completions", `{"prompt":"x","return_logprob":true}`)) {
		t.Error("completions have no such answer")
	}
}

// FuzzMerge: for any answers of engines, valid JSON stays valid when merged, and
// nothing of it is lost.
func FuzzMerge(f *testing.F) {
	f.Add(`{"meta_info":{"input_token_logprobs":[[null,1,null]]}}`, `{"text":"x","meta_info":{"input_token_logprobs":[ ]}}`, false)
	f.Add(`[{"meta_info":{"input_top_logprobs":[1]}}]`, "data: {\"index\":0,\"meta_info\":{\"input_top_logprobs\":[2]}}\n\n", true)
	f.Add(`{}`, `[]`, false)
	f.Fuzz(func(t *testing.T, prefill, answer string, events bool) {
		var p openai.Object
		if p.Parse([]byte(prefill)) != nil {
			return // ReadPrefill would have rejected it
		}
		got, err := sglang{}.Merge(nil, &Handoff{Extra: []byte(prefill)}, []byte(answer), events)
		if err != nil {
			return
		}
		if events {
			if strings.Count(string(got), "\n") < strings.Count(answer, "\n") {
				t.Fatalf("%q became %q", answer, got)
			}
			return
		}
		if _, _, err := openai.Lookup(got); err != nil {
			t.Fatalf("%q became %q: %v", answer, got, err)
		}
	})
}
