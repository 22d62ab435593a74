package proxy

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Evict implements upstream.CallControl: an engine, the leg's own or the one whose KV it
// needs, has fallen silent. The leg is left only to be tried elsewhere: where there
// is nobody else, or no try is left, or the budget has no retry, it waits for the
// engine to come back, unless that is too late for prefill's blocks (expired). The
// retry is taken from the budget here. Of the exchange it reads what no leg changes.
func (l *legRow) Evict(silent any) bool {
	a := l.a
	x := a.x
	from, phase := l.target, l.Phase
	switch {
	case silent == from.Instance:
	case silent == a.p.Prefill.Instance && a.fetches(phase):
		from, phase = a.p.Prefill, abi.Prefill
	default:
		return false
	}
	if a.verdict.Load() == decodeTook { // nobody waits for prefill's answer
		return true
	}
	if x.route.Fixes(from.Instance) {
		return l.expired(silent) // the caller says where it runs
	}
	if l.Attempt >= x.cfg.Retry.Attempts || x.s.deps.Registry.Snapshot().Peer(from, phase, nil).IsZero() {
		return l.expired(silent)
	}
	l.grant = x.s.budget.allow(time.Now(), x.cfg.Retry.Budget, x.cfg.Retry.MinBudget)
	l.starved = l.grant && from != l.target
	return l.grant || l.expired(silent)
}

// expired reports whether prefill's blocks may be gone when the silent engine, the
// leg's own, is back and reads them: it has renewed their lease for the last time.
// No answer is better than one from another request's memory.
//
// A vLLM decode renews it every sixth, each time by two thirds from then: half of it
// at least is left when decode stops, and half of that is for the probes to notice.
// Source: nixl/base_worker.py _lease_extension, nixl/base_scheduler.py.
func (l *legRow) expired(silent any) bool {
	a, now := l.a, time.Now()
	if a.readBy.IsZero() || silent != l.target.Instance {
		return false
	}
	if l.mute.IsZero() {
		l.mute = now
	}
	quarter := a.handoff.Lease / 4
	return now.Sub(a.handed) >= 3*quarter && now.Sub(l.mute) >= quarter
}

// fetches reports whether the leg of a phase may be waiting for prefill's KV: a
// stream that has not begun. A whole answer says nothing of that before it is there.
func (a *attempt) fetches(phase abi.Phase) bool {
	return phase == abi.Decode && a.p.Flow == abi.FlowPrefillFirst && a.x.req.Stream && a.handoff.Pinned
}

// silentLeg is the leg that was left because its engine has fallen silent; nil: err
// tells of none.
func silentLeg(err error) *legError {
	var le *legError
	if errors.As(err, &le) && !le.silent.IsZero() {
		return le
	}
	return nil
}

// hearsOut reports whether a prefill that is left is not hung up on: its answer lets
// its blocks be freed, or it is to write what a decode waits for, which holds its own
// blocks until then.
func hearsOut(c connector.Connector) bool {
	d, ok := c.(connector.Deferrer)
	return c.Reclaims() || ok && d.Defers()
}

// hearOut hands the prefill leg that was left to the janitor, who does the clean-up
// once the engine has answered, or cannot any more.
func (a *attempt) hearOut() {
	x, left := a.x, a.left
	a.left = nil
	req := new(openai.Request) // the exchange takes its own with it
	body := x.client.HoldBody()
	if err := openai.ParseRequest(x.req.API, body.B, req); err != nil { // which it was before
		body.Free()
		left.Close()
		return
	}
	h := &hearing{left: left, conn: a.conn, c: a.c, orphan: a.orphan, body: body, job: a.cleanupJob(nil)}
	h.c.Request = req
	x.s.janitor.hear(h)
}

// hearing is a prefill leg that was left, and what its clean-up needs. It holds no
// memory of the exchange but the client's body.
type hearing struct {
	left   *upstream.Detached
	conn   connector.Connector
	c      connector.Attempt
	orphan connector.Orphan
	body   *buffer.Buffer
	job    *cleanupJob
}

// hear waits in the background for what the engine says when it is back, and has
// freed what it then holds.
func (j *janitor) hear(h *hearing) {
	j.wg.Go(func() {
		defer h.body.Free()
		ctx, cancel := context.WithTimeout(j.ctx, max(h.job.whole, 2*prefillLinger)) // the engine may answer soon, however short timeouts.prefill is
		defer cancel()
		died := h.job.since
		if d, ok := h.conn.(connector.Deferrer); !ok || !d.Defers() {
			j.wg.Go(func() { // as long as one whose client has left, and no longer: it aborts
				awaitHeard(ctx, h.c.Prefill)
				// What was lost on the way TCP sends again after as long as the link was cut.
				sleep(ctx, prefillLinger+time.Since(died))
				cancel()
			})
		}
		if resp, err := h.left.Await(ctx); err == nil {
			answer := h.read(j.s.memory, resp)
			defer answer.Free()
		}
		h.job.since = time.Now() // nothing could be freed before
		h.job.add(h.conn.Cleanup(&h.c, h.orphan), h.c.Prefill, h.c.Decode)
		if len(h.job.calls) > 0 {
			j.start(h.job)
		}
	})
}

// read takes the answer, whose memory the orphan refers to.
func (h *hearing) read(memory *buffer.Budget, resp *upstream.Response) *buffer.Buffer {
	defer resp.Close()
	answer, err := readAnswer(memory, resp, maxAnswer, time.Time{}) // ctx bounds it
	switch {
	case err != nil:
	case resp.Status/100 != 2:
		h.orphan.Refused = true
	default:
		if said, err := h.conn.ReadPrefill(&h.c, answer.B); err == nil {
			h.orphan.PrefillDone, h.orphan.Handoff = true, &said
		}
	}
	return answer
}

// awaitHeard waits until t is not silent any more, or ctx ends.
func awaitHeard(ctx context.Context, t engine.Target) {
	for t.Unresponsive() && !t.Gone() && ctx.Err() == nil {
		sleep(ctx, cleanupPause)
	}
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

var _ upstream.CallControl = (*legRow)(nil)
