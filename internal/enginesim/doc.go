// Package enginesim is the simulated LLM engines: each engine uses the real protocol of
// its connector on its HTTP port, keeps a block-accounted KV cache, and produces text
// that depends on the KV bytes that it holds.
//
// It imports no package of the proxy. Otherwise the proxy and the simulator could share
// one wrong reading of a protocol. An [Engine] runs inside a test process together with
// many others, or alone as `pdproxy sim`.
//
// Package core has the parts of every engine; vllm, sglang and trtllm add the protocol of
// one engine each. This package chooses the protocol of a connector.
package enginesim
