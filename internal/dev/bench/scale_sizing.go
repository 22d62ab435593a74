package main

import (
	"fmt"
	"strings"
)

// The load of the sizing. docs/scale.md names the same values.
const (
	gpusPerTarget    = 8
	requestsPerGPU   = 0.5   // a second
	requestCPU       = 66e-6 // s of a worker for a prefill-decode request of 32 KB; docs/performance.md
	streamSeconds    = 10    // of an answer
	streamsPerWorker = 5000
	eventsPerAnswer  = 300    // tokens of an answer
	kvPerRequest     = 2000   // events: 500 blocks stored and removed, at prefill and at decode
	blocksPerTarget  = 60_000 // KV blocks of an engine
	turnsKept        = 3600   // s for which a conversation is kept
	requestsPerTalk  = 4      // turns of a conversation in that time
	mirrorPerSecond  = 4      // messages with loads to each worker
)

// plan is one way to serve a number of GPUs: by equal fleets, each with one coordinator.
type plan struct{ gpus, fleets float64 }

// sizing returns the table of what GPUs need, in cores and bytes, from the figures of the rows.
func sizing(all map[string]*curves) (string, error) {
	plans := []plan{{1000, 1}, {10_000, 1}, {100_000, 1}, {100_000, 10}, {100_000, 100}}
	var text strings.Builder
	text.WriteString("| | " + columns(plans, func(p plan) string { return fmt.Sprintf("%s GPUs, fleets: %g", shortCount(p.gpus), p.fleets) }))
	text.WriteString("|" + strings.Repeat(" --- |", len(plans)+1) + "\n")
	var failure error
	at := func(row, curve, unit string, size float64) float64 {
		v, err := all[row].at(curve, unit, size)
		if err != nil {
			failure = fmt.Errorf("%s: %w", row, err)
		}
		return v
	}
	// kept is at for values of one item, which do not grow above the largest size that was measured.
	kept := func(row, unit string, size float64) float64 {
		f := all[row]
		return at(row, f.names[0], unit, min(size, f.sizes[len(f.sizes)-1]))
	}
	line := func(name string, value func(p plan, targets, rate float64) string) {
		text.WriteString("| " + name + " | " + columns(plans, func(p plan) string {
			gpus := p.gpus / p.fleets
			return value(p, gpus/gpusPerTarget, gpus*requestsPerGPU)
		}))
	}
	line("targets of a fleet", func(_ plan, targets, _ float64) string { return shortCount(targets) })
	line("requests/s of a fleet", func(_ plan, _, rate float64) string { return shortCount(rate) })
	place := func(policy string) func(plan, float64, float64) float64 {
		return func(_ plan, targets, rate float64) float64 {
			return rate * at("targets", policy, "cpu-µs/placement", targets) * 1e-6
		}
	}
	events := func(_ plan, targets, rate float64) float64 {
		return rate * kvPerRequest * kept("events", "cpu-ns/event", targets) * 1e-9
	}
	workers := func(_ plan, _, rate float64) float64 {
		return rate*requestCPU + rate*eventsPerAnswer*kept("streams", "cpu-µs/event", streamsPerWorker)*1e-6
	}
	mirror := func(_ plan, targets, _ float64) float64 {
		return mirrorPerSecond * at("mirror", "", "encode-µs", targets) * 1e-6
	}
	cores := func(name string, need func(p plan, targets, rate float64) float64) {
		line(name+", cores", func(p plan, t, r float64) string { return twoDigits(need(p, t, r)) })
	}
	cores("coordinator: placements by `least_load`", place("least_load"))
	cores("coordinator: placements by `kv_aware`", place("kv_aware"))
	cores("coordinator: KV events", events)
	cores("coordinator: state for workers", mirror)
	line("coordinator: index, GB", func(_ plan, t, _ float64) string {
		return twoDigits(t * blocksPerTarget * kept("index", "B/pair", t*blocksPerTarget) / 1e9)
	})
	line("coordinator: conversations, MB", func(_ plan, _, rate float64) string {
		n := rate * turnsKept / requestsPerTalk
		return twoDigits(n * kept("conversations", "B/conversation", n) / 1e6)
	})
	cores("workers", workers)
	line("workers: open streams", func(_ plan, _, rate float64) string { return shortCount(rate * streamSeconds) })
	line("workers: memory of the streams, GB", func(_ plan, _, rate float64) string {
		return twoDigits(rate * streamSeconds * kept("streams", "kB/stream", streamsPerWorker) / 1e6)
	})
	cores("all fleets with `kv_aware`", func(p plan, t, r float64) float64 {
		return p.fleets * (place("kv_aware")(p, t, r) + events(p, t, r) + mirror(p, t, r) + workers(p, t, r))
	})
	return text.String(), failure
}

func columns(plans []plan, cell func(plan) string) string {
	var text strings.Builder
	for _, p := range plans {
		text.WriteString(cell(p) + " | ")
	}
	return strings.TrimSuffix(text.String(), " ") + "\n"
}
