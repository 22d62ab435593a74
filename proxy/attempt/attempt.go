// Package attempt runs one placement of a request. It sends the legs in the order of their
// flow, relays the answer to the client, and makes the engines free the KV blocks of a failed
// attempt. The package calls nothing of the exchange: Run returns an Outcome, which also says if the
// attempt needs another engine to go on.
//
// A request with prefill and decode passes through attempt, prefill, decode and relay, in this
// order; leg sends each leg. The other files hold what concerns few requests, or a failure:
// concurrent (both legs at the same time), whole (an answer that is no stream), gateway, encode,
// hook, retained, numbers, remote; control, failure, broken and cleanup.
//
// The decisions behind this package are in docs/design/attempt.md.
package attempt

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/retained"
	"github.com/pdproxy/pdproxy/proxy/state/gaps"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// attempt is the state of one placement of an exchange and of its legs. An attempt never
// changes its disagg id, because prefill registers the id: a retry is another attempt with
// another id. The goroutine of the exchange owns the attempt. The goroutine of a concurrent
// prefill leg reads only fields that do not change meanwhile, and returns a prefillLeg.
type attempt struct {
	env  *Env
	conn connector.Connector
	c    connector.Attempt
	owed

	concurrent bool                       // prefill's answer does not shape the decode leg: both legs run at the same time
	both       concurrentLegs             // the state of both legs, if they run at the same time
	ending     gaps.Ending                // of decode's stream so far, if decode may retain its KV
	asksIDs    bool                       // the prefill leg asks for the token ids of the prompt
	shared     bool                       // c.PromptIDs are those of this attempt, and not those of env
	trial      bool                       // the circuit of the pair was not closed when the attempt began
	began      decodeState                // the state of the decode engine when the attempt began
	deadline   time.Time                  // the plan policy's deadline for the client's first byte; zero: none
	edits      [abi.Encode + 1][]abi.Edit // the leg hook's edits of header lines, by phase
	hook       HookAnswer                 // the decision about the leg that failed last

	needs       Need         // what the attempt waits for
	failed      error        // the failure with which it waits; nil: none
	observation *observation // of the gateway that sends the request; nil until it must wait
}

// decodeState is the state of a decode engine at one moment.
type decodeState struct {
	restarts uint32
	forced   bool // the circuit of the engine was open: the leg is a trial
}

// owed is the record of everything that an attempt may still have to free. end frees all of it,
// also after a panic: on the engines by the clean-up, in this process by free.
type owed struct {
	p     *coordinator.Placement // its lease
	pair  *engine.Pair           // of the two targets; nil with one leg
	fresh bool                   // no transfer of the pair had succeeded when the attempt began; the pair counts the attempt

	prefill     prefillLeg
	prefillBody *buffer.Buffer // of the prefill leg, until its goroutine owns it; nil: none
	registered  bool           // the coordinator has the clean-up for the time until prefill has answered; constant while concurrent legs run
	turn        *retained.KV   // the KV of the previous turn that prefill pulls; nil: none
	streamed    *streamedTurn  // the KV that decode retains of this stream; nil: no event has named it

	legBody      *buffer.Buffer // of the leg that answers the client; nil: none
	decodeSent   bool           // this and the next three have the meaning of connector.Orphan
	decodeIdle   bool
	kvRead       bool
	decodeFailed bool
}

// prefillLeg is the progress of the prefill leg and what it leaves behind.
type prefillLeg struct {
	begun    bool               // the leg counts as a try
	sent     bool               // the leg may have reached the engine
	done     bool               // answer is whole
	read     bool               // handoff is valid
	rejected bool               // the engine answered with an error status
	late     *upstream.Detached // the leg, if the proxy gave it up and the engine may still answer it; else nil
	err      error

	answer  *buffer.Buffer    // nil: none
	handoff connector.Handoff // refers to answer
	handed  time.Time         // when decode could begin; zero: decode did not wait for prefill
	readBy  time.Time         // decode must have the request by then, or it may not find the blocks; zero: any time
	expiry  *time.Timer       // ends a concurrent decode leg if the KV does not arrive in time; nil: none
}

// orphan returns the progress of the attempt for the connector's clean-up.
func (o *owed) orphan() connector.Orphan {
	f := connector.Orphan{
		PrefillSent: o.prefill.sent, PrefillDone: o.prefill.done, Refused: o.prefill.rejected,
		DecodeSent: o.decodeSent, DecodeIdle: o.decodeIdle, KVRead: o.kvRead, DecodeFailed: o.decodeFailed,
	}
	if o.prefill.read {
		f.Handoff = &o.prefill.handoff
	}
	return f
}

// leavePlacement releases the lease, and ends the count of the attempt on the pair.
func (o *owed) leavePlacement() {
	o.p.Lease.Release()
	if o.fresh {
		o.pair.End()
	}
	o.pair, o.fresh = nil, false
}

// free frees what this process holds for the attempt.
func (o *owed) free() {
	if o.prefill.late != nil { // nobody needs the late answer of prefill any more
		o.prefill.late.Close()
	}
	if o.prefill.expiry != nil {
		o.prefill.expiry.Stop()
	}
	o.leavePlacement()
	o.prefill.answer.Free()
	o.prefillBody.Free()
	o.legBody.Free()
	o.prefill, o.prefillBody, o.legBody = prefillLeg{}, nil, nil
}

// Outcome is the result of Run.
type Outcome struct {
	Err  error      // nil: the client has the whole answer, or Needs is NeedsPick or NeedsServing
	Hook HookAnswer // the decision of the leg hook about Err
	// Needs is what the attempt needs to go on; NeedsNothing: it has ended. Otherwise the attempt
	// waits, and the next call of Run must follow: the placement has the prefill target and the
	// disagg id of Placement, or is nil if there is none.
	Needs     Need
	Placement *coordinator.Placement
	Engines   []*engine.Instance // for NeedsServing
	// Broken: the client's stream has broken off with Err. The caller continues the stream, or ends
	// it by Env.EndBroken. nil: it has not.
	Broken *Broken
}

// Need is what an attempt needs to go on.
type Need uint8

// The needs of an attempt, and what the attempt does without another placement.
const (
	NeedsNothing Need = iota
	NeedsPick         // prefill has answered, and the picker of a sidecar may choose decode. Without: decode stays on its engine
	NeedsDecode       // a decode leg failed with Err, and prefill still has the KV. Without: the attempt ends with Err
	NeedsServing      // a gateway has sent the request to one of Engines. Without: no known engine serves it
)

// Run runs one attempt at the placement p, or goes on with the attempt that waits for p. An attempt
// that does not wait has ended when Run returns, even after a panic.
func Run(env *Env, p *coordinator.Placement) (o Outcome) {
	a := env.waiting
	if env.waiting = nil; a == nil {
		a = &attempt{
			env: env, owed: owed{p: p},
			conn: env.Connector(p.Decode.Spec.Connector),
			c: connector.Attempt{
				Request: env.Request, ID: p.ID, LegID: env.LegID(),
				PromptIDs: env.PromptIDs,
				Prefill:   p.Prefill, Decode: p.Decode, Trust: env.trusts(),
			},
		}
	}
	o.Err = ErrPanicked
	defer func() {
		if o.Needs == NeedsNothing {
			a.end(o.Err)
		} else {
			env.waiting, a.failed = a, o.Err
		}
	}()
	if a.needs == NeedsNothing {
		o.Err = a.run()
	} else {
		o.Err = a.goOn(p)
	}
	o.Needs, o.Placement = a.needs, a.p
	o.Broken, env.broken = env.broken, nil
	if a.needs == NeedsServing {
		o.Engines = a.observation.head.Engines
	}
	if o.Err != nil && env.Gateway == nil {
		o.Hook = a.askHook(o.Err)
	}
	return o
}

// run records the attempt and sends the legs in the order of the flow.
func (a *attempt) run() error {
	env, p := a.env, a.p
	if env.Gateway != nil {
		return a.observe()
	}
	if c, ok := a.conn.(connector.Configurer); ok {
		c.Configure(&a.c)
		a.c.Conversation = prompt.Conversation(env.Ask)
	}
	a.began = decodeState{restarts: p.Decode.Restarts(), forced: p.Decode.Breaker.Circuit(time.Now()) == circuit.Open}
	if o, ok := a.conn.(connector.Ordered); ok && !p.Prefill.IsZero() {
		a.chooseFlow(o)
	}
	a.c.Flow = p.Flow
	a.concurrent = p.Flow == abi.FlowConcurrent || p.Flow == abi.FlowDecodeFirst
	env.Journal.Placed(p, env.Ask.Request.PromptTokens)
	a.joinPair()
	if p.FirstByte > 0 {
		a.deadline = time.Now().Add(p.FirstByte)
	}
	if env.Registry.Snapshot().Encoders && !env.encoded {
		if pool := a.encoderPool(); pool != nil {
			if err := a.encode(pool); err != nil {
				return err
			}
		}
	}
	a.sharePrompt()
	switch {
	case a.concurrent:
		return a.runConcurrent()
	case p.Flow == abi.FlowPrefillFirst:
		return a.prefillFirst()
	default: // one leg, to an engine that serves both phases
		return a.answerLeg(env.Context)
	}
}

// chooseFlow chooses the order of the legs of a connector that has several.
func (a *attempt) chooseFlow(o connector.Ordered) {
	var fallback string
	if a.p.Flow, fallback = o.Order(&a.c, a.env.Config.TRTLLM.ScheduleStyle); fallback != "" {
		a.p.Fallbacks = append(a.p.Fallbacks, coordinator.Fallback{What: "schedule_style", Reason: fallback})
	}
}

// joinPair counts the attempt on the pair of its two targets.
func (a *attempt) joinPair() {
	if !a.p.Prefill.IsZero() {
		a.pair = a.env.Registry.Pair(a.p.Prefill, a.p.Decode)
		a.trial = a.env.Registry.PairsInTrouble() && a.pair.Trial()
		a.fresh = a.pair.Begin()
	}
}

// goOn continues an attempt that has waited for p; nil: there is no other placement.
func (a *attempt) goOn(p *coordinator.Placement) error {
	needs, failed := a.needs, a.failed
	a.needs, a.failed = NeedsNothing, nil
	switch {
	case needs == NeedsServing:
		return a.observation.goOn(p)
	case p != nil:
		a.move(p)
	case needs == NeedsDecode:
		return failed
	}
	return a.decodeAfterPrefill()
}

// end ends the attempt with err; nil: it has succeeded. It starts the clean-up of a failed attempt,
// and frees everything else that the attempt holds. If a retry must not overlap with the old legs on
// the engines, end returns after the engines have answered the clean-up.
func (a *attempt) end(err error) {
	defer a.free() // also if the clean-up panics
	a.env.reached = a.env.reached || a.prefill.sent || a.decodeSent
	if a.streamed != nil && a.streamed.kv != nil { // the event that names it did not pass
		a.env.Retained.Free(a.streamed.kv, 0)
	}
	if err == nil || a.env.Gateway != nil { // what a gateway has sent is not this proxy's to free
		return
	}
	a.cleanUp(err)
	if a.turn != nil && !a.prefill.done {
		a.giveUpTurn()
	}
}
