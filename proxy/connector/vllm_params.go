package connector

import (
	"bytes"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// transferParams gives kv_transfer_params of prefill's answer, nil when it has none.
// It checks all of the answer on the way, and the types of the parameters.
func transferParams(answer []byte) ([]byte, error) {
	if !isObject(answer) {
		return nil, badReply("no JSON object")
	}
	params, _, err := openai.Lookup(answer, "kv_transfer_params")
	switch {
	case err != nil:
		return nil, badReply(err.Error())
	case openai.IsNull(params):
		return nil, nil
	case !isObject(params):
		return nil, badReply("kv_transfer_params is no object")
	}
	return params, checkParams(params)
}

// namesBlocks reports whether params name a block that prefill holds. The ids are
// numbers in vLLM, flat or in one list for each cache group, which may all be
// empty, and strings in llm-d's simulator.
func namesBlocks(params []byte) bool {
	blocks, _ := openai.Find(params, "remote_block_ids")
	return bytes.ContainsAny(blocks, `0123456789"`)
}
