// Package enginesim is the simulated LLM engines: each engine uses the real protocol of
// its connector on its HTTP port, keeps a block-accounted KV cache, and produces text
// that depends on the KV bytes that it holds.
//
// It imports no package of the proxy. Otherwise the proxy and the simulator could share
// one wrong reading of a protocol. An [Engine] runs inside a test process together with
// many others, or alone as `pdproxy sim`.
//
// All protocols share the core: [Config] and [Engine] (config.go, engine.go,
// conns.go), the KV cache and its pinned sets (kvcache.go, pins.go), tokens, KV
// content and text (model.go), slots and queues (scheduler.go), the engines'
// own TCP side channel (transfer.go), OpenAI requests (openai.go,
// openai_parse.go), the HTTP server (server.go, sse.go, json.go), faults
// (faults.go) and counters (state.go). The engine publishes changes of its
// prefix cache as its own KV events (kvevents*.go): by ZeroMQ (publisher.go,
// zmtp.go) or by polling (trtllm_events.go). The tokenize endpoints return the
// ids from which blocks are computed (tokenize.go). A protocol is one value
// that implements the interface in protocol.go: vllm*.go, sglang*.go,
// trtllm*.go.
package enginesim
