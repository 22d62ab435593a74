// Package replay is the lab that measures place policies: it drives any list of
// them over a recorded trace against a simulated fleet, in virtual time, and
// reports what a client would have seen and what the KV caches were worth.
//
// # The simulation
//
// A fleet is prefill instances of several ranks, and decode instances. Each
// prefill rank has its own block cache and a first-come queue whose uncached
// tokens it computes in chunks; each decode instance has a block cache and one
// batch whose steps grow longer with the requests and the tokens in it. Finished
// prefills wait for room on their decode instance, then their KV is transferred;
// the blocks at prefill are pinned until it is. What each of these takes is said
// by a [Model].
//
// A policy is shown what the proxy would show it and no more: its own counters,
// the KV index fed with the ranks' events and its own guesses, the conversation
// table, measured speeds. These are the proxy's own packages, not copies.
//
// What is left out: engines compute at constant speed and never fail, ranks of
// one instance do not wait for each other, KV that was evicted is gone (there is
// no tier below), the network between prefill and decode is not shared, and the
// proxy itself takes no time.
//
// The same trace, settings and seed give the same result, but for the decisions
// per second, which are measured.
//
// # The parts
//
// trace.go reads traces, and vary.go makes other traces from their conversations;
// model.go has the models and models/ the presets; cache.go, prefill.go and
// decode.go are the engines; clock.go is virtual time; view.go is what the proxy
// knows; lab.go joins them; result.go counts; table.go and report.go write down.
package replay
