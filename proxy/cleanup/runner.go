// Package cleanup makes engines free the KV blocks that failed attempts left behind. A
// Job holds the calls of one attempt; the Runner makes them in the background, after the
// request itself has ended.
//
// The decisions behind this package are in docs/design/attempt.md.
package cleanup

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/inflight"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

const (
	// firstPause is the first pause between two rounds of a call. The pause doubles up to
	// longestPause, so that blocks are free soon after their only decode engine is back.
	firstPause   = 50 * time.Millisecond
	longestPause = time.Second
	// longestFull is the longest pause while all engines refuse the call for lack of room. The pause
	// ends earlier when one of them may have room.
	longestFull = 4 * time.Second
	// maxPrompts is how many clean-ups compute a prompt at the same time. No client waits for them,
	// and they run when engines have failed.
	maxPrompts = 4
	// maxQueued limits the memory of the clean-ups that wait to compute a prompt, in
	// bytes: all clients of a gateway may leave at once.
	maxQueued = 256 << 20
)

// Options is what a Runner needs. All fields are needed.
type Options struct {
	Registry *engine.Registry
	Memory   *buffer.Budget // counts the answers that are held
	Metrics  *telemetry.Metrics
	Log      *slog.Logger
}

// Runner makes the calls of clean-up jobs. A job outlives its request but not the
// Runner. Its methods are safe for concurrent use.
type Runner struct {
	Options
	running       inflight.Group
	prompts       chan struct{} // one token for each job that computes a prompt now
	queued        atomic.Int64  // bytes that jobs hold, by queueCost
	afterRestarts restartCleanups
	ctx           context.Context // ends when Wait has waited long enough
	cancel        context.CancelFunc
}

// New returns a Runner. Wait ends it.
func New(o Options) *Runner {
	r := &Runner{Options: o, prompts: make(chan struct{}, maxPrompts)}
	r.afterRestarts.leaving = make(chan struct{})
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// Start runs the calls of the job in the background, all at the same time. The channel
// is closed when each call has been tried once, with or without success, so that an
// unreachable engine delays the caller by one try only. The caller must not change the
// job any more.
func (r *Runner) Start(job *Job) (tried <-chan struct{}) {
	each := make(chan struct{})
	cost := job.queueCost()
	if r.queued.Add(cost) > maxQueued && cost > 0 {
		r.queued.Add(-cost)
		for i := range job.calls {
			r.giveUp(job, &job.calls[i])
		}
		close(each)
		return each
	}
	r.running.Go(func() {
		defer r.queued.Add(-cost)
		ctx, cancel := context.WithTimeout(r.ctx, job.patience())
		defer cancel()
		sleep(ctx, job.delay)
		var first, all sync.WaitGroup
		first.Add(len(job.calls))
		for i := range job.calls {
			all.Go(func() { r.call(ctx, job, &job.calls[i], first.Done) })
		}
		first.Wait()
		close(each)
		all.Wait()
	})
	return each
}

// StartEncoded starts, in the background, the job that another process of the same deployment
// encoded (Job.Encode) before it died. The error reports that b is no such job, or that an engine
// of the job is not known here.
func (r *Runner) StartEncoded(b []byte) error {
	job, err := readComplete(b, r.Registry.Snapshot())
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	job.YieldToDecode() // its connection was closed when that process died
	r.Start(job)
	return nil
}

// giveUp counts a call that is not made any more: the engine frees the blocks by its own
// timeout.
func (r *Runner) giveUp(job *Job, c *call) {
	r.Metrics.Cleanup(job.Connector, engineTimeout, 0)
	r.Log.Warn("clean-up reached no engine; its own time-out frees the KV blocks",
		"request_id", job.RequestID, "engine", c.target.Name(), "how", c.How)
}

// Wait returns when no job runs any more, after limit at most. What an engine has not
// freed by then, it frees by its own timeout. Wait also waits for jobs that start
// meanwhile.
func (r *Runner) Wait(limit time.Duration) {
	r.afterRestarts.close()
	t := time.AfterFunc(limit, r.cancel)
	defer t.Stop()
	r.running.Wait()
}

// Labels of clean-ups that made no call.
const (
	engineTimeout = "engine_timeout" // is left to the engine's own timeout
	engineGone    = "engine_gone"    // the engine that held the blocks has ended, or has restarted
)

// call repeats one call until it has done its work: on its target, on another engine of
// the group if any engine will do, and again after a pause. It calls tried after the
// first round. A call without success is counted as left to the engine's own timeout.
func (r *Runner) call(ctx context.Context, job *Job, c *call, tried func()) {
	if c.Leg.Path == "" {
		tried()
		r.Metrics.Cleanup(job.Connector, c.How, 0)
		return
	}
	if c.Restarted {
		tried()
		r.afterRestart(job, c)
		return
	}
	if !c.waitFor.IsZero() {
		tried()
		tried = func() {}
		awaitRecovery(ctx, c.waitFor)
		sleep(ctx, Yield)
	}
	if c.Until == connector.UntilServed {
		ctx = r.ctx // a try that has begun has its own limit
	}
	if job.slow && !c.awaitHolder(ctx, job) {
		tried()
		r.Metrics.Cleanup(job.Connector, engineGone, 0)
		return
	}
	patience := ctx
	if c.Until == connector.UntilServed {
		defer r.awaitPrompt(ctx, job)()
		var cancel context.CancelFunc
		patience, cancel = context.WithTimeout(r.ctx, max(minPatience, job.Limit))
		defer cancel()
	}
	switch how := r.repeat(ctx, patience, job, c, tried); how {
	case "":
		r.giveUp(job, c)
	case engineTimeout:
		r.Metrics.Cleanup(job.Connector, how, 0)
	default:
		r.Metrics.Cleanup(job.Connector, how, time.Since(job.Since))
	}
}

// awaitPrompt waits until a job that computes a prompt may do so, or until ctx ends. The caller calls
// done afterwards.
func (r *Runner) awaitPrompt(ctx context.Context, job *Job) (done func()) {
	if job.slow {
		select {
		case r.prompts <- struct{}{}:
			return func() { <-r.prompts }
		case <-ctx.Done():
		}
	}
	return func() {}
}

// repeat makes the call until it has done its work. It returns the label to count:
// engineGone if there is nothing left to free, engineTimeout if no call can free the
// blocks, "" if patience has ended.
func (r *Runner) repeat(ctx, patience context.Context, job *Job, c *call, tried func()) (how string) {
	done := r.tryAll(ctx, job, c)
	tried()
	for pause := firstPause; !done; pause *= 2 {
		if job.slow && !c.awaitHolder(ctx, job) || !job.slow && c.gone() {
			return engineGone
		}
		if pause = min(pause, c.longestPause()); !c.rest(patience, pause) {
			return ""
		}
		done = r.tryAll(ctx, job, c)
	}
	if c.pointless {
		return engineTimeout
	}
	return c.How
}

// tryAll tries the target of the call, then the target's peers, each once.
func (r *Runner) tryAll(ctx context.Context, job *Job, c *call) bool {
	c.tries, c.refusals = 0, c.refusals[:0]
	if c.substitute != nil && c.target.State() != engine.Ready { // the state may change after the first round
		if i := c.substitute(); i != nil {
			c.target = engine.Target{Instance: i}
		}
	}
	if !c.AnyTarget {
		if c.Until != connector.UntilServed { // those wait once, before the first try
			defer r.awaitPrompt(ctx, job)()
		}
		return r.try(ctx, c.target, job, c)
	}
	tried := []engine.Target{c.target}
	c.yield(ctx)
	if c.lastChoice.IsZero() && c.reaches(c.target) && r.try(ctx, c.target, job, c) {
		return true
	}
	c.yield(ctx) // perhaps the probes have detected it meanwhile
	for ctx.Err() == nil {
		t := r.Registry.Snapshot().Peer(c.target, c.Phase, tried)
		if t.IsZero() {
			break
		}
		if c.reaches(t) && r.try(ctx, t, job, c) {
			return true
		}
		tried = append(tried, t)
	}
	return !c.lastChoice.IsZero() && c.reaches(c.lastChoice) && r.try(ctx, c.lastChoice, job, c)
}

// try makes the call once, on target t. It reports whether the call is finished: it did
// its work, or another try is pointless.
func (r *Runner) try(ctx context.Context, t engine.Target, job *Job, c *call) bool {
	ctx, cancel := context.WithTimeout(ctx, job.Limit)
	defer cancel()
	c.tries++
	resp, err := t.Client.Do(ctx, &upstream.Request{
		Method: "POST", Path: t.Prefix + c.Leg.Path, Header: job.header(t, c.Leg.Header), Body: [][]byte{c.Leg.Body},
	})
	if err != nil {
		c.pointless = c.Until == connector.UntilServed // the engine has no record of its decode, or is slow again
		return c.pointless
	}
	defer resp.Close()
	limit := buffer.MaxErrorAnswer
	switch c.Until {
	case connector.UntilRefused:
		if upstream.RequestAtFault(resp.Status) {
			return true
		}
	case connector.UntilServed:
		limit = buffer.MaxAnswer
		if c.pointless = upstream.RequestAtFault(resp.Status); c.pointless {
			return true
		}
	}
	if resp.Status/100 != 2 {
		c.noteRefusal(r.Memory, t, resp)
		return false
	}
	if c.Until == connector.UntilRefused {
		return false
	}
	if c.Until == connector.UntilHead {
		return true // the engine aborts the request when the connection closes
	}
	if c.Until == connector.UntilEvent {
		api, _ := openai.APIFor(c.Leg.Path)
		return hasBegun(api, resp)
	}
	answer, err := r.Memory.ReadAll(resp, resp.ContentLength, limit, time.Time{}) // ctx limits the time
	answer.Free()
	return err == nil
}

// hasBegun reports whether the first content of a stream of api arrives. An answer whose head
// fills the buffer has begun too. The limit of the try bounds the wait.
func hasBegun(api openai.API, resp *upstream.Response) bool {
	buf := buffer.Get(4 << 10)
	defer func() { buf.Free() }()
	head := openai.StreamHead{API: api}
	for len(buf.B) < cap(buf.B) {
		n, err := resp.Read(buf.B[len(buf.B):cap(buf.B)])
		buf.B = buf.B[:len(buf.B)+n]
		if v := head.Read(buf.B); v >= openai.ContentEvent {
			return v == openai.ContentEvent
		}
		if err != nil {
			return false
		}
	}
	return head.Verdict == openai.Opening
}

// yield waits until the reader of the blocks responds again and has had time to abort.
func (c *call) yield(ctx context.Context) {
	if !c.reader.IsZero() && stopped(c.reader) {
		awaitRecovery(ctx, c.reader)
		sleep(ctx, Yield)
	}
}

// awaitRecovery returns when t responds again, or has ended, or when ctx ends.
func awaitRecovery(ctx context.Context, t engine.Target) {
	for stopped(t) && ctx.Err() == nil {
		sleep(ctx, firstPause)
	}
}

// stopped reports whether t does not respond but may resume, and still read or hold blocks.
func stopped(t engine.Target) bool { return t.Unresponsive() && !t.Ended() && !t.Gone() }

// awaitHolder waits while the engine that holds the blocks is unresponsive, and then until it is
// ready: an engine that resumes still holds them. False: the engine has ended, so its memory is
// free.
func (c *call) awaitHolder(ctx context.Context, job *Job) bool {
	for was := stopped(c.holder); was && c.gone() && !c.holder.Ended() && !c.holder.Gone(); {
		if sleep(ctx, firstPause); ctx.Err() != nil {
			return true
		}
	}
	// A worker that changes its coordinator takes over other counts of restarts. Blocks that
	// wait for prefill have no time-out, so the count does not matter for them.
	restarted := c.Until != connector.UntilServed && c.holder.Restarts() != job.Restarts
	return !c.gone() && !c.holder.Gone() && !restarted
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
