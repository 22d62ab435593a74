// Package load counts what is in flight on each target: requests and tokens,
// added when a placement is made and taken away when its lease ends. It is
// safe for concurrent use and knows nothing of engines.
package load

import "sync/atomic"

// Counter is the load of one target. The zero value is ready for use.
type Counter struct {
	requests atomic.Int32
	tokens   atomic.Int64
}

// Requests is the number of requests in flight.
func (c *Counter) Requests() int32 { return c.requests.Load() }

// Tokens is the number of tokens in flight: prompt tokens while prefill
// computes, prompt and expected tokens while decode streams.
func (c *Counter) Tokens() int64 { return c.tokens.Load() }

// Hold adds one request of the given tokens and returns the hold that takes it
// away again.
func (c *Counter) Hold(tokens int64) Hold {
	c.requests.Add(1)
	c.tokens.Add(tokens)
	return Hold{c: c, tokens: tokens}
}

// Hold is one request's share of a Counter. Its zero value holds nothing.
type Hold struct {
	c      *Counter
	tokens int64
}

// Drop takes the share away and makes the hold empty. The owner of the hold
// calls it; it is not safe for concurrent use.
func (h *Hold) Drop() {
	if h.c == nil {
		return
	}
	h.c.requests.Add(-1)
	h.c.tokens.Add(-h.tokens)
	h.c = nil
}
