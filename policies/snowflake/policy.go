// Package snowflake is the built-in mint policy: it packs time, node, worker
// and counter into the 64 bits of a disagg id, in the layout of TensorRT-LLM,
// so that ids of several issuers differ as long as their nodes or workers do.
package snowflake

import "github.com/pdproxy/pdproxy/abi"

// The layout, from the highest bit: 39 bits of milliseconds since
// abi.DisaggEpochMilli, 8 of node, 6 of worker, 10 of counter. Source:
// TensorRT-LLM tensorrt_llm/llmapi/disagg_utils.py.
const (
	milliBits   = 39
	workerBits  = 6
	counterBits = 10

	workerShift = counterBits
	nodeShift   = workerShift + workerBits
	milliShift  = nodeShift + 8
)

// Mint returns the disagg id of f, in [abi.MinDisaggID, abi.MaxDisaggID). It
// cuts off bits of f that exceed the layout.
func Mint(f *abi.MintFacts) uint64 {
	raw := uint64(f.UnixMilli-abi.DisaggEpochMilli)&(1<<milliBits-1)<<milliShift |
		uint64(f.Node)<<nodeShift |
		uint64(f.Worker)&(1<<workerBits-1)<<workerShift |
		uint64(f.Counter)&(1<<counterBits-1)
	return raw%(abi.MaxDisaggID-abi.MinDisaggID) + abi.MinDisaggID
}
