package attempt

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// shapeAggregated shapes the only leg of an aggregated request. The callers of shapeAggregated and
// shapeDecode pass a pointer, because a copy of the leg would be on the stack of each open stream.
func (a *attempt) shapeAggregated(shaped *connector.Leg) error {
	body, err := a.answerBody()
	if err == nil {
		*shaped, err = a.conn.Aggregated(&a.c, body)
	}
	return err
}

// shapeDecode shapes the decode leg. h is nil if prefill runs at the same time.
func (a *attempt) shapeDecode(shaped *connector.Leg, h *connector.Handoff) error {
	body, err := a.answerBody()
	if err == nil {
		*shaped, err = a.conn.Decode(&a.c, h, body)
	}
	return err
}

// answerBody prepares the leg that answers the client, and returns an empty slice for its body.
// legBody owns the memory.
func (a *attempt) answerBody() (b []byte, err error) {
	if a.owed.legBody == nil {
		if a.owed.legBody, err = a.env.Client.Buffer(len(a.env.Client.Body()) + legSlack); err != nil {
			return nil, err
		}
	}
	a.prioritize(a.p.Decode)
	return a.owed.legBody.B[:0], nil
}

// answerLeg sends the leg whose answer the client gets, relays the answer, and resets shaped.
func (a *attempt) answerLeg(ctx context.Context, shaped *connector.Leg) error {
	env := a.env
	if !shaped.Alias {
		a.owed.legBody.Set(shaped.Body[:0]) // keep a grown body's memory
	} else { // free the memory while the engine generates
		a.owed.legBody.Free()
		a.owed.legBody = nil
	}
	if env.Hooks != nil {
		if err := a.edit(abi.Decode, shaped, &a.owed.legBody); err != nil {
			return err
		}
	}
	a.owed.DecodeSent = true
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
	*shaped = connector.Leg{} // an open stream must not hold the body
	env.reached = env.reached || err == nil || maybeSent(err)
	if err != nil {
		a.owed.DecodeSent, a.owed.DecodeIdle = maybeSent(err), endedItself(ctx, err)
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
		a.owed.DecodeIdle = true
		return a.legEnded(ctx, l, err)
	}
	if err := a.relay(ctx, l, resp); err != nil {
		a.owed.DecodeIdle = answeredWithError(err) || endedItself(ctx, err)
		return a.legEnded(ctx, l, err)
	}
	a.legSucceeded(l)
	return nil
}

// endedItself reports whether the engine ended a leg that failed with err. Otherwise the proxy
// gave the leg up, and decode may still wait for KV.
func endedItself(ctx context.Context, err error) bool {
	return ctx.Err() == nil && !timedOut(err) && !downstream.OwnFault(err)
}
