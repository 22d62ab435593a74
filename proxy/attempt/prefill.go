package attempt

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// shapePrefill returns the prefill leg and the buffer that holds its body.
func (a *attempt) shapePrefill() (connector.Leg, *buffer.Buffer, error) {
	body, err := a.env.Client.Buffer(len(a.env.Client.Body()) + legSlack)
	if err != nil {
		return connector.Leg{}, nil, err
	}
	done := false
	defer func() { // also after a panic
		if !done {
			body.Free()
		}
	}()
	a.prioritize(a.p.Prefill)
	shaped, err := a.conn.Prefill(&a.c, body.B)
	if err != nil {
		return shaped, nil, err
	}
	if shaped.Alias { // an open stream frees the client's body, perhaps while the leg is still being sent
		body.Free()
		body = a.env.Client.HoldBody()
	} else {
		body.Set(shaped.Body)
	}
	if a.env.Hooks != nil {
		if err = a.edit(abi.Prefill, &shaped, &body); err != nil {
			return shaped, nil, err
		}
	}
	done = true
	return shaped, body, nil
}

// runPrefill sends the prefill leg and reads its answer into r. Only the caller may read r
// until runPrefill has returned.
func (a *attempt) runPrefill(ctx context.Context, shaped connector.Leg, r *prefillResult) {
	r.sent = true
	if r.err = a.prefillLeg(ctx, shaped, r); r.err != nil {
		r.sent, r.rejected = maybeSent(r.err), answeredWithError(r.err)
		return
	}
	r.read = true
	a.reportCached(r.answer.B)
	a.countFallback(&r.handoff)
	if ctx.Err() != nil { // the client left while the answer came
		r.err = context.Cause(ctx)
	}
}

// prefillLeg sends the prefill leg and reads its whole answer into r. The error is a
// *Error, the cause of ctx, or a *failure that wraps a *coordinator.NoTargetError.
func (a *attempt) prefillLeg(ctx context.Context, shaped connector.Leg, r *prefillResult) error {
	env := a.env
	r.begun = true
	l := env.beginLeg(abi.Prefill, a.p.Prefill, env.tries[abi.Prefill]+1, a.c.LegID)
	var limit time.Duration
	limit = time.Duration(env.Config.Timeouts.Prefill)
	if a.trial && a.isConcurrent() { // otherwise prefill does not wait for decode
		limit = min(limit, time.Duration(env.Config.Timeouts.Handshake))
	}
	limit, l.short = a.within(limit)
	w, by := waits{head: limit, idle: limit}, l.Start.Add(limit)
	if a.conn.Reclaims() {
		// An answer that comes after the limit, or after the client has left, names the blocks
		// that the clean-up frees. The clean-up waits for a late answer while the next attempt
		// runs.
		w.linger, w.keepLate = cleanup.PrefillLinger, true
	}
	resp, err := a.send(ctx, l, &shaped, w)
	if err != nil {
		var ue *upstream.Error
		if errors.As(err, &ue) {
			r.left = ue.Detached
		}
		return a.legEnded(ctx, l, err)
	}
	defer resp.Close()
	answer, err := readAnswer(env.Memory, resp, buffer.MaxAnswer, by)
	switch {
	case err != nil:
		err = l.failed(err)
	case resp.Status/100 != 2:
		// If prefill pulled KV, perhaps decode did not deliver the KV of the previous turn.
		if a.owed.turn != nil && resp.Status/100 == 5 {
			env.Journal.Fallback("turn_kv", "pull_failed")
		}
		err = a.rejected(l, resp, answer.B, a.owed.turn != nil)
	default:
		if err = a.failedAtOnce(l, resp, answer.B); err != nil {
			break
		}
		r.answer, r.done = answer, true
		if r.handoff, err = a.conn.ReadPrefill(&a.c, answer.B); err == nil {
			a.legSucceeded(l)
			return nil
		}
		return a.legEnded(ctx, l, l.failedBy("bad_answer", 502, err))
	}
	answer.Free()
	return a.legEnded(ctx, l, err)
}

// failedAtOnce returns a failure if prefill's answer is a stream with an error event before any
// content, else nil.
func (a *attempt) failedAtOnce(l *leg, resp *upstream.Response, answer []byte) error {
	if !isStream(resp) {
		return nil
	}
	head := openai.StreamHead{API: a.env.Request.API} // decode's answer may have freed the rest of the request
	if head.Read(answer) == openai.ErrorEvent {
		return a.failedInside(l, "error_event", head.Status, head.Data, nil)
	}
	return nil
}

// countFallback counts a fallback if decode computes the prompt itself instead of using the
// transferred KV.
func (a *attempt) countFallback(h *connector.Handoff) {
	reason := h.Fallback
	if reason == "" {
		return
	}
	a.env.Journal.Fallback("kv_transfer", reason)
	if reason == connector.ForeignHost {
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
	} else {
		a.tellTiming()
	}
	return env.Answer(http.StatusOK, a.prefill.handoff.Answer)
}
