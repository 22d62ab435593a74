package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

var (
	// errAnswered ends a decode leg whose prefill had the whole answer.
	errAnswered = errors.New("prefill had the whole answer")
)

// prefillLeg sends the prefill leg, reads its whole answer and judges it. The
// error is a *legError, or the context's cause.
func (a *attempt) prefillLeg(ctx context.Context, l connector.Leg) error {
	x, t := a.x, a.p.Prefill
	x.tries[abi.Prefill]++
	row := x.beginLeg(abi.Prefill, t, a.c.LegID)
	var limit time.Duration
	limit, row.short = a.within(time.Duration(x.cfg.Timeouts.Prefill))
	w, by := waits{head: limit, idle: limit}, row.Start.Add(limit)
	if a.conn.Reclaims() {
		// An answer that comes after the limit, or after the client has left, names
		// blocks that the clean-up frees. After the limit the clean-up waits for the
		// answer, beside the next attempt.
		w.linger, w.keepLate = cleanup.PrefillLinger, true
	}
	resp, err := a.send(ctx, row, l, w)
	if errors.Is(err, upstream.ErrUnwanted) {
		x.journal.LegEnded(row.Leg, "no_decode")
		return &coordinator.NoTargetError{Phase: abi.Decode, Model: x.ask.Model}
	}
	if err != nil {
		return x.legEnded(ctx, row, err)
	}
	defer resp.Close()
	answer, err := readAnswer(x.s.memory, resp, buffer.MaxAnswer, by)
	switch {
	case err != nil:
		err = newLegError(abi.Prefill, t, err)
	case resp.Status/100 != 2:
		err = a.spare(x.statusError(abi.Prefill, t, resp, answer))
	default:
		if err = x.streamError(row, resp, answer.B); err != nil {
			break
		}
		a.answer, a.orphan.PrefillDone = answer, true
		if a.handoff, err = a.conn.ReadPrefill(&a.c, answer.B); err == nil {
			x.legSucceeded(row)
			return nil
		}
		return x.legEnded(ctx, row, &legError{phase: abi.Prefill, target: t, reason: "bad_answer", code: 502, sent: true, err: err})
	}
	answer.Free()
	return x.legEnded(ctx, row, err)
}

// streamError is the failure that the first event of a prefill's answer tells
// of, where that is a stream; nil for none.
func (x *exchange) streamError(row *leg, resp *upstream.Response, answer []byte) error {
	if !isStream(resp) {
		return nil
	}
	if f := openai.ReadFirstEvent(answer); f.Verdict == openai.ErrorEvent {
		return x.engineError(row, "error_event", f.Status, f.Data)
	}
	return nil
}

// answerLeg sends the leg whose answer the client gets, and relays it.
func (a *attempt) answerLeg(ctx context.Context, l connector.Leg) error {
	x, t := a.x, a.p.Decode
	if !l.Alias {
		a.legBody.Set(l.Body[:0]) // keep a grown body's memory
	} else { // not held while the engine generates
		a.legBody.Free()
		a.legBody = nil
	}
	if x.legPolicy != nil {
		var err error
		if l, err = a.edited(abi.Decode, l, &a.legBody); err != nil {
			return err
		}
	}
	a.orphan.DecodeSent = true
	x.tries[abi.Decode]++
	row := x.beginLeg(abi.Decode, t, a.c.LegID)
	a.limit, a.kvBound = time.Duration(x.cfg.Timeouts.FirstByte), false
	if a.p.Flow == abi.FlowPrefillFirst && x.req.Stream && a.kvLimit() < a.limit {
		a.limit, a.kvBound = a.kvLimit(), true
	}
	if a.limit, row.short = a.within(a.limit); row.short {
		a.kvBound = false
	}
	resp, err := a.send(ctx, row, l, waits{sendBy: a.readBy, head: a.limit, idle: a.limit})
	if err != nil {
		a.orphan.DecodeSent, a.orphan.DecodeIdle = maybeSent(err), ctx.Err() == nil && !timedOut(err)
		return x.legEnded(ctx, row, a.blame(err))
	}
	defer resp.Close()
	if resp.Status/100 != 2 {
		answer, err := readAnswer(x.s.memory, resp, buffer.MaxAnswer, row.Start.Add(a.limit)) // refusals may quote the prompt
		le := newLegError(abi.Decode, t, err)
		if err == nil {
			le = x.statusError(abi.Decode, t, resp, answer)
		}
		answer.Free()
		a.orphan.DecodeIdle = true
		return x.legEnded(ctx, row, a.blame(le))
	}
	if err := a.relay(ctx, row, resp); err != nil {
		a.orphan.DecodeIdle = refused(err) || ctx.Err() == nil && !timedOut(err)
		return x.legEnded(ctx, row, a.blame(err))
	}
	x.legSucceeded(row)
	return nil
}

// blame gives a failed decode leg to the pair instead of the engine where decode
// did answer, but not with the KV of this prefill; and to both where the KV did
// not come in time.
func (a *attempt) blame(err error) error {
	var le *legError
	if !errors.As(err, &le) || le.phase != abi.Decode || a.pair == nil || a.orphan.KVRead || !le.silent.IsZero() {
		return err
	}
	switch {
	case !le.sent:
		if le.code == 504 && a.leaseOver() { // nobody is at fault: it waited for its turn at max_conns
			le.reason, le.spared = reasonKVLease, true
		}
	case le.status/100 == 5:
		le.pair = a.pair
	case a.kvBound && le.code == 504:
		le.pair, le.reason = a.pair, reasonKVLate
	}
	return err
}

// waits bounds a leg: until it is sent, until its head, for each read of its body,
// how long a cancelled one listens, and whether one that is late goes on
// (upstream.Request).
type waits struct {
	sendBy             time.Time
	head, idle, linger time.Duration
	keepLate           bool
}

// send writes one leg and waits for the head of its answer.
func (a *attempt) send(ctx context.Context, row *leg, l connector.Leg, w waits) (*upstream.Response, error) {
	x, t := a.x, row.target
	fields := append(row.fields[:0], x.base...)
	if t.APIKey != "" {
		fields = append(downstream.Without(fields, "Authorization"), upstream.Field{Name: "Authorization", Value: "Bearer " + t.APIKey})
	}
	row.fields = append(fields, l.Header...)
	if e := a.edits[row.Phase]; len(e) > 0 {
		row.fields = editFields(row.fields, e)
	}
	row.body[0] = l.Body
	if l.Msgpack {
		copied, err := x.client.LegBuffer(len(l.Body))
		if err != nil {
			return nil, newLegError(row.Phase, t, err)
		}
		defer copied.Free() // the client reads it only until Do returns
		if packed, err := connector.AppendMsgpack(copied.B, l.Body); err == nil {
			copied.Set(packed)
			row.body[0] = packed
			row.fields = append(row.fields, upstream.Field{Name: connector.HeaderMsgpack, Value: "1"})
		}
	}
	if x.cfg.Transport.Client == "nethttp" { // which copies the body
		n := int64(len(row.body[0]))
		if err := x.client.TakeMemory(n); err != nil {
			return nil, newLegError(row.Phase, t, err)
		}
		defer x.client.ReleaseMemory(n)
	}
	row.request = upstream.Request{
		Method: "POST", Path: t.Prefix + l.Path, Header: row.fields, Body: row.body[:],
		SendBy: w.sendBy, HeadTimeout: w.head, IdleTimeout: w.idle, Linger: w.linger,
		Once: !a.p.Prefill.IsZero() || x.route.CallerCoordinates(), KeepLate: w.keepLate,
	}
	if row.Phase != abi.Encode {
		row.a = a
		row.request.Control, row.request.Detach = row, row.Phase == abi.Prefill && hearsOut(a.conn)
	}
	if row.Phase == abi.Decode && a.decodeSent != nil {
		row.request.Sent = sync.OnceFunc(func() { close(a.decodeSent) })
	}
	resp, err := t.Client.Do(ctx, &row.request)
	row.free()
	if err != nil {
		var ue *upstream.Error
		if errors.As(err, &ue) && ue.Detached != nil {
			a.left = ue.Detached
		}
		return nil, newLegError(row.Phase, t, err)
	}
	x.journal.LegAnswered(row.Leg, resp.Status)
	if a.timed {
		x.journal.LegTimed(row.Leg, connector.ReadTiming(resp.Get))
	}
	return resp, nil
}

// legEnded books a leg that did not succeed. A leg that its own context ended
// is nobody's failure: the cause comes back instead. One that failed by itself
// has, also when its context ended since: with concurrent legs the failure of
// one reaches the other through the engines as well.
func (x *exchange) legEnded(ctx context.Context, row *leg, err error) error {
	var le *legError
	failed := errors.As(err, &le)
	var late *legError // the leg was ended because its KV did not come
	if ctx.Err() != nil && errors.As(context.Cause(ctx), &late) && errors.Is(late, errKVLate) {
		late.elapsed = time.Since(row.Start)
		x.legFailed(row, late)
		return late
	}
	if ctx.Err() != nil && (!failed || errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))) {
		x.journal.LegCancelled(row.Leg)
		return context.Cause(ctx)
	}
	if !failed { // the client's side failed, not the engine
		x.journal.LegEnded(row.Leg, "client")
		return err
	}
	le.elapsed, le.spared = time.Since(row.Start), le.spared || row.short && le.code == 504
	if le.granted = row.grant; row.starved && !le.silent.IsZero() {
		le.reason, le.silent = reasonKVSilent, row.a.p.Prefill
	}
	x.legFailed(row, le)
	return le
}

// legFailed counts a failed leg against its engine, unless the request itself, the
// proxy or the plan policy's limit was at fault.
func (x *exchange) legFailed(row *leg, le *legError) {
	if downstream.OwnFault(le) {
		x.journal.LegEnded(row.Leg, le.reason)
		return
	}
	x.journal.LegFailed(row.Leg, le.reason)
	if le.status == 0 && le.silent.IsZero() {
		le.target.ProbeSoon()
	}
	switch {
	case le.spared:
	case engine.IsRefused(le.err):
		le.target.Refused()
	case le.final:
		le.target.Breaker.Success()
	case le.pair != nil:
		if le.pair.Failure(le.reason); le.reason == reasonKVLate { // decode may also hang by itself
			le.target.Breaker.Failure()
		}
	default:
		le.target.Breaker.Failure()
	}
}

func (x *exchange) legSucceeded(row *leg) {
	row.target.Breaker.Success()
	x.journal.LegSucceeded(row.Leg, row.target.Spec.Connector)
}

// statusError classifies an answer that is no success. A 4xx is the request's
// fault and goes to the client as the engine wrote it; all else may go better
// on another engine. So may a 401 where the client's own key was not sent.
func (x *exchange) statusError(phase abi.Phase, t engine.Target, resp *upstream.Response, answer *buffer.Buffer) *legError {
	e := &legError{phase: phase, target: t, reason: fmt.Sprintf("status_%d", resp.Status), status: resp.Status, code: 502, sent: true}
	ownKey := t.APIKey != "" || x.key != ""
	if resp.Status/100 == 4 && !(resp.Status == 401 && ownKey) {
		e.final = upstream.RequestAtFault(resp.Status)
		e.ctype, e.retryAfter = resp.Get("Content-Type"), resp.Get("Retry-After")
		x.relayed(e, answer.B)
	}
	return e
}

// relayed makes answer, which is copied, what the client gets for e.
func (x *exchange) relayed(e *legError, answer []byte) {
	if err := x.client.Reserve(len(answer)); err != nil {
		*e = *newLegError(e.phase, e.target, err)
		return
	}
	e.relay, e.body = true, bytes.Clone(answer)
}
