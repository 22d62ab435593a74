package tokens

import (
	"encoding/json"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

func TestQuestionsAreTheClientsBytes(t *testing.T) {
	for _, tt := range []struct {
		name    string
		api     openai.API
		dialect Dialect
		body    string
		want    [][2]string // path and body, in the order of preference
	}{
		{"vllm prompt", openai.Completions, VLLM,
			`{"stream":true,"model":"m","prompt":"a\u00e9\n\"","max_tokens":5,"add_special_tokens":false}`,
			[][2]string{{"/tokenize", `{"model":"m","add_special_tokens":false,"prompt":"a\u00e9\n\""}`},
				{"/v1/completions/render", `{"model":"m","prompt":"a\u00e9\n\"","max_tokens":5,"add_special_tokens":false}`}}},
		{"vllm list of one", openai.Completions, VLLM, `{"prompt": [ "x" ]}`,
			[][2]string{{"/tokenize", `{"prompt":"x"}`}, {"/v1/completions/render", `{"prompt": [ "x" ]}`}}},
		{"vllm truncated", openai.Completions, VLLM, `{"prompt":"x","truncate_prompt_tokens":4}`,
			[][2]string{{"/v1/completions/render", `{"prompt":"x","truncate_prompt_tokens":4}`}}},
		{"vllm empty prompt", openai.Completions, VLLM, `{"prompt":"","n":1}`,
			[][2]string{{"/v1/completions/render", `{"prompt":"","n":1}`}}},
		{"vllm chat", openai.Chat, VLLM,
			`{"model":"m","messages":[ {"role":"user","content":"x"} ],"tools":[{"type":"function","function":{"name":"f"}}],` +
				`"chat_template_kwargs":{"enable_thinking": false},"add_generation_prompt":false,"continue_final_message":true,"temperature":0.10,"stream":true,"kv_transfer_params":{"a":1}}`,
			[][2]string{{"/v1/chat/completions/render",
				`{"model":"m","messages":[ {"role":"user","content":"x"} ],"tools":[{"type":"function","function":{"name":"f"}}],` +
					`"chat_template_kwargs":{"enable_thinking": false},"add_generation_prompt":false,"continue_final_message":true,"temperature":0.10}`},
				{"/tokenize", `{"model":"m","messages":[ {"role":"user","content":"x"} ],"tools":[{"type":"function","function":{"name":"f"}}],` +
					`"add_generation_prompt":false,"continue_final_message":true,"chat_template_kwargs":{"enable_thinking": false}}`}}},
		{"vllm chat that /tokenize cannot express", openai.Chat, VLLM, `{"messages":[{"role":"user","content":"x"}],"reasoning_effort":"high"}`,
			[][2]string{{"/v1/chat/completions/render", `{"messages":[{"role":"user","content":"x"}],"reasoning_effort":"high"}`}}},
		{"sglang prompt", openai.Completions, SGLang, `{"model":"m","prompt":"x","add_special_tokens":false}`,
			[][2]string{{"/v1/tokenize", `{"model":"m","prompt":"x"}`}}},
		{"sglang native", openai.Generate, SGLang, `{"text":"x","sampling_params":{"max_new_tokens":1}}`,
			[][2]string{{"/v1/tokenize", `{"prompt":"x"}`}}},
		{"sglang native with an image", openai.Generate, SGLang, `{"text":"x","image_data":"http://a/b.png"}`, nil},
		{"sglang chat", openai.Chat, SGLang, `{"rid":"r","messages":[{"role":"user","content":"x"}],"reasoning_effort":"low","bootstrap_room":3,"bootstrap_host":"h"}`,
			[][2]string{{"/v1/tokenize", `{"messages":[{"role":"user","content":"x"}],"reasoning_effort":"low"}`}}},
		{"sglang chat of a hostile client", openai.Chat, SGLang,
			`{"ec_transfer_params":{},"bootstrap_pair_key":"k","decode_tp_size":2,"routed_dp_rank":1,"prompt_token_ids_b64":"AA==","encoder_urls":["http://h"],"kv_hints":{},"messages":[{"role":"user","content":"x"}],"vllm_xargs":{"kv_transfer_params":{},"a":1}}`,
			[][2]string{{"/v1/tokenize", `{"messages":[{"role":"user","content":"x"}],"vllm_xargs":{"a":1}}`}}},
		{"vllm completion of a hostile client", openai.Completions, VLLM,
			`{"prompt":"","request_id":"r","data_parallel_rank":0,"vllm_xargs":{"kv_transfer_params":{},"ec_transfer_params":{}},"http_worker_ipc":"tcp://h:1"}`,
			[][2]string{{"/v1/completions/render", `{"prompt":"","vllm_xargs":{}}`}}},
		{"trtllm prompt", openai.Completions, TRTLLM, `{"model":"m","prompt":"x","max_tokens":3}`,
			[][2]string{{"/_internal/tokenize", `{"model":"m","prompt":"x"}`}}},
		{"trtllm without special tokens", openai.Completions, TRTLLM, `{"prompt":"x","add_special_tokens":false}`, nil},
		{"trtllm chat", openai.Chat, TRTLLM, `{"messages":[{"role":"user","content":"x"}]}`, nil},
		{"silent", openai.Completions, NoTokenizer, `{"prompt":"x"}`, nil},
		{"vllm messages", openai.Messages, VLLM,
			`{"model":"m","max_tokens":1,"system":"s","messages":[{"role":"user","content":"x"}],"thinking":{"type":"adaptive"},"stream":true,"kv_transfer_params":{"a":1}}`,
			[][2]string{{"/v1/messages/render", `{"model":"m","max_tokens":1,"system":"s","messages":[{"role":"user","content":"x"}],"thinking":{"type":"adaptive"}}`}}},
		{"vllm messages without a model", openai.Messages, VLLM, `{"max_tokens":1,"messages":[{"role":"user","content":"x"}]}`, nil},
		{"sglang messages", openai.Messages, SGLang, `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}]}`, nil},
		{"vllm responses", openai.Responses, VLLM, `{"model":"m","input":[{"role":"user","content":"x"}],"instructions":"s","previous_response_id":null,"store":true,"stream":true}`,
			[][2]string{{"/v1/responses/render", `{"model":"m","input":[{"role":"user","content":"x"}],"instructions":"s","previous_response_id":null,"store":true}`}}},
		{"vllm response to an earlier one", openai.Responses, VLLM, `{"input":"x","previous_response_id":"resp_1"}`, nil},
		{"sglang responses", openai.Responses, SGLang, `{"model":"m","input":"x"}`, nil},
		{"two prompts", openai.Completions, VLLM, `{"prompt":["x","y"]}`, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := request(t, tt.api, tt.body)
			var got [][2]string
			for w := way(1); w < ways; w++ {
				if w.dialect() == tt.dialect && w.suits(r) {
					body := w.appendBody(nil, r)
					if !json.Valid(body) {
						t.Errorf("%s gets invalid JSON %s", w.path(), body)
					}
					got = append(got, [2]string{w.path(), string(body)})
				}
			}
			if len(got) != len(tt.want) {
				t.Fatalf("got %q", got)
			}
			for i := range got {
				if got[i] != tt.want[i] {
					t.Errorf("got  %s\nwant %s", got[i], tt.want[i])
				}
			}
		})
	}
}
