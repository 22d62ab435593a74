package connector

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// A generation worker's transfer data does not reach the client.
func TestPublic(t *testing.T) {
	const (
		params = `{"request_type":"generation_only","ctx_request_id":2072360727809029,"encoded_opaque_state":"AAECAw=="}`
		echoed = `{"id":"cmpl-1", "choices":[{"index":0,"text":" \"x\"","disaggregated_params":` + params + `,"stop_reason":null}, {"index":1,"text":"y"}],"usage":{"prompt_tokens":4}}`
		public = `{"id":"cmpl-1", "choices":[{"index":0,"text":" \"x\"","disaggregated_params":null,"stop_reason":null},{"index":1,"text":"y"}],"usage":{"prompt_tokens":4}}`
	)
	target := engine.Target{Instance: new(engine.Instance)}
	pair := Attempt{Prefill: target, Decode: target}
	for _, tt := range []struct {
		name         string
		c            Connector
		a            Attempt
		answer, want string
	}{
		{"echoed", trtllm{}, pair, echoed, public},
		{"nothing said", trtllm{}, pair, public, public},
		{"nothing there", trtllm{}, pair, `{"choices": [ {"index":0} ]}`, `{"choices": [ {"index":0} ]}`},
		{"a client's text", trtllm{}, pair, `{"choices":[{"text":"\"disaggregated_params\":{}"}]}`, `{"choices":[{"text":"\"disaggregated_params\":{}"}]}`},
		{"trusted", trtllm{}, Attempt{Prefill: target, Decode: target, Trust: true}, echoed, echoed},
		{"aggregated", trtllm{}, Attempt{Decode: target}, echoed, echoed},
		{"no JSON", trtllm{}, pair, `"disaggregated_params"`, `"disaggregated_params"`},
		{"no choices", trtllm{}, pair, `{"disaggregated_params":1}`, `{"disaggregated_params":1}`},
		{"a choice of no shape", trtllm{}, pair, `{"choices":["disaggregated_params"]}`, `{"choices":["disaggregated_params"]}`},
		{"vLLM", nixl{}, pair, echoed, echoed},
		{"vLLM in push mode", nixlPush{}, pair, echoed, echoed},
		{"vLLM with a store", vllmStore{}, pair, echoed, echoed},
		{"MoRI-IO", moriio{}, pair, echoed, echoed},
		{"SGLang", sglang{}, pair, echoed, echoed},
		{"none", none{}, pair, echoed, echoed},
	} {
		if got := string(tt.c.Public(&tt.a, []byte(tt.answer))); got != tt.want {
			t.Errorf("%s: %s\nwant %s", tt.name, got, tt.want)
		}
	}
}

// PDMember names the members that a policy may not edit.
func TestPDMember(t *testing.T) {
	for _, tt := range []struct {
		key, value string
		want       bool
	}{
		{"rid", "", true}, {"kv_transfer_params", "{}", true}, {"data_parallel_rank", "1", true}, {"vllm_xargs", `{"a":1}`, true},
		{"sampling_params", `{"extra_args":{}}`, true}, {"sampling_params", `{"top_k":1}`, false}, {"sampling_params", `1,`, true},
		{"sampling_params", "", false}, {"temperature", "1", false},
	} {
		if got := PDMember(tt.key, []byte(tt.value)); got != tt.want {
			t.Errorf("%s, %s: PDMember(tt.key, []byte(tt.value)) = %v, want %v", tt.key, tt.value, got, tt.want)
		}
	}
}
