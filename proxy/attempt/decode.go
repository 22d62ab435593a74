package attempt

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// answerLeg sends the leg whose answer the client gets, and relays the answer: a stream event by
// event, any other answer when the proxy has read all of it.
func (a *attempt) answerLeg(ctx context.Context) error {
	env := a.env
	var shaped connector.Leg
	if err := a.shapeAnswer(&shaped); err != nil {
		return err
	}
	a.decodeSent = true
	env.tries[abi.Decode]++
	l := env.beginLeg(abi.Decode, a.p.Decode, env.tries[abi.Decode], a.c.LegID)
	l.limit = time.Duration(env.Config.Timeouts.FirstByte)
	if a.p.Flow == abi.FlowPrefillFirst && env.Request.Stream {
		if limit := a.kvLimit(); limit < l.limit {
			l.limit, l.kvBound = limit, true
		}
	}
	if !a.deadline.IsZero() {
		if l.limit, l.short = a.within(l.limit); l.short {
			l.kvBound = false
		}
	}
	resp, err := a.send(ctx, l, &shaped, waits{sendBy: a.prefill.readBy, head: l.limit, idle: l.limit})
	shaped = connector.Leg{} // an open stream must not hold the body
	if err != nil {
		a.decodeSent, a.decodeIdle = maybeSent(err), endedItself(ctx, err)
		return a.legEnded(ctx, l, err)
	}
	defer resp.Close()
	switch {
	case resp.Status/100 != 2:
		err = a.readRefusal(l, resp)
		a.decodeIdle = true
		return a.legEnded(ctx, l, err)
	case env.Request.Stream && isStream(resp):
		err = a.relayStream(ctx, l, resp)
	case env.Client.Begun():
		err = l.failedBy("bad_answer", 502, nil)
	default:
		err = a.relayWhole(ctx, l, resp)
	}
	if err != nil {
		a.decodeIdle = answeredWithError(err) || endedItself(ctx, err)
		return a.legEnded(ctx, l, err)
	}
	a.legSucceeded(l)
	return nil
}

// shapeAnswer shapes the leg whose answer the client gets. The record owns the memory of its body.
// shaped is a pointer, because a copy of the leg would be on the stack of each open stream.
func (a *attempt) shapeAnswer(shaped *connector.Leg) error {
	body, err := a.answerBody()
	if err != nil {
		return err
	}
	a.c.ReturnIDs = a.env.Kept != nil
	switch {
	case a.concurrent:
		*shaped, err = a.conn.Decode(&a.c, nil, body)
	case a.p.Flow == abi.FlowPrefillFirst:
		*shaped, err = a.conn.Decode(&a.c, &a.prefill.handoff, body)
	default:
		*shaped, err = a.conn.Aggregated(&a.c, body)
	}
	a.c.ReturnIDs = false
	if err != nil {
		return err
	}
	if !shaped.Alias {
		a.legBody.Set(shaped.Body[:0]) // keep a grown body's memory
	} else { // free the memory while the engine generates
		a.legBody.Free()
		a.legBody = nil
	}
	if a.env.Hooks != nil {
		return a.edit(abi.Decode, shaped, &a.legBody)
	}
	return nil
}

// answerBody prepares the leg that answers the client, and returns an empty slice for its body.
// legBody owns the memory.
func (a *attempt) answerBody() (b []byte, err error) {
	if a.legBody == nil {
		if a.legBody, err = a.env.Client.Buffer(len(a.env.Client.Body()) + len(a.c.PromptIDs) + legSlack); err != nil {
			return nil, err
		}
	}
	if a.env.Class != nil {
		a.prioritize(a.p.Decode)
	}
	return a.legBody.B[:0], nil
}

// readRefusal reads an answer that is not a 2xx, and returns the failure of the leg.
func (a *attempt) readRefusal(l *leg, resp *upstream.Response) error {
	answer, err := readAnswer(a.env.Memory, resp, l.Start.Add(l.limit)) // an error may quote the prompt
	defer func() { answer.Free() }()
	if err != nil {
		return l.failed(err)
	}
	return a.rejected(l, resp, answer.B, false)
}

// claimAnswer records that decode has read the KV, unless prefill has failed before. Then it
// returns the error of prefill. If stream is set, decode's answer has only begun. The pair learns
// whether the KV transfer worked, and, from a stream, how long the transfer took. If decode got no
// KV because prefill names an unknown host, that is a failure of the pair. Decode without KV for
// any other reason says nothing about the pair.
func (a *attempt) claimAnswer(ctx context.Context, stream bool) error {
	if a.concurrent && !a.claimKV() {
		<-ctx.Done() // the winner cancels this leg next
		return context.Cause(ctx)
	}
	a.kvRead = true
	switch {
	case a.pair == nil:
	case a.p.Flow == abi.FlowPrefillFirst && a.prefill.handoff.Fallback == connector.ForeignHost:
		a.pair.Failure(connector.ForeignHost)
	case a.p.Flow == abi.FlowPrefillFirst && a.prefill.handoff.Fallback != "":
	default:
		a.pair.Success()
		if stream && !a.prefill.handed.IsZero() && !a.fresh { // the first transfer of a pair includes the handshake
			a.env.Registry.MeasurePair(a.p.Prefill, a.p.Decode, a.env.Ask.Request.PromptTokens, time.Since(a.prefill.handed))
		}
	}
	a.p.Lease.Answered(stream)
	return nil
}

// endedItself reports whether the engine ended a leg that failed with err. Otherwise the proxy
// gave the leg up, and decode may still wait for KV.
func endedItself(ctx context.Context, err error) bool {
	return ctx.Err() == nil && !timedOut(err) && !downstream.OwnFault(err)
}

// within returns the shorter of limit and the time that is left until the plan policy's
// deadline, at least 1 ms, and whether that deadline is the shorter one. There must be a deadline.
func (a *attempt) within(limit time.Duration) (time.Duration, bool) {
	if left := max(time.Until(a.deadline), time.Millisecond); left < limit {
		return left, true
	}
	return limit, false
}

// kvLimit limits the time from prefill's answer until decode has the KV of the prompt and begins
// its stream. It does not apply to an answer that is no stream: such an answer begins when all
// of it is ready, so its first byte does not show when the KV arrived. Only
// timeouts.first_byte limits it. The KV must come before the end of a lease that decode does
// not renew, because decode would read other data afterwards.
func (a *attempt) kvLimit() time.Duration {
	t := &a.env.Config.Timeouts
	limit := t.Transfer
	if a.fresh {
		limit += t.Handshake
	}
	if d, ok := a.conn.(connector.Deferrer); ok && d.Defers() {
		limit += t.DeferredWrite
	}
	if h := &a.prefill.handoff; h.Lease > 0 && !h.Renews {
		return min(time.Duration(limit), max(h.Lease-time.Since(a.prefill.handed), time.Millisecond))
	}
	return time.Duration(limit)
}

// leaseOver reports whether it is too late to send decode to the blocks of prefill.
func (a *attempt) leaseOver() bool {
	return !a.prefill.readBy.IsZero() && !time.Now().Before(a.prefill.readBy)
}
