// Package load is what a target carries: requests and tokens in flight, prompt
// tokens not yet computed, and how fast it computes. Own counters are added to
// when a placement is made and taken from when its lease ends; the engines'
// reports correct them for what others send. It is safe for concurrent use, does
// no I/O and has no clock of its own.
package load

import (
	"sync/atomic"
	"time"
)

// Counter is the load of one target. The zero value is ready for use. What is
// read for each candidate of each request comes first, so that it shares a cache
// line.
type Counter struct {
	requests atomic.Int32
	tokens   atomic.Int64
	queued   atomic.Int64
	decode   atomic.Int64
	sixteen  atomic.Int64 // uncached tokens of sixteen requests of late
	recent   recent
	last     atomic.Pointer[reported]

	// Prefill is how long the target takes per uncached prompt token, fed with
	// the Work of finished holds. Where legs wait for others' requests, the wait
	// shows in it.
	Prefill Speed
	// Output is how long it takes per output token of one stream, fed with whole
	// streams.
	Output Speed
}

// Requests is the number of requests in flight through this proxy.
func (c *Counter) Requests() int32 { return c.requests.Load() }

// Tokens is the number of tokens in flight through this proxy: prompt tokens
// while prefill computes, prompt and expected tokens while decode streams.
func (c *Counter) Tokens() int64 { return c.tokens.Load() }

// Queued is the number of uncached prompt tokens sent through this proxy whose
// prefill is not done.
func (c *Counter) Queued() int64 { return c.queued.Load() }

// Decode is how many of Tokens belong to streams: their prompts and what they
// are expected to produce.
func (c *Counter) Decode() int64 { return c.decode.Load() }

// View is the load of a target at a moment, its own counters corrected by the
// engine's last report, and its measured speeds.
type View struct {
	Requests int32 // in flight, waiting ones included
	Tokens   int64 // in flight
	Queued   int64 // uncached prompt tokens whose prefill is not done
	Decode   int64 // of Tokens, those of streams
	// Usage is the share of KV memory in use as the engine says, 0 to 1; 0 while
	// that is not known.
	Usage float32
	// PrefillMicros and OutputMicros are the measured times per uncached prompt
	// token and per output token, in µs; 0 while there is no measurement.
	PrefillMicros, OutputMicros float32
}

// View returns the load at now. It takes no lock and allocates nothing.
func (c *Counter) View(now time.Time) View {
	v := View{
		Requests: c.requests.Load(), Tokens: c.tokens.Load(), Queued: c.queued.Load(), Decode: c.decode.Load(),
		PrefillMicros: c.Prefill.PerToken(), OutputMicros: c.Output.PerToken(),
	}
	r := c.last.Load()
	if r == nil {
		return v
	}
	weight := r.weight(now)
	if weight == 0 {
		return v
	}
	v.Usage = r.Usage
	if r.requests != 0 || r.queued != 0 {
		v.Requests += int32(weight*float32(r.requests) + 0.5)
		v.Tokens += int64(weight * float32(r.tokens))
		v.Queued += int64(weight * float32(r.queued))
		v.Decode += int64(weight * float32(r.decode))
	}
	return v
}

// Hold adds a stream of the given tokens, its prompt and what it is expected to
// produce, and returns the hold that takes it away again.
func (c *Counter) Hold(tokens int64) Hold {
	c.requests.Add(1)
	c.tokens.Add(tokens)
	c.decode.Add(tokens)
	return Hold{c: c, requests: 1, tokens: tokens, decode: tokens}
}

// HoldPrefill adds a prefill leg of the given prompt tokens, of which uncached
// are expected to be computed.
func (c *Counter) HoldPrefill(tokens, uncached int64) Hold {
	h := c.HoldQueued(uncached)
	c.requests.Add(1)
	c.tokens.Add(tokens)
	h.requests, h.tokens = 1, tokens
	return h
}

// HoldQueued adds only the uncached prompt tokens that a target has yet to
// compute, for the aggregated leg beside its Hold: it is dropped at the first
// token.
func (c *Counter) HoldQueued(uncached int64) Hold {
	ahead := c.queued.Add(uncached) - uncached
	sum := c.sixteen.Load()
	if sum == 0 {
		sum = 16 * uncached
	}
	c.sixteen.Store(sum + uncached - sum/16) // an average: that one of two at once is lost does no harm
	return Hold{c: c, queued: uncached, ahead: ahead}
}

// Hold is one request's share of a Counter. Its zero value holds nothing.
type Hold struct {
	c                      *Counter
	tokens, queued, decode int64
	ahead                  int64 // queued tokens of this proxy before these
	requests               int32
}

// Drop takes the share away and makes the hold empty. The owner of the hold
// calls it; it is not safe for concurrent use.
func (h *Hold) Drop() {
	c := h.c
	if c == nil {
		return
	}
	h.c = nil
	if h.requests != 0 {
		c.requests.Add(-h.requests)
		c.tokens.Add(-h.tokens)
	}
	if h.queued != 0 {
		c.queued.Add(-h.queued)
	}
	if h.decode != 0 {
		c.decode.Add(-h.decode)
	}
}

// Work is how many uncached tokens the target had to compute from this hold's
// beginning until its prefill was done, those of this proxy's earlier requests
// included: the tokens by which the leg's time is to be divided. It is also
// right after Drop. Earlier requests count whole, though part of them may have
// been computed before; what others sent is not in it.
func (h *Hold) Work() int64 { return h.ahead + h.queued }
