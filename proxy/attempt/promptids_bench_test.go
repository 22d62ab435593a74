package attempt_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// BenchmarkSharedPrompt is the work from prefill's answer to decode's leg: with the text of the prompt
// alone, and with the token ids of the answer beside it. A token has four bytes of text.
func BenchmarkSharedPrompt(b *testing.B) {
	conn, _ := connector.ByName("vllm-nixl")
	for _, size := range []int{2 << 10, 8 << 10, 32 << 10, 256 << 10} {
		body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word", size/4) + `"}],"max_tokens":5,"stream":true}`
		for _, ids := range []bool{false, true} {
			n := size / 4
			list := ""
			if ids {
				list = `"prompt_token_ids":[` + strings.Repeat("15043,", n-1) + `15043],`
			}
			answer := fmt.Appendf(nil, `{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}],`+
				`"usage":{"prompt_tokens":%d,"completion_tokens":1},%s"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],`+
				`"remote_engine_id":"e","remote_request_id":"r","remote_host":"10.0.0.5","remote_port":5600}}`, n, list)
			b.Run(fmt.Sprintf("%d KB/ids=%v", size>>10, ids), func(b *testing.B) {
				var r openai.Request
				if err := openai.ParseRequest(openai.Chat, []byte(body), &r); err != nil {
					b.Fatal(err)
				}
				target := engine.Target{Instance: new(engine.Instance)}
				dst := make([]byte, 0, len(body)+len(answer)+4<<10)
				b.ReportAllocs()
				for b.Loop() {
					a := connector.Attempt{Request: &r, LegID: "id", Flow: abi.FlowPrefillFirst, Prefill: target, Decode: target}
					h, err := conn.ReadPrefill(&a, answer)
					if err != nil {
						b.Fatal(err)
					}
					if ids {
						a.PromptIDs = continuation.FindPrompt(answer)
						if u, _ := openai.ParseUsage(answer); int64(continuation.CountIDs(a.PromptIDs)) != u.Prompt {
							b.Fatal("the ids are not those of the prompt")
						}
					}
					if _, err := conn.Decode(&a, &h, dst); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
