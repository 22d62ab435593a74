// Package disaggid issues the numbers that disagg ids are made of, and records which ids are in
// flight. An issuer (Ranges) splits reserved blocks into ranges, each for one Source, which counts
// through it. The package does no I/O and is safe for concurrent use.
//
// The decisions behind this package are in docs/design/connectors.md.
package disaggid

import "github.com/pdproxy/pdproxy/abi"

// The layout of an id before it is brought into range, from the highest bit: 39
// bits of milliseconds since abi.DisaggEpochMilli, 8 of node, 6 of worker, 10
// of counter, which carries into the milliseconds: a Source counts. Source:
// TensorRT-LLM tensorrt_llm/llmapi/disagg_utils.py, whose time is the host's
// uptime instead, so that its ids repeat after a reboot.
const (
	milliBits   = 39
	nodeBits    = 8
	workerBits  = 6
	counterBits = 10

	workerShift = counterBits
	nodeShift   = workerShift + workerBits
	milliShift  = nodeShift + nodeBits
)

// Pack is the native rule that makes an id from the facts: the layout above, moved into
// [abi.MinDisaggID, abi.MaxDisaggID).
func Pack(f abi.MintFacts) uint64 {
	raw := uint64(f.UnixMilli-abi.DisaggEpochMilli)&(1<<milliBits-1)<<milliShift |
		uint64(f.Node)<<nodeShift |
		uint64(f.Worker)&(1<<workerBits-1)<<workerShift |
		uint64(f.Counter)&(1<<counterBits-1)
	return raw%(abi.MaxDisaggID-abi.MinDisaggID) + abi.MinDisaggID
}

// InRange reports whether engines accept the id.
func InRange(id uint64) bool { return id >= abi.MinDisaggID && id < abi.MaxDisaggID }
