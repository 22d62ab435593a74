// Package load counts the load of a target: requests and tokens in flight, prompt tokens
// that are not yet computed, and its speed. The proxy's own counters grow with a placement
// and shrink when its lease ends. The engines' reports correct them for the load of
// others. The package does no I/O, has no clock and is safe for concurrent use.
//
// The decisions behind this package are in docs/design/placement.md.
package load

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Counter is the load of one target. Its zero value is ready for use. The fields of View and Full,
// which each placement reads for each candidate, come first, in one cache line.
type Counter struct {
	requests atomic.Int32
	room     atomic.Int32 // requests that the target holds according to its last refusal
	tokens   atomic.Int64
	queued   atomic.Int64
	decode   atomic.Int64
	last     atomic.Pointer[reported]
	refused  atomic.Int64 // when the target last refused a request for lack of room, Unix time in ns; 0: never

	// Prefill is how long the target takes per uncached prompt token, fed with
	// the Work of finished holds. Where legs wait for others' requests, the wait
	// shows in it.
	Prefill Speed
	// Output is how long it takes per output token of one stream, fed with whole
	// streams.
	Output Speed

	sixteen atomic.Int64 // sum of the uncached tokens of about the last sixteen requests
	recent  recent

	_ [16]byte // whole cache lines, so that no counter begins in the middle of one
}

// Requests returns the number of requests in flight through this proxy.
func (c *Counter) Requests() int32 { return c.requests.Load() }

// Tokens returns the number of tokens in flight through this proxy: prompt tokens while
// prefill computes, prompt and expected tokens while decode streams.
func (c *Counter) Tokens() int64 { return c.tokens.Load() }

// Queued returns the number of uncached prompt tokens that were sent through this proxy
// and are not yet computed.
func (c *Counter) Queued() int64 { return c.queued.Load() }

// Decode returns the part of Tokens that belongs to streams: their prompts and expected
// output.
func (c *Counter) Decode() int64 { return c.decode.Load() }

// View is the load of a target at a moment, its own counters corrected by the
// engine's last report, and its measured speed.
type View struct {
	Requests int32 // requests in flight, including waiting requests
	Tokens   int64 // in flight
	Queued   int64 // uncached prompt tokens whose prefill is not done
	Decode   int64 // of Tokens, those of streams
	// Usage is the share of KV memory in use that the engine reports, 0 to 1; 0: unknown.
	Usage float32
	// PrefillMicros is the measured time per uncached prompt token in µs; 0 while there is no
	// measurement.
	PrefillMicros float32
}

// View returns the load at now. It takes no lock and allocates nothing.
func (c *Counter) View(now time.Time) View {
	v := View{
		Requests: c.requests.Load(), Tokens: c.tokens.Load(), Queued: c.queued.Load(), Decode: c.decode.Load(),
		PrefillMicros: c.Prefill.PerToken(),
	}
	r := c.last.Load()
	if r == nil || r.Every <= 0 {
		return v
	}
	due := float32(now.Sub(r.At)) / float32(r.Every)
	weight := min(1, (staleReports-due)/(staleReports-freshReports))
	if weight <= 0 { // the report is too old
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

// refusalCounts is how long a refusal for lack of room counts: as long as between two load reports. So
// a target whose room others used gets a request again soon.
const refusalCounts = time.Second

// NoRoom notes that the target has refused a request for lack of room. The request still counts
// as in flight.
func (c *Counter) NoRoom(now time.Time) {
	room := max(0, c.requests.Load()-1)
	if c.refusedAt(now) { // of several requests, those that were refused later counted as in flight
		room = min(room, c.room.Load())
	}
	c.room.Store(room)
	c.refused.Store(now.UnixNano())
}

// Full reports whether the target has refused a request a moment ago, and has as many requests of
// this proxy as then. It takes no lock.
func (c *Counter) Full(now time.Time) bool {
	return c.refusedAt(now) && c.requests.Load() >= c.room.Load()
}

// refusedAt reports whether the last refusal still counts at now. It does not if the clock has gone back.
func (c *Counter) refusedAt(now time.Time) bool {
	ago := now.UnixNano() - c.refused.Load()
	return ago >= 0 && ago < int64(refusalCounts)
}

// Hold adds a stream of the given tokens: its prompt and its expected output.
func (c *Counter) Hold(tokens int64) Hold {
	c.requests.Add(1)
	c.tokens.Add(tokens)
	c.decode.Add(tokens)
	return Hold{c: c, requests: 1, tokens: tokens, decode: tokens}
}

// HoldPrefill adds a prefill leg of the given prompt tokens, of which uncached must be
// computed.
func (c *Counter) HoldPrefill(tokens, uncached int64) Hold {
	h := c.HoldQueued(uncached)
	c.requests.Add(1)
	c.tokens.Add(tokens)
	h.requests, h.tokens = 1, tokens
	return h
}

// HoldQueued adds only the uncached prompt tokens that a target has yet to compute. An
// aggregated leg uses it beside its Hold, and drops it at the first token.
func (c *Counter) HoldQueued(uncached int64) Hold {
	ahead := c.queued.Add(uncached) - uncached
	sum := c.sixteen.Load()
	if sum == 0 {
		sum = 16 * uncached
	}
	c.sixteen.Store(sum + uncached - sum/16) // an average; it does no harm if one of two simultaneous updates is lost
	return Hold{c: c, queued: uncached, Work: ahead + uncached}
}

// Hold is one request's share of a Counter. Its zero value holds nothing.
type Hold struct {
	// Work is the number of uncached tokens that the target had to compute from the beginning
	// of this hold to the end of its prefill. The number includes the tokens of this proxy's
	// earlier requests. The duration of the leg divided by Work is the time per token. Earlier
	// requests count in full, although the target may have computed a part of them before.
	// Requests of other senders do not count.
	Work int64

	c                      *Counter
	tokens, queued, decode int64
	requests               int32
}

// Drop removes the share and empties the hold. Only the owner of the hold calls it; it is
// not safe for concurrent use.
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

// After recentTime, the weight of a placement is 1/e. For the target's utilisation this
// time is busyTime.
const (
	recentTime = 10 * time.Minute
	busyTime   = time.Minute
)

// recent sums up the latest placements of prompts on a target. Reading takes no lock, so
// it may see a placement slightly too early or too late.
type recent struct {
	mu       sync.Mutex    // of writing
	tokens   atomic.Uint64 // float64: uncached prompt tokens as of at
	requests atomic.Uint64 // float64
	work     atomic.Uint64 // a float64: recent work in tokens, which decays with busyTime
	at       atomic.Int64  // Unix time in ns; 0: never
}

// Placed notes that a request was placed on the target, and the number of prompt tokens
// to compute.
func (c *Counter) Placed(uncached int64, now time.Time) {
	r := &c.recent
	r.mu.Lock()
	defer r.mu.Unlock()
	tokens, requests, work := r.read(now)
	r.tokens.Store(math.Float64bits(tokens + float64(uncached)))
	r.requests.Store(math.Float64bits(requests + 1))
	r.work.Store(math.Float64bits(work + float64(uncached)))
	r.at.Store(now.UnixNano())
}

// follow sets the values to another process's.
func (r *recent) follow(tokens, requests, work float64, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tokens.Store(math.Float64bits(tokens))
	r.requests.Store(math.Float64bits(requests))
	r.work.Store(math.Float64bits(work))
	r.at.Store(now.UnixNano())
}

// LastPlaced returns when the last prompt was placed on the target; zero: never.
func (c *Counter) LastPlaced() time.Time {
	at := c.recent.at.Load()
	if at == 0 {
		return time.Time{}
	}
	return time.Unix(0, at)
}

func (r *recent) read(now time.Time) (tokens, requests, work float64) {
	at := r.at.Load()
	if at == 0 {
		return 0, 0, 0
	}
	ago := float64(max(0, now.UnixNano()-at))
	weight, fresh := math.Exp(-ago/float64(recentTime)), math.Exp(-ago/float64(busyTime))
	return weight * math.Float64frombits(r.tokens.Load()), weight * math.Float64frombits(r.requests.Load()),
		fresh * math.Float64frombits(r.work.Load())
}

// Recent is the uncached prompt tokens, and the requests, that were placed on the
// target of late, each placement weighing less the longer it is ago; and about
// the share of the last minute that it takes to compute them, at the speed that
// Prefill has measured (0 before). It takes no lock.
func (c *Counter) Recent(now time.Time) (tokens, requests, busy float32) {
	t, n, work := c.recent.read(now)
	return float32(t), float32(n), float32(work * float64(c.Prefill.PerToken()) / float64(busyTime/time.Microsecond))
}
