// Package core is the part that all simulated engines share: settings and life of an
// [Engine], the KV cache and its pinned sets (kvcache.go, pins.go), tokens, KV content and
// text (model.go), slots and queues (scheduler.go), the engines' own TCP side channel
// (transfer.go), OpenAI's routes and answers (openai.go, responses.go, calls.go), the HTTP
// server (server.go, sse.go, json.go), faults (faults.go) and counters (state.go). The
// engine publishes changes of its prefix cache as its own KV events (kvevents.go): by
// ZeroMQ (publisher.go, zmtp.go) or by polling. A [Protocol] is the part of one engine.
package core
