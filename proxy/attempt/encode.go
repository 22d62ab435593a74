package attempt

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// encodeWidth limits how many parts of one request are encoded at the same time.
const encodeWidth = 16

// errEncode is the cause with which the other encode calls end when one has failed.
var errEncode = errors.New("another part could not be encoded")

// encode sends the images and sounds of the request to the encoders of the pool, before any
// other leg is sent and once for all attempts. If no encoder is ready, encode counts a
// fallback and returns nil: the other engines then encode the parts themselves.
func (a *attempt) encode(pool *engine.Pool) error {
	env := a.env
	legs := a.conn.(connector.Encoder).Encode(&a.c)
	if len(legs) > 0 {
		targets := env.encoders(pool, a.p.Decode.Spec.Connector)
		if len(targets) == 0 {
			env.Journal.Fallback("encode", "no_target")
		} else if err := a.encodeAll(legs, targets); err != nil {
			return err
		}
	}
	env.encoded = true
	return nil
}

// encoderPool returns the pool of the request's model, or nil if the pool has no encoders or
// the connector does not use encoders.
func (a *attempt) encoderPool() *engine.Pool {
	model := a.env.Request.Model
	if models := a.p.Decode.Models(); model == "" && len(models) > 0 {
		model = models[0]
	}
	pool, _ := a.env.Registry.Snapshot().Pool(model)
	if pool == nil || !pool.Encoders {
		return nil
	}
	if _, ok := a.conn.(connector.Encoder); !ok {
		return nil
	}
	return pool
}

// encoders returns the encoders of a connector that are ready, in round-robin order. It leaves
// out encoders that have failed in this request or have an open circuit, unless no others are
// left.
func (env *Env) encoders(pool *engine.Pool, connector string) []engine.Target {
	var good, bad []engine.Target
	for _, r := range pool.Encode {
		switch {
		case r.Spec.Connector != connector || !env.Route.AllowsEncoder(r.Instance):
		case slices.Contains(env.Ask.Excluded, r.Target) || !r.Breaker.Allow():
			bad = append(bad, r.Target)
		default:
			good = append(good, r.Target)
		}
	}
	if len(good) == 0 {
		return bad
	}
	turn := int(env.encodes.Add(1) % uint64(len(good)))
	return append(good[turn:], good[:turn]...)
}

// encodeAll makes the encode calls and distributes them over the targets. The first call that
// fails ends the others.
func (a *attempt) encodeAll(legs []connector.Leg, targets []engine.Target) error {
	env := a.env
	ctx, cancel := context.WithCancelCause(env.Context)
	defer cancel(nil)
	env.tries[abi.Encode]++
	errs := make([]error, len(legs))
	room := make(chan struct{}, encodeWidth)
	var calls sync.WaitGroup
	for i, l := range legs {
		room <- struct{}{}
		one := env.beginLeg(abi.Encode, targets[i%len(targets)], env.tries[abi.Encode], a.c.LegID)
		calls.Go(func() {
			defer func() { <-room }()
			if errs[i] = a.encodeLeg(ctx, one, l); errs[i] != nil {
				cancel(errEncode)
			}
		})
	}
	calls.Wait()
	return firstLegError(errs)
}

// encodeLeg makes one encode call and reads its whole answer. Only the status of the answer
// matters.
func (a *attempt) encodeLeg(ctx context.Context, l *leg, shaped connector.Leg) (err error) {
	env := a.env
	defer func() {
		if v := recover(); v != nil {
			env.Journal.Panic(v)
			err = ErrPanicked
		}
	}()
	limit := time.Duration(env.Config.Timeouts.Prefill)
	resp, err := a.send(ctx, l, &shaped, waits{head: limit, idle: limit})
	if err != nil {
		return a.legEnded(ctx, l, err)
	}
	defer resp.Close()
	answer, err := readAnswer(env.Memory, resp, l.Start.Add(limit))
	defer answer.Free()
	switch {
	case err != nil:
		err = l.failed(err)
	case resp.Status/100 != 2:
		err = a.rejected(l, resp, answer.B, false)
	default:
		a.legSucceeded(l)
		return nil
	}
	return a.legEnded(ctx, l, err)
}
