package attempt

import (
	"context"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
)

// answerLeg sends the leg whose answer the client gets, and relays it.
func (a *attempt) answerLeg(ctx context.Context, shaped connector.Leg) error {
	env := a.env
	if !shaped.Alias {
		a.legBody.Set(shaped.Body[:0]) // keep a grown body's memory
	} else { // free the memory while the engine generates
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
	env.reached = env.reached || err == nil || maybeSent(err)
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
