package proxy

import (
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/upstream"
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
	decode    *engine.Instance
	restarts  uint32 // of decode when the attempt began
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
	if a.left != nil && !a.orphan.KVRead {
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
	if !a.together() || a.x.client.Begun() || job.slow {
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
		decode:    a.p.Decode.Instance,
		restarts:  a.restarts,
	}
	if a.x.key == "" {
		j.auth = a.x.client.Header().Get("Authorization")
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

// patience is the time for which the janitor repeats the call, or keeps it until it can
// be made.
func (c *cleanupCall) patience() time.Duration { return max(cleanupPatience, c.Hold) }

// patience is the longest patience of the calls of the job.
func (j *cleanupJob) patience() time.Duration {
	longest := cleanupPatience
	for i := range j.calls {
		longest = max(longest, j.calls[i].patience())
	}
	return longest
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
