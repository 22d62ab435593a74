package proxy

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// janitor runs the calls that make engines free what dead exchanges left. Its
// jobs outlive their exchange but not the server.
type janitor struct {
	s      *Server
	wg     background
	slow   chan struct{}   // bounds the slow jobs that run
	queued atomic.Int64    // bytes that jobs hold, by queueCost
	ctx    context.Context // ends when the server has waited long enough
	cancel context.CancelFunc
}

const (
	// cleanupPatience is how long a clean-up is tried: vLLM's default lease
	// (kv_lease_duration), after which the engine has freed the blocks itself. What
	// a prefill frees that is to be served has no lease: the time of such a call
	// begins when it is its turn, and is no shorter than one try's.
	cleanupPatience = 30 * time.Second
	// cleanupPause is the first pause between two rounds; it doubles.
	cleanupPause = 50 * time.Millisecond
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

// cleanupJob is the clean-up of one attempt. It holds no memory of the exchange.
type cleanupJob struct {
	requestID string
	connector string
	calls     []cleanupCall
	auth      string        // the client's Authorization, "" where it is not sent on
	yield     time.Duration // before the first call
	since     time.Time     // when the attempt died: time to free counts from here
	limit     time.Duration // of one try
	whole     time.Duration // of one that computes a prompt
	slow      bool          // a call computes a prompt: nobody waits for it
}

type cleanupCall struct {
	connector.Cleanup
	target engine.Target           // who is called
	avoid  engine.Target           // who is called last: it failed the leg, and may fail this
	after  engine.Target           // who has to be heard again before: silent, it may yet read what would be freed
	vain   bool                    // nothing comes of another try: the engine's own time-out frees
	holder engine.Target           // whose memory is to be freed
	relay  func() *engine.Instance // another for a target that is not well, nil if there is none; nil: there is nobody else
}

// cleanup has the janitor free what a failed attempt left on the engines.
// Concurrent legs are aborted, where that is possible, before it returns,
// because a retry must not meet the old attempt.
func (a *attempt) cleanup(err error) {
	if a.left != nil && !a.orphan.DecodeTook {
		a.hearOut()
		return
	}
	if !maybeSent(err) && a.orphan.Handoff == nil && !a.together() {
		return
	}
	calls := a.conn.Cleanup(&a.c, a.orphan)
	if len(calls) == 0 {
		return
	}
	job := a.cleanupJob(calls)
	var le *legError
	if errors.As(err, &le) {
		job.avoid(le.target)
	}
	if le := silentLeg(err); le != nil {
		job.hold(le.target)
	}
	if a.orphan.DecodeSent && (le == nil || le.status == 0) && a.p.Flow == abi.FlowPrefillFirst {
		job.yield = cleanupYield
	}
	tried := a.x.s.janitor.start(job)
	if !a.together() || a.x.committed || job.slow {
		return
	}
	select {
	case <-tried:
	case <-a.x.ctx.Done():
	}
}

func (a *attempt) cleanupJob(calls []connector.Cleanup) *cleanupJob {
	j := &cleanupJob{
		requestID: a.x.rec.RequestID,
		connector: a.conn.Name(),
		since:     time.Now(),
		limit:     time.Duration(a.x.cfg.Timeouts.Cleanup),
		whole:     time.Duration(a.x.cfg.Timeouts.Prefill),
	}
	if a.x.key == "" {
		j.auth = a.x.r.Header.Get("Authorization")
	}
	j.add(calls, a.p.Prefill, a.p.Decode)
	return j
}

// add adds calls to the job of an attempt on the targets p and d.
func (j *cleanupJob) add(calls []connector.Cleanup, p, d engine.Target) {
	for _, c := range calls {
		t := d
		if c.Phase == abi.Prefill {
			t = p
		}
		cc := cleanupCall{Cleanup: c, target: t, holder: t}
		switch {
		case c.Until == connector.UntilServed: // prefill writes into decode's blocks, which frees them
			cc.holder = d
			j.slow, j.yield, j.limit = true, cleanupYield, j.whole
		case c.AnyTarget: // any decode engine tells prefill to free its blocks
			cc.holder = p
		}
		j.calls = append(j.calls, cc)
	}
}

// hold has calls wait for t, which has fallen silent: those to itself, and those
// that free what it has, or may yet read when it is back. Its own abort may be the first.
func (j *cleanupJob) hold(t engine.Target) {
	for i := range j.calls {
		if c := &j.calls[i]; c.AnyTarget || c.target == t {
			c.after = t
		}
	}
}

// avoid puts t last where any target will do. A decode engine that could not load
// the blocks cannot tell prefill to free them either.
func (j *cleanupJob) avoid(t engine.Target) {
	for i := range j.calls {
		if c := &j.calls[i]; c.AnyTarget && c.target == t {
			c.avoid = t
		}
	}
}

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
		ctx, cancel := context.WithTimeout(j.ctx, cleanupPatience)
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

// queueCost is the memory that the job holds, in bytes, until its turn has come;
// 0 for one that does not wait for longer than it is tried.
func (j *cleanupJob) queueCost() (bytes int64) {
	for i := range j.calls {
		if c := &j.calls[i]; c.Until == connector.UntilServed {
			bytes += max(int64(len(c.Leg.Body)), cleanupFloor)
		}
	}
	return bytes
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
	if !c.after.IsZero() {
		tried()
		tried = func() {}
		awaitHeard(ctx, c.after)
		sleep(ctx, cleanupYield)
	}
	trying := ctx
	if c.Until == connector.UntilServed {
		ctx, trying = j.ctx, j.ctx // a try that has begun has its own limit
	}
	if job.slow {
		select {
		case j.slow <- struct{}{}:
			defer func() { <-j.slow }()
		case <-ctx.Done():
		}
		if c.Until == connector.UntilServed {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(j.ctx, max(cleanupPatience, job.limit))
			defer cancel()
		}
		if c.gone() {
			tried()
			m.Cleanup(job.connector, "engine_gone", time.Since(job.since))
			return
		}
	}
	done := j.round(trying, job, c)
	tried()
	for pause := cleanupPause; !done; pause *= 2 {
		if c.gone() {
			m.Cleanup(job.connector, "engine_gone", time.Since(job.since))
			return
		}
		select {
		case <-ctx.Done():
			j.tooLate(job, c)
			return
		case <-time.After(pause):
		}
		done = j.round(trying, job, c)
	}
	if c.vain {
		m.Cleanup(job.connector, "engine_timeout", 0)
		return
	}
	m.Cleanup(job.connector, c.How, time.Since(job.since))
}

// begun reports whether the first event of a stream comes, and is none that tells
// of an error. The limit of the try bounds the wait.
func begun(resp *upstream.Response) bool {
	buf := getBuffer(4 << 10)
	defer func() { buf.free() }()
	for len(buf.b) < cap(buf.b) {
		n, err := resp.Read(buf.b[len(buf.b):cap(buf.b)])
		buf.b = buf.b[:len(buf.b)+n]
		switch openai.ReadFirstEvent(buf.b).Verdict {
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

// reaches reports whether t, called with the hosts that an answer named, would look
// there for the engine whose memory is to be freed, and nowhere else.
func (c *cleanupCall) reaches(t engine.Target) bool {
	for _, host := range c.Hosts {
		if host != "" && !c.holder.Owns(host, t.Instance) {
			return false
		}
	}
	return true
}

// gone reports that the engine whose memory is to be freed has restarted or
// died: its memory went with it. One that fails its probes may yet be alive, so
// this is asked only after a try.
func (c *cleanupCall) gone() bool {
	s := c.holder.State()
	return s != engine.Ready && s != engine.Draining
}

// header is the lines of a call to t, with t's own key where it has one.
func (j *cleanupJob) header(t engine.Target, leg []upstream.Field) []upstream.Field {
	auth := j.auth
	if t.APIKey != "" {
		auth = "Bearer " + t.APIKey
	}
	if auth == "" {
		return leg
	}
	return append([]upstream.Field{{Name: "Authorization", Value: auth}}, leg...)
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
		if c.vain = resp.Status/100 == 4 && resp.Status != 408 && resp.Status != 429; c.vain {
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
	answer, err := readAnswer(resp, limit)
	answer.free()
	return err == nil
}
