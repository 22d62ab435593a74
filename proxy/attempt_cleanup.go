package proxy

import (
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// cleanUp starts the clean-up of what a failed attempt left on the engines. For
// concurrent legs it returns after the engines have answered their aborts, because the
// legs of a retry must not meet those of this attempt.
func (a *attempt) cleanUp(err error) {
	if a.prefill.left != nil && !a.orphan.KVRead {
		a.awaitLate()
		return
	}
	if !maybeSent(err) && a.orphan.Handoff == nil && !a.isConcurrent() {
		return
	}
	calls := a.conn.Cleanup(&a.c, a.orphan)
	if len(calls) == 0 {
		return
	}
	job := a.cleanupJob(calls)
	failed := asLegError(err)
	if failed != nil {
		job.Avoid(failed.target)
	}
	if e := unresponsiveLeg(err); e != nil {
		job.Hold(e.target)
	}
	if a.orphan.DecodeSent && (failed == nil || failed.status == 0) && a.p.Flow == abi.FlowPrefillFirst {
		job.Delay(cleanup.Yield)
	}
	tried := a.x.s.cleanups.Start(job)
	if !a.isConcurrent() || a.x.client.Begun() || job.Slow() {
		return
	}
	select {
	case <-tried:
	case <-a.x.ctx.Done():
	}
}

// cleanupJob returns the job that makes the calls.
func (a *attempt) cleanupJob(calls []connector.Cleanup) *cleanup.Job {
	j := a.newJob()
	j.Add(calls, a.p.Prefill, a.p.Decode)
	return &j
}

// newJob returns a job of this attempt without calls.
func (a *attempt) newJob() cleanup.Job {
	j := cleanup.Job{
		RequestID: a.x.journal.ID(),
		Connector: a.conn.Name(),
		Since:     time.Now(),
		Limit:     time.Duration(a.x.cfg.Timeouts.Cleanup),
		Prompt:    time.Duration(a.x.cfg.Timeouts.Prefill),
		Decode:    a.p.Decode.Instance,
		Restarts:  a.began.restarts,
	}
	if a.x.key == "" {
		j.Auth = a.x.client.Header().Get("Authorization")
	}
	return j
}

// setOrphanCleanup tells the coordinator that prefill is done. If this process shares a
// coordinator, it also gives the coordinator the calls that free prefill's blocks, in
// case this process dies before decode has read them.
func (a *attempt) setOrphanCleanup() {
	if a.p.Lease.Owes() {
		if calls := a.conn.Cleanup(&a.c, a.orphan); slices.ContainsFunc(calls, func(c connector.Cleanup) bool { return c.Leg.Path != "" }) {
			a.p.Lease.Owe(a.cleanupJob(calls).Encode())
		}
	}
	a.p.Lease.PrefillDone()
}

// awaitLate gives the prefill leg, whose engine does not respond, to the clean-up. That
// waits for the engine's answer and frees the blocks afterwards.
func (a *attempt) awaitLate() {
	x, left := a.x, a.prefill.left
	a.prefill.left = nil
	req := new(openai.Request) // the request of the exchange ends with it
	body := x.client.HoldBody()
	if err := openai.ParseRequest(x.req.API, body.B, req); err != nil { // cannot happen: it was parsed before
		body.Free()
		left.Close()
		return
	}
	j := a.newJob()
	late := &cleanup.Late{Leg: left, Connector: a.conn, Attempt: a.c, Orphan: a.orphan, Body: body, Job: &j}
	late.Attempt.Request = req
	x.s.cleanups.AwaitLate(late)
}
