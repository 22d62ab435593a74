package attempt

import (
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// cleanUp starts the calls that free the KV blocks of a failed attempt. For concurrent legs it
// returns after the engines have answered their aborts, because the legs of a retry must not
// overlap with the legs of this attempt.
func (a *attempt) cleanUp(err error) {
	if a.prefill.late != nil && !a.kvRead {
		a.awaitLate()
		return
	}
	if !maybeSent(err) && !a.prefill.read && !a.concurrent {
		return
	}
	calls := a.conn.Cleanup(&a.c, a.orphan())
	if len(calls) == 0 {
		return
	}
	job := a.cleanupJob(calls)
	failed := asLegError(err)
	if failed != nil {
		job.Avoid(failed.Target)
	}
	if e := unresponsiveLeg(err); e != nil {
		job.Hold(e.Target)
	}
	if a.decodeSent && (failed == nil || failed.Status == 0) && a.p.Flow == abi.FlowPrefillFirst {
		job.YieldToDecode()
	}
	tried := a.env.Cleanups.Start(job)
	if !a.concurrent || a.env.Client.Begun() || job.Slow() {
		return
	}
	select {
	case <-tried:
	case <-a.env.Context.Done():
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
		RequestID: a.env.Journal.RequestID,
		Connector: a.conn.Name(),
		Since:     time.Now(),
		Limit:     time.Duration(a.env.Config.Timeouts.Cleanup),
		Prompt:    time.Duration(a.env.Config.Timeouts.Prefill),
		Decode:    a.p.Decode.Instance,
		Restarts:  a.began.restarts,
	}
	if a.env.Key == "" {
		j.Auth = a.env.Client.Header().Get("Authorization")
	}
	return j
}

// setOrphanCleanup gives the coordinator, which this process shares, the calls that free prefill's
// blocks, in case this process dies before decode has read them.
func (a *attempt) setOrphanCleanup() {
	if calls := a.conn.Cleanup(&a.c, a.orphan()); slices.ContainsFunc(calls, func(c connector.Cleanup) bool { return c.Leg.Path != "" }) {
		a.p.Lease.SetOrphanCleanup(a.cleanupJob(calls).Encode())
	}
}

// registerOrphanCleanup gives the coordinator, before the legs are sent, the calls that make decode
// free its blocks, in case this process dies while prefill computes. Only decode engines that wait for
// prefill without end need these calls. A job above cleanup.MaxEncoded is not registered.
func (a *attempt) registerOrphanCleanup() error {
	if !connector.WaitsWithoutEnd(a.conn) || !a.p.Lease.WantsOrphanCleanup() || len(a.env.Client.Body()) > cleanup.MaxEncoded {
		return nil
	}
	calls := a.conn.Cleanup(&a.c, connector.Orphan{PrefillSent: true, DecodeSent: true})
	if len(calls) == 0 {
		return nil
	}
	job := a.cleanupJob(calls).Encode()
	if job == nil {
		return nil
	}
	if err := a.env.Client.Derive(len(job)); err != nil { // until the answer begins, as the lease holds it
		return err
	}
	a.registered = true
	a.p.Lease.RegisterOrphanCleanup(job)
	return nil
}

// awaitLate passes the prefill leg, whose engine did not answer in time, to the clean-up. The
// clean-up waits for the engine's answer and then frees the blocks.
func (a *attempt) awaitLate() {
	env, left := a.env, a.prefill.late
	a.prefill.late = nil
	req := new(openai.Request) // the clean-up may run longer than the request of the exchange
	body := env.Client.HoldBody()
	if openai.ParseRequest(env.Request.API, body.B, req) != nil { // cannot happen: it was parsed before
		body.Free()
		left.Close()
		return
	}
	j := a.newJob()
	late := &cleanup.Late{Leg: left, Connector: a.conn, Attempt: a.c, Orphan: a.orphan(), Body: body, Job: &j}
	late.Attempt.Request = req
	a.passTurn(late)
	env.Cleanups.AwaitLate(late)
}
