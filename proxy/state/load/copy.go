package load

import "time"

// Copy is the load of a target as one process sends it to others, which have load on the
// same target themselves.
type Copy struct {
	Requests       int32 // as in View
	Tokens, Queued int64
	Usage          float32
	// Waiting is one more than the estimate of Counter.Waiting. 0: the engine does not report.
	Waiting int32
	// RecentTokens and RecentRequests are the first two values of Recent. RecentWork is
	// the number of uncached tokens from which Recent computes its third value.
	RecentTokens, RecentRequests, RecentWork float32
	Prefill, Output                          Fit
}

// Copy returns the load at now, for Follow in another process.
func (c *Counter) Copy(now time.Time) Copy {
	v := c.View(now)
	tokens, requests, work := c.recent.read(now)
	waiting, _, ok := c.Waiting(now)
	if ok {
		waiting++
	}
	return Copy{
		Requests: v.Requests, Tokens: v.Tokens, Queued: v.Queued, Usage: v.Usage, Waiting: waiting,
		RecentTokens: float32(tokens), RecentRequests: float32(requests), RecentWork: float32(work),
		Prefill: c.Prefill.Fit(), Output: c.Output.Fit(),
	}
}

// Follow takes over another process's count of the target, which includes the load of this
// process. It counts like a Report: fully until two updates are overdue, then less and
// less.
func (c *Counter) Follow(k Copy, now time.Time, every time.Duration) {
	waiting := min(max(0, k.Waiting-1), max(0, k.Requests))
	c.report(Report{
		At: now, Every: every, Running: k.Requests - waiting, Waiting: waiting, Tokens: k.Tokens, Queued: max(0, k.Queued), Usage: k.Usage,
	}, c.Mark(), k.Waiting <= 0)
	c.recent.follow(float64(k.RecentTokens), float64(k.RecentRequests), float64(k.RecentWork), now)
	c.Prefill.Follow(k.Prefill)
	c.Output.Follow(k.Output)
}
