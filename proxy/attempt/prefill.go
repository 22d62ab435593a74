package attempt

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// prefillFirst sends the prefill leg, waits for its answer, and sends the decode leg, which
// contains parameters of that answer.
func (a *attempt) prefillFirst() error {
	if a.p.Prefill.Spec.Bidirectional {
		a.pullTurn()
	}
	shaped, err := a.shapePrefill()
	if err != nil {
		return err
	}
	a.runPrefill(a.env.Context, shaped, &a.prefill)
	a.prefillBody.Free()
	a.prefillBody = nil
	a.env.tries[abi.Prefill]++
	if a.prefill.err != nil {
		return a.prefill.err
	}
	a.prefill.handed = time.Now()
	a.takeIDs()
	if lease := a.prefill.handoff.Lease; lease > 0 {
		a.prefill.readBy = a.prefill.handed.Add(lease / 2) // decode needs the other half to connect to prefill and renew the lease
	}
	if a.p.Lease.WantsOrphanCleanup() {
		a.setOrphanCleanup()
	}
	a.p.Lease.PrefillDone()
	if a.env.Journal.Filters != nil {
		a.env.Journal.PrefillDone()
	}
	switch {
	case a.prefill.handoff.Done:
		return a.replyHandoff()
	case a.p.Decode.Ended() && !a.decodeWaits(): // any other decode is worth a try: prefill holds the blocks already
		return a.noDecode()
	case a.env.Route.Restricted && a.env.Route.DefersDecode():
		a.needs = NeedsPick
		return nil
	}
	return a.decodeAfterPrefill()
}

// shapePrefill returns the prefill leg. The record owns the memory of its body.
func (a *attempt) shapePrefill() (shaped connector.Leg, err error) {
	if a.prefillBody, err = a.env.Client.Buffer(len(a.env.Client.Body()) + len(a.c.PromptIDs) + legSlack); err != nil {
		return shaped, err
	}
	if a.env.Class != nil {
		a.prioritize(a.p.Prefill)
	}
	a.c.ReturnIDs = a.asksIDs
	shaped, err = a.conn.Prefill(&a.c, a.prefillBody.B)
	if a.c.ReturnIDs = false; err != nil {
		return shaped, err
	}
	if shaped.Alias { // an open stream frees the client's body, perhaps while the leg is still being sent
		a.prefillBody.Free()
		a.prefillBody = a.env.Client.HoldBody()
	} else {
		a.prefillBody.Set(shaped.Body)
	}
	if a.env.Hooks != nil {
		err = a.edit(abi.Prefill, &shaped, &a.prefillBody)
	}
	return shaped, err
}

// runPrefill sends the prefill leg and reads its answer into r. Only the caller may read r until
// runPrefill has returned. The error in r is a *Error, the cause of ctx, or a *failure that wraps a
// *coordinator.NoTargetError.
func (a *attempt) runPrefill(ctx context.Context, shaped connector.Leg, r *prefillLeg) {
	env := a.env
	r.begun, r.sent = true, true
	l := env.beginLeg(abi.Prefill, a.p.Prefill, env.tries[abi.Prefill]+1, a.c.LegID)
	limit := time.Duration(env.Config.Timeouts.Prefill)
	if a.trial && a.concurrent { // otherwise prefill does not wait for decode
		limit = min(limit, time.Duration(env.Config.Timeouts.Handshake))
	}
	if !a.deadline.IsZero() {
		limit, l.short = a.within(limit)
	}
	w := waits{head: limit, idle: limit}
	if a.conn.Reclaims() {
		// An answer that comes after the limit, or after the client has left, names the blocks
		// that the clean-up frees. The clean-up waits for a late answer while the next attempt
		// runs.
		w.linger, w.keepLate, w.detach = cleanup.PrefillLinger, true, true
	} else if d, ok := a.conn.(connector.Deferrer); ok {
		w.detach = d.Defers() // prefill still writes the KV: decode holds its own blocks until then
	}
	resp, err := a.send(ctx, l, &shaped, w)
	if err == nil {
		err = a.readPrefill(l, resp, l.Start.Add(limit), r)
	}
	if err != nil {
		var ue *upstream.Error
		if errors.As(err, &ue) {
			r.late = ue.Detached
		}
		r.err = a.legEnded(ctx, l, err)
		r.sent, r.rejected = maybeSent(r.err), answeredWithError(r.err)
		return
	}
	a.legSucceeded(l)
	r.read = true
	if a.p.Matched >= 0 {
		a.reportCached(r.answer.B)
	}
	if r.handoff.Fallback != "" {
		a.countFallback(&r.handoff)
	}
	if ctx.Err() != nil { // the client left while the answer came
		r.err = context.Cause(ctx)
	}
}

// readPrefill reads the whole answer of the prefill leg into r, until the time by at most.
func (a *attempt) readPrefill(l *leg, resp *upstream.Response, by time.Time, r *prefillLeg) (err error) {
	defer resp.Close()
	r.answer, err = readAnswer(a.env.Memory, resp, by)
	switch {
	case err != nil:
		err = l.failed(err)
	case resp.Status/100 != 2:
		// If prefill pulled KV, perhaps decode did not deliver the KV of the previous turn.
		if a.turn != nil && resp.Status/100 == 5 {
			a.env.Journal.Fallback("turn_kv", "pull_failed")
		}
		err = a.rejected(l, resp, r.answer.B, a.turn != nil)
	default:
		if isStream(resp) {
			if err = a.failedAtOnce(l, r.answer.B); err != nil {
				break
			}
		}
		r.done = true
		if r.handoff, err = a.conn.ReadPrefill(&a.c, r.answer.B); err != nil {
			return l.failedBy("bad_answer", 502, err)
		}
		return nil
	}
	r.answer.Free()
	r.answer = nil
	return err
}

// failedAtOnce returns a failure if prefill's answer is a stream with an error event before any
// content, else nil.
func (a *attempt) failedAtOnce(l *leg, answer []byte) error {
	head := openai.StreamHead{API: a.env.Request.API} // decode's answer may have freed the rest of the request
	if head.Read(answer) == openai.ErrorEvent {
		return a.failedInside(l, "error_event", head.Status, head.Data, nil)
	}
	return nil
}

// decodeAfterPrefill sends the decode leg for the KV that prefill has computed. If the leg fails
// before it can have reached its engine, or if its engine has no room and prefill still has the KV,
// the attempt needs another decode engine, unless the leg hook requests another attempt, or none.
func (a *attempt) decodeAfterPrefill() error {
	err := a.answerLeg(a.env.Context)
	if err == nil || downstream.OwnFault(err) || maybeSent(err) && (!overloaded(err) || a.prefill.handoff.RefusalFrees) || a.leaseOver() {
		return err
	}
	if d := a.askHook(err).Decision; d != abi.LegRetry && d != abi.LegGiveUp {
		a.needs = NeedsDecode
	}
	return err
}

// move replaces the placement of the attempt by p, which has another decode target. The host
// in prefill's answer may be valid for one decode engine and foreign to the other, so move
// reads the answer again.
func (a *attempt) move(p *coordinator.Placement) {
	a.leavePlacement()
	a.p, a.c.Decode = p, p.Decode
	if a.shared && !a.takesIDs(p.Decode) {
		a.shared, a.c.PromptIDs = false, nil
	}
	a.began.restarts = p.Decode.Restarts()
	before := a.prefill.handoff.Fallback
	if h, err := a.conn.ReadPrefill(&a.c, a.prefill.answer.B); err == nil { // no error is expected: the first read succeeded
		if a.prefill.handoff = h; h.Fallback != "" && h.Fallback != before {
			a.countFallback(&h)
		}
	}
	a.joinPair()
	a.env.Journal.Placed(p, a.env.Ask.Request.PromptTokens)
	if p.Lease.WantsOrphanCleanup() {
		a.setOrphanCleanup()
	}
	p.Lease.PrefillDone()
}

// reportCached reports to the coordinator how many tokens of the prompt the engine had cached,
// according to the engine's answer. The coordinator compares the number with its prediction,
// a.p.Matched, which must be known.
func (a *attempt) reportCached(answer []byte) {
	if u, ok := openai.ParseUsage(answer); ok && u.Cached >= 0 && u.Prompt > 0 {
		a.env.Coordinator.Computed(a.p, &a.env.Ask.Key, u.Prompt, u.Cached)
	}
}

// countFallback counts a fallback: decode computes the prompt itself instead of using the
// transferred KV.
func (a *attempt) countFallback(h *connector.Handoff) {
	a.env.Journal.Fallback("kv_transfer", h.Fallback)
	if h.Fallback == connector.ForeignHost {
		a.env.warnForeign(a.p.Prefill)
	}
}

// replyHandoff sends prefill's answer to the client, because it contains the whole text.
func (a *attempt) replyHandoff() error {
	env := a.env
	env.Journal.AnswerBegins(nil)
	if env.Journal.Span != nil {
		env.Journal.Whole(env.Request.API, a.prefill.answer.B)
	}
	if u, ok := openai.ParseUsage(a.prefill.answer.B); ok {
		env.Journal.Usage = u
	}
	h := env.Client.AnswerHeader()
	h.Set("Content-Type", "application/json")
	if env.Request.Stream {
		h.Set("Content-Type", "text/event-stream")
	} else if a.c.TRTLLM.PerfMetrics {
		a.tellTiming()
	}
	return env.Answer(http.StatusOK, a.prefill.handoff.Answer)
}
