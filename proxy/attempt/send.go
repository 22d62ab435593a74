package attempt

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// prefillLeg sends the prefill leg and reads its whole answer into r. The error is a
// *Error, a *coordinator.NoTargetError or the cause of ctx.
func (a *attempt) prefillLeg(ctx context.Context, shaped connector.Leg, r *prefillResult) error {
	env := a.env
	r.begun = true
	l := env.beginLeg(abi.Prefill, a.p.Prefill, env.tries[abi.Prefill]+1, a.c.LegID)
	var limit time.Duration
	limit, l.short = a.within(time.Duration(env.Config.Timeouts.Prefill))
	w, by := waits{head: limit, idle: limit}, l.Start.Add(limit)
	if a.conn.Reclaims() {
		// An answer that comes after the limit, or after the client has left, names blocks
		// that the clean-up frees. After the limit the clean-up waits for the answer, while
		// the next attempt runs.
		w.linger, w.keepLate = cleanup.PrefillLinger, true
	}
	resp, err := a.send(ctx, l, shaped, w)
	if errors.Is(err, upstream.ErrUnwanted) {
		env.Journal.LegEnded(l.Leg, "no_decode")
		return &coordinator.NoTargetError{Phase: abi.Decode, Model: env.Ask.Model}
	}
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
		// After a pull it may be that decode did not hand out the KV of the turn before.
		if a.turn != nil && resp.Status/100 == 5 {
			env.Journal.Fallback("turn_kv", "pull_failed")
		}
		err = a.rejected(l, resp, answer.B, a.turn != nil)
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

// failedAtOnce returns the failure that the first event of prefill's answer tells of, if
// the answer is a stream; nil: none.
func (a *attempt) failedAtOnce(l *leg, resp *upstream.Response, answer []byte) error {
	if !isStream(resp) {
		return nil
	}
	if f := openai.ReadFirstEvent(answer); f.Verdict == openai.ErrorEvent {
		return a.failedInside(l, "error_event", f.Status, f.Data, nil)
	}
	return nil
}

// answerLeg sends the leg whose answer the client gets, and relays it.
func (a *attempt) answerLeg(ctx context.Context, shaped connector.Leg) error {
	env := a.env
	if !shaped.Alias {
		a.legBody.Set(shaped.Body[:0]) // keep a grown body's memory
	} else { // not held while the engine generates
		a.legBody.Free()
		a.legBody = nil
	}
	if env.Hooks != nil {
		var err error
		if shaped, err = a.edited(abi.Decode, shaped, &a.legBody); err != nil {
			return err
		}
	}
	a.orphan.DecodeSent = true
	env.tries[abi.Decode]++
	l := env.beginLeg(abi.Decode, a.p.Decode, env.tries[abi.Decode], a.c.LegID)
	l.limit = time.Duration(env.Config.Timeouts.FirstByte)
	if a.p.Flow == abi.FlowPrefillFirst && env.Request.Stream && a.kvLimit() < l.limit {
		l.limit, l.kvBound = a.kvLimit(), true
	}
	if l.limit, l.short = a.within(l.limit); l.short {
		l.kvBound = false
	}
	resp, err := a.send(ctx, l, shaped, waits{sendBy: a.readBy(), head: l.limit, idle: l.limit})
	if err != nil {
		a.orphan.DecodeSent, a.orphan.DecodeIdle = maybeSent(err), ctx.Err() == nil && !timedOut(err)
		return a.legEnded(ctx, l, err)
	}
	defer resp.Close()
	if resp.Status/100 != 2 {
		answer, err := readAnswer(env.Memory, resp, buffer.MaxAnswer, l.Start.Add(l.limit)) // an error may quote the prompt
		if err != nil {
			err = l.failed(err)
		} else {
			err = a.rejected(l, resp, answer.B, false)
		}
		answer.Free()
		a.orphan.DecodeIdle = true
		return a.legEnded(ctx, l, err)
	}
	if err := a.relay(ctx, l, resp); err != nil {
		a.orphan.DecodeIdle = answeredWithError(err) || ctx.Err() == nil && !timedOut(err)
		return a.legEnded(ctx, l, err)
	}
	a.legSucceeded(l)
	return nil
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
func (a *attempt) send(ctx context.Context, l *leg, shaped connector.Leg, w waits) (*upstream.Response, error) {
	env, t := a.env, l.target
	fields := append(l.fields[:0], env.Fields...)
	if t.APIKey != "" {
		fields = append(downstream.Without(fields, "Authorization"), upstream.Field{Name: "Authorization", Value: "Bearer " + t.APIKey})
	}
	l.fields = append(fields, shaped.Header...)
	if e := a.edits[l.Phase]; len(e) > 0 {
		l.fields = editFields(l.fields, e)
	}
	l.body[0] = shaped.Body
	if shaped.Msgpack {
		copied, err := env.Client.LegBuffer(len(shaped.Body))
		if err != nil {
			return nil, l.failed(err)
		}
		defer copied.Free() // the client reads it only until Do returns
		if packed, err := connector.AppendMsgpack(copied.B, shaped.Body); err == nil {
			copied.Set(packed)
			l.body[0] = packed
			l.fields = append(l.fields, upstream.Field{Name: connector.HeaderMsgpack, Value: "1"})
		}
	}
	if env.Config.Transport.Client == "nethttp" { // which copies the body
		n := int64(len(l.body[0]))
		if err := env.Client.TakeMemory(n); err != nil {
			return nil, l.failed(err)
		}
		defer env.Client.ReleaseMemory(n)
	}
	l.request = upstream.Request{
		Method: "POST", Path: t.Prefix + shaped.Path, Header: l.fields, Body: l.body[:],
		SendBy: w.sendBy, HeadTimeout: w.head, IdleTimeout: w.idle, Linger: w.linger,
		Once: !a.p.Prefill.IsZero() || env.Route.CallerCoordinates(), KeepLate: w.keepLate,
	}
	if l.Phase != abi.Encode {
		a.watch(l)
		l.request.Control, l.request.Detach = l, l.Phase == abi.Prefill && waitsForLateAnswer(a.conn)
	}
	if l.Phase == abi.Decode && a.both.sent != nil {
		l.request.Sent = sync.OnceFunc(func() { close(a.both.sent) })
	}
	resp, err := t.Client.Do(ctx, &l.request)
	l.free()
	if err != nil {
		return nil, l.failed(err)
	}
	env.Journal.LegAnswered(l.Leg, resp.Status)
	if a.timed() {
		env.Journal.LegTimed(l.Leg, connector.ReadTiming(resp.Get))
	}
	return resp, nil
}
