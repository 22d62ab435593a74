package connector

import (
	"bytes"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// transferParams returns kv_transfer_params of prefill's answer, or nil if it has none.
// It validates the whole answer and the types of the parameters.
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

// namesBlocks reports whether params name a block that prefill holds. In vLLM the ids
// are numbers, flat or in one list for each cache group, and all lists may be empty. In
// llm-d's simulator they are strings.
func namesBlocks(params []byte) bool {
	blocks, _ := openai.Find(params, "remote_block_ids")
	return bytes.ContainsAny(blocks, `0123456789"`)
}
