package load

import "time"

// Report is the load of one rank as its engine reports it.
//
// It corrects the own counters, which are exact for requests of this proxy and know
// nothing of others. The rule: of the engine's requests, those above this proxy's own at
// the time of the poll are foreign. Foreign load is added to the present own counters:
// fully until two reports are overdue, then less and less, and not at all after six.
//
// The foreign requests have the same share of the engine's tokens as of its requests,
// because both sides count tokens in different ways: the proxy counts the expected output
// of a stream, and an engine shares the blocks of a common prefix. Foreign queued tokens
// are those above the own ones. If an engine does not count them, as many are assumed as
// the waiting foreign requests would have if they were like the own ones.
//
// Limits: the counts are taken at different moments. Requests that begin or end around a
// poll may count as foreign, or hide foreign ones, until the next report. A decode that is
// placed before its prefill is done counts as own before the engine has it, which hides
// foreign ones. An engine that counts sequences makes a request of n = 4 look like three
// foreign ones.
type Report struct {
	At               time.Time     // when the answer came
	Every            time.Duration // when the next is due after it
	Running, Waiting int32         // requests, or sequences if the engine counts sequences
	Tokens           int64         // tokens of KV in use, and of waiting prompts if the engine counts these; 0: unknown
	Capacity         int64         // tokens that KV memory holds; 0 unknown
	Queued           int64         // uncached prompt tokens that wait for prefill; negative: unknown
	Usage            float32       // share of KV memory in use, 0 to 1; 0 unknown
	Adapters         Adapters      // LoRA adapters with requests
}

// A report counts whole until freshReports are due after it, and no more when
// staleReports are.
const (
	freshReports = 2
	staleReports = 6
)

// reported is a report and the part of it that is foreign load.
type reported struct {
	Report
	requests               int32
	tokens, queued, decode int64

	own    int32 // requests of this proxy at the begin of the poll
	most   int32 // requests that the engine ran at the same time in any report
	silent bool  // another process sent its own count; the engine itself reports nothing
}

// Mark is this proxy's own load at one moment.
type Mark struct {
	requests int32
	tokens   int64
	queued   int64
}

// Mark returns the present own load. Call it when a poll of an engine begins.
func (c *Counter) Mark() Mark {
	return Mark{c.requests.Load(), c.tokens.Load(), c.queued.Load()}
}

// Report applies an engine's report. m is the own load at the begin of the poll. Report
// subtracts the larger of m and the present own load.
func (c *Counter) Report(r Report, m Mark) { c.report(r, m, false) }

// report does Report. silent: r is a count of another process, not of the engine.
func (c *Counter) report(r Report, m Mark, silent bool) {
	now := c.Mark()
	n := &reported{Report: r, own: m.requests, most: r.Running, silent: silent}
	if last := c.last.Load(); last != nil {
		n.most = max(n.most, last.most)
	}
	total := max(0, r.Running) + max(0, r.Waiting)
	n.requests = max(0, total-max(m.requests, now.requests))
	switch {
	case n.requests == 0:
	case r.Tokens > 0:
		n.tokens = int64(float64(r.Tokens) * float64(n.requests) / float64(total))
	case now.requests > 0: // as large as this proxy's load
		n.tokens = now.tokens / int64(now.requests) * int64(n.requests)
	}
	if r.Queued >= 0 {
		n.queued = max(0, r.Queued-max(m.queued, now.queued))
	} else if waiting := min(n.requests, max(0, r.Waiting)); waiting > 0 {
		n.queued = int64(waiting) * (c.sixteen.Load() / 16)
	}
	n.tokens = max(n.tokens, n.queued)
	n.decode = n.tokens - n.queued
	c.last.Store(n)
}

// Counts reports whether the report still counts at now.
func (r *Report) Counts(now time.Time) bool {
	return r.Every > 0 && now.Sub(r.At) < staleReports*r.Every
}

// Reported returns the engine's last report. ok is false before the first report.
func (c *Counter) Reported() (r Report, ok bool) {
	if last := c.last.Load(); last != nil {
		return last.Report, true
	}
	return Report{}, false
}

// Waiting estimates how many requests wait in the engine at now, and how many more it would
// run at once. ok is false if the engine has not reported, or if its last report is too old.
//
// The estimate is the engine's last report with the requests that this proxy has sent since,
// less those that have ended. An engine in which a request waits has no room. An engine in
// which nothing waits has room for as many requests as it has ever run at the same time, and
// at least for as many again as it runs. So a burst between two reports can at most double the
// requests that an engine runs.
func (c *Counter) Waiting(now time.Time) (waiting, room int32, ok bool) {
	r := c.last.Load()
	if r == nil || r.silent || !r.Counts(now) {
		return 0, 0, false
	}
	if r.Report.Waiting <= 0 {
		room = max(r.most-r.Running, r.Running, 0)
	}
	room -= max(0, r.Report.Waiting) + c.requests.Load() - r.own
	if room < 0 {
		return -room, 0, true
	}
	return 0, room, true
}

// Forget drops the engine's last report, for an engine that has restarted.
func (c *Counter) Forget() { c.last.Store(nil) }
