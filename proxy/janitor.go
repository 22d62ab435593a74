package proxy

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/inflight"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// janitor runs the calls that make engines free what dead exchanges left. Its
// jobs outlive their exchange but not the server.
type janitor struct {
	s             *Server
	wg            inflight.Group
	slow          chan struct{} // bounds the slow jobs that run
	queued        atomic.Int64  // bytes that jobs hold, by queueCost
	afterRestarts restartCleanups
	ctx           context.Context // ends when the server has waited long enough
	cancel        context.CancelFunc
}

const (
	// cleanupPatience is how long a clean-up is tried at least: vLLM's default lease
	// (kv_lease_duration), after which the engine has freed the blocks itself. Where
	// the engine holds them longer the call says so (connector.Cleanup.Hold). What
	// a prefill frees that is to be served has no lease: the time of such a call
	// begins when it is its turn, and is no shorter than one try's.
	cleanupPatience = 30 * time.Second
	// cleanupPause is the first pause between two rounds; it doubles up to
	// cleanupPauses: blocks whose only decode was away are free soon after it is back.
	cleanupPause  = 50 * time.Millisecond
	cleanupPauses = time.Second
	// cleanupYield is how long a clean-up leaves it to a decode engine that has
	// been hung up on. Its own abort frees prefill's blocks; a second engine that
	// freed them while it still reads would hand it another request's memory.
	cleanupYield = time.Second
	// cleanupPrompts is how many clean-ups at a time compute a prompt: they are no
	// client's, and come when engines are in trouble.
	cleanupPrompts = 4
	// cleanupQueue bounds the memory of those that wait for that, in bytes: all the
	// clients of a gateway may leave at once.
	cleanupQueue = 256 << 20
	// cleanupFloor is the least that one of them counts for there, in bytes.
	cleanupFloor = 64 << 10
)

// start runs the calls of the job in the background, all at once. The channel is
// closed when each has been tried, in vain or not: an engine that cannot be
// reached keeps nobody waiting for the tries that follow.
func (j *janitor) start(job *cleanupJob) (tried <-chan struct{}) {
	each := make(chan struct{})
	cost := job.queueCost()
	if j.queued.Add(cost) > cleanupQueue && cost > 0 {
		j.queued.Add(-cost)
		for i := range job.calls {
			j.tooLate(job, &job.calls[i])
		}
		close(each)
		return each
	}
	j.wg.Go(func() {
		defer j.queued.Add(-cost)
		ctx, cancel := context.WithTimeout(j.ctx, job.patience())
		defer cancel()
		sleep(ctx, job.yield)
		var first, all sync.WaitGroup
		first.Add(len(job.calls))
		for i := range job.calls {
			all.Go(func() { j.call(ctx, job, &job.calls[i], first.Done) })
		}
		first.Wait()
		close(each)
		all.Wait()
	})
	return each
}

// tooLate books a call that is given up: only the engine's own time-out frees.
func (j *janitor) tooLate(job *cleanupJob, c *cleanupCall) {
	j.s.deps.Metrics.Cleanup(job.connector, "engine_timeout", 0)
	j.s.log.Warn("clean-up reached no engine; its own time-out frees the KV blocks",
		"request_id", job.requestID, "engine", c.target.Name(), "how", c.How)
}

// wait returns when no job runs any more, which takes at most limit: what an
// engine has not freed by then it frees by its own time-out. Jobs that start
// meanwhile are waited for too.
func (j *janitor) wait(limit time.Duration) {
	j.afterRestarts.close()
	t := time.AfterFunc(limit, j.cancel)
	defer t.Stop()
	j.wg.Wait()
}

// call makes one call until it has done its work: on its target, else on
// another engine of the group when any will do, and again after a pause. It
// calls tried after the first round. What nothing freed is left to the engine's
// own time-out, and counted as that.
func (j *janitor) call(ctx context.Context, job *cleanupJob, c *cleanupCall, tried func()) {
	m := j.s.deps.Metrics
	if c.Leg.Path == "" {
		tried()
		m.Cleanup(job.connector, c.How, 0)
		return
	}
	if c.Restarted {
		tried()
		j.afterRestart(job, c)
		return
	}
	if !c.after.IsZero() {
		tried()
		tried = func() {}
		awaitHeard(ctx, c.after)
		sleep(ctx, cleanupYield)
	}
	if c.Until == connector.UntilServed {
		ctx = j.ctx // a try that has begun has its own limit
	}
	patience := ctx
	if job.slow {
		select {
		case j.slow <- struct{}{}:
			defer func() { <-j.slow }()
		case <-ctx.Done():
		}
	}
	if c.Until == connector.UntilServed {
		var cancel context.CancelFunc
		patience, cancel = context.WithTimeout(j.ctx, max(cleanupPatience, job.limit))
		defer cancel()
	}
	switch how := j.repeat(ctx, patience, job, c, tried); how {
	case "":
		j.tooLate(job, c)
	case "engine_timeout":
		m.Cleanup(job.connector, how, 0)
	default:
		m.Cleanup(job.connector, how, time.Since(job.since))
	}
}

// repeat makes the call until it has done its work, and says how: "engine_gone" if
// there is nothing to be freed any more, "engine_timeout" if nothing can free it,
// "" if patience is at an end.
func (j *janitor) repeat(ctx, patience context.Context, job *cleanupJob, c *cleanupCall, tried func()) (how string) {
	if job.slow && c.gone() {
		tried()
		return "engine_gone"
	}
	done := j.round(ctx, job, c)
	tried()
	for pause := cleanupPause; !done; pause = min(2*pause, cleanupPauses) {
		if c.gone() {
			return "engine_gone"
		}
		select {
		case <-patience.Done():
			return ""
		case <-time.After(pause):
		}
		done = j.round(ctx, job, c)
	}
	if c.vain {
		return "engine_timeout"
	}
	return c.How
}

// round tries the call's target, then its peers, each once.
func (j *janitor) round(ctx context.Context, job *cleanupJob, c *cleanupCall) bool {
	if c.relay != nil && c.target.State() != engine.Ready { // which may show after the first round
		if i := c.relay(); i != nil {
			c.target = engine.Target{Instance: i}
		}
	}
	if !c.AnyTarget {
		return j.try(ctx, c.target, job, c)
	}
	tried := []engine.Target{c.target}
	if c.avoid.IsZero() && c.reaches(c.target) && j.try(ctx, c.target, job, c) {
		return true
	}
	for ctx.Err() == nil {
		t := j.s.deps.Registry.Snapshot().Peer(c.target, c.Phase, tried)
		if t.IsZero() {
			break
		}
		if c.reaches(t) && j.try(ctx, t, job, c) {
			return true
		}
		tried = append(tried, t)
	}
	return !c.avoid.IsZero() && c.reaches(c.avoid) && j.try(ctx, c.avoid, job, c)
}

// try reports whether the call did its work on target t, or can do none.
func (j *janitor) try(ctx context.Context, t engine.Target, job *cleanupJob, c *cleanupCall) bool {
	ctx, cancel := context.WithTimeout(ctx, job.limit)
	defer cancel()
	resp, err := t.Client.Do(ctx, &upstream.Request{
		Method: "POST", Path: t.Prefix + c.Leg.Path, Header: job.header(t, c.Leg.Header), Body: [][]byte{c.Leg.Body},
	})
	if err != nil {
		c.vain = c.Until == connector.UntilServed // it knows of no decode any more, or is as slow again
		return c.vain
	}
	defer resp.Close()
	limit := maxErrorAnswer
	switch c.Until {
	case connector.UntilRefused:
		return resp.Status/100 == 4
	case connector.UntilServed:
		limit = maxAnswer
		if c.vain = upstream.RequestAtFault(resp.Status); c.vain {
			return true
		}
	}
	if resp.Status/100 != 2 {
		return false
	}
	if c.Until == connector.UntilHead {
		return true // closing unread is the abort
	}
	if c.Until == connector.UntilEvent {
		return begun(resp)
	}
	answer, err := readAnswer(j.s.memory, resp, limit, time.Time{}) // ctx bounds it
	answer.Free()
	return err == nil
}

// begun reports whether the first event of a stream comes, and is none that tells
// of an error. The limit of the try bounds the wait.
func begun(resp *upstream.Response) bool {
	buf := buffer.Get(4 << 10)
	defer func() { buf.Free() }()
	for len(buf.B) < cap(buf.B) {
		n, err := resp.Read(buf.B[len(buf.B):cap(buf.B)])
		buf.B = buf.B[:len(buf.B)+n]
		switch openai.ReadFirstEvent(buf.B).Verdict {
		case openai.DataEvent:
			return true
		case openai.ErrorEvent:
			return false
		}
		if err != nil {
			return false
		}
	}
	return false
}
