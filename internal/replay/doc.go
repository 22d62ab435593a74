// Package replay measures policies against a simulated fleet, in virtual time, and reports the
// times of clients and the hits of the KV caches. It runs any list of place policies over a
// recorded trace, and any list of retain policies over sessions: the conversations of a trace, or agents.
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
// With sessions, decode instances keep the KV of finished turns, and prefill pulls it as vLLM does: the
// request waits for room on prefill, the rank computes other requests during the transfer, and decode
// frees the KV after it. The keeper of this KV is the proxy's own package, with virtual time.
// A kept block pins memory of decode. The lab has no preemption: a request that finds no room at
// decode waits. The lab assumes that the prompt of a next turn begins with exactly the tokens of the prompt and
// the answer before it, so that prefill can pull all of them. A trace shows this for the whole blocks of the prompt.
//
// A volatile session has a text in the first block of each prompt that differs in every request. Without the filter
// stable_prefix, no cache knows any block of such a prompt, and no turn uses the KV of the turn before. The filter removes the
// text; the lab counts no tokens for it.
//
// The same trace, settings and seed give the same result, except the decisions
// per second, which are measured.
//
// # The parts
//
// trace.go reads traces, and vary.go makes other traces from their
// conversations. model.go has the models and models/ the presets. cache.go,
// prefill.go and decode.go are the engines; clock.go is virtual time. view.go
// is the proxy's knowledge. lab.go joins the parts. agents.go draws sessions of agents and
// conversations.go finds those of a trace; sessions.go plays them, and retain.go is the KV that decode keeps
// between turns. result.go counts; table.go, report.go and sessionreport.go write the reports.
package replay
