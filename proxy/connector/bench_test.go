package connector

import (
	"strings"
	"testing"
)

// longChat is a chat request of about n bytes.
func longChat(n int) string {
	return `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", n/5) +
		`"}],"max_tokens":64,"temperature":0.7,"stream":true,"stream_options":{"include_usage":true}}`
}

const moriioAnswer = `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],` +
	`"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[12,13,14]],"remote_engine_id":"10.0.0.5:6301","remote_host":"10.0.0.5",` +
	`"remote_handshake_port":6301,"remote_notify_port":61005,"remote_dp_rank":0,"remote_dp_size":1,"tp_size":1,"transfer_id":"tx-0123456789abcdef0123456789abcdef"}}`

// answers is prefill's answer by connector.
var answers = map[string]string{
	"vllm-nixl": `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],` +
		`"usage":{"prompt_tokens":41,"completion_tokens":1},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[12,13,14]],` +
		`"remote_engine_id":"5f1e6d","remote_request_id":"r-1a2b3c4d","remote_host":"10.0.0.5","remote_port":5600,"tp_size":1,"transfer_mode":"pull"}}`,
	"vllm-nixl-push": `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],` +
		`"usage":{"prompt_tokens":41,"completion_tokens":1},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[12,13,14]],` +
		`"remote_engine_id":"p0","remote_request_id":"r-1a2b3c4d","remote_host":"10.0.0.5","remote_port":5600,"tp_size":1,"pp_size":1,"transfer_mode":"push"}}`,
	"vllm-store":       `{"id":"chatcmpl-1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],"kv_transfer_params":null}`,
	"vllm-moriio":      moriioAnswer,
	"vllm-moriio-read": moriioAnswer,
	"vllm-mooncake":    `{"id":"1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],"kv_transfer_params":null}`,
	"vllm-p2p-tier":    `{"id":"1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],"kv_transfer_params":null}`,
	"sglang":           `{"id":"1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}]}`,
	"trtllm": `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","prompt_token_ids":[5,6,7,8],"usage":{"prompt_tokens":4,"completion_tokens":1},` +
		`"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length","disaggregated_params":{"request_type":"context_only",` +
		`"ctx_request_id":2072360727809029,"disagg_request_id":2072360727809029,"first_gen_tokens":[42],"encoded_opaque_state":"AAECAw=="}}]}`,
}

func BenchmarkLegs(b *testing.B) {
	for _, c := range All() {
		a := pair(b, "/v1/chat/completions", longChat(2048))
		dst := make([]byte, 0, 8<<10)
		shape := func(name string, f func() (Leg, error)) {
			b.Run(c.Name()+"/"+name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := f(); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
		shape("aggregated", func() (Leg, error) { return c.Aggregated(a, dst) })
		answer := []byte(answers[c.Name()])
		if len(answer) == 0 {
			continue
		}
		shape("prefill", func() (Leg, error) { return c.Prefill(a, dst) })
		h, err := c.ReadPrefill(a, answer)
		if err != nil {
			b.Fatal(err)
		}
		shape("decode", func() (Leg, error) { return c.Decode(a, &h, dst) })
		b.Run(c.Name()+"/read", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.ReadPrefill(a, answer); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestLegAllocations bounds the allocations: a leg built into a reused buffer allocates
// at most its header slice. For some connectors it also allocates the changed params,
// which are a value inside another. Reading prefill's answer allocates texts that are
// compared, and the scan's memory.
func TestLegAllocations(t *testing.T) {
	limits := map[string][4]float64{ // aggregated, prefill, decode, reading prefill's answer
		"vllm-nixl":      {1, 1, 1, 2},
		"vllm-store":     {1, 1, 1, 1},
		"vllm-nixl-push": {1, 3, 3, 3}, // the parameters, which contain the transfer's id
		// The parameters, and the request id with its two addresses. In READ mode also
		// prefill's own parameters.
		"vllm-moriio":      {1, 4, 4, 3},
		"vllm-moriio-read": {1, 4, 34, 6},
		"vllm-p2p-tier":    {1, 3, 3, 1}, // the parameters and the transfer's id
		"vllm-mooncake":    {1, 4, 5, 2}, // the parameters and the ids that they name
		"sglang":           {0, 0, 0, 2},
		"trtllm":           {0, 0, 10, 11},
		"none":             {1, 0, 0, 0},
	}
	dst := make([]byte, 0, 8<<10)
	for _, c := range All() {
		a := pair(t, "/v1/chat/completions", longChat(2048))
		limit := limits[c.Name()]
		check := func(name string, most float64, f func()) {
			if got := testing.AllocsPerRun(50, f); got > most {
				t.Errorf("%s, %s leg: %v allocations, want %v at most", c.Name(), name, got, most)
			}
		}
		check("aggregated", limit[0], func() { _, _ = c.Aggregated(a, dst) })
		if c.Name() == "none" {
			continue
		}
		answer := []byte(answers[c.Name()])
		h, err := c.ReadPrefill(a, answer)
		if err != nil {
			t.Fatal(err)
		}
		check("prefill's answer to the", limit[3], func() { _, _ = c.ReadPrefill(a, answer) })
		check("prefill", limit[1], func() { _, _ = c.Prefill(a, dst) })
		check("decode", limit[2], func() { _, _ = c.Decode(a, &h, dst) })
	}
}
