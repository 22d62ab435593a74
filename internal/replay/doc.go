// Package replay measures place policies. It runs any list of them over a
// recorded trace against a simulated fleet, in virtual time, and reports the
// times of clients and the hits of the KV caches.
//
// # The simulation
//
// A fleet consists of prefill instances with several ranks, and of decode
// instances. Each prefill rank has its own block cache and a first-come queue
// whose uncached tokens it computes in chunks. Each decode instance has a block
// cache and one batch, whose steps take longer with more requests and tokens.
// Finished prefills wait for room on their decode instance. Then their KV is
// transferred; until its end the blocks at prefill are pinned. A [Model] gives
// the times of these steps.
//
// A policy gets exactly the proxy's facts: the proxy's own counters, the KV
// index with the ranks' events and the proxy's own guesses, the conversation
// table, measured speeds. These are the proxy's own packages, not copies.
//
// The simulation leaves out the following: engines compute at constant speed
// and never fail, ranks of one instance do not wait for each other, evicted KV
// is lost (there is no lower tier), the network between prefill and decode is
// not shared, and the proxy itself takes no time.
//
// The same trace, settings and seed give the same result, except the decisions
// per second, which are measured.
//
// # The parts
//
// trace.go reads traces, and vary.go makes other traces from their
// conversations. model.go has the models and models/ the presets. cache.go,
// prefill.go and decode.go are the engines; clock.go is virtual time. view.go
// is the proxy's knowledge. lab.go joins the parts. result.go counts; table.go
// and report.go write the report.
package replay
