package attempt

import (
	"fmt"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/retained"
	"github.com/pdproxy/pdproxy/proxy/state/gaps"
)

// pullTurn makes prefill pull the KV of the previous turn from the bidirectional decode engine
// that retains it. The prompt must begin with exactly the tokens of that KV, because engines
// do not compare tokens. Only the first attempt of an exchange pulls KV.
func (a *attempt) pullTurn() {
	env := a.env
	if a.c.Trust || env.WarmUp || env.pulled || env.Retained.Empty() {
		return
	}
	env.pulled = true
	k := env.takeTurn()
	if k == nil {
		return
	}
	if reason := k.Unusable(a.p.Prefill, a.conn, env.Config.Pairs.SameLabels); reason != "" {
		env.Journal.Fallback("turn_kv", reason)
		env.Retained.Free(k, 0)
		return
	}
	a.turn, a.c.RetainedKV = k, k.Params()
	note := "prefill pulls the KV of the previous turn from " + k.Holder().Name()
	if gap := k.Gap(); gap > 0 {
		note += ", which ended " + gap.Round(time.Millisecond).String() + " ago"
	}
	env.Journal.Note(note)
	env.Journal.RetainedKV("pulled")
}

// takeTurn takes the retained KV of the previous turn out of the store. It returns nil if no
// retained KV is known to belong to the beginning of this prompt.
func (env *Env) takeTurn() *retained.KV {
	now, scope := time.Now(), retained.Scope(env.Request)
	name := env.Prompts.ClientID(env.Source())
	named, late := false, false
	if name != "" {
		named, late = env.Retained.Named(env.Context, scope, name)
	}
	if late {
		env.Journal.Fallback("turn_kv", "expired")
	}
	reason := "not_text"
	var ids []uint32
	if retained.TextOnly(env.Request) {
		ids = env.Prompts.ExactIDs(env.Context, env.Prompt, env.Source(), named)
		if reason = "not_a_prefix"; len(ids) == 0 {
			reason = "no_token_ids"
		}
	}
	switch {
	case named:
	case len(ids) == 0:
		return nil
	default:
		name = ""
	}
	k, found := env.Retained.Take(env.Context, scope, name, ids, now)
	switch {
	case found == fleet.KVTaken:
		return k
	case found == fleet.NothingRetained && named:
		reason = "expired"
	case found == fleet.HolderUnknown:
		reason = "engine_gone"
	case found == fleet.CoordinatorUnreachable:
		reason = coordinator.ReasonCoordinator
	case found == fleet.NothingRetained:
		return nil
	}
	env.Journal.Fallback("turn_kv", reason)
	return nil
}

// keepTurn stores the KV that decode retains, according to its whole answer. If no later turn can
// use the KV, keepTurn makes decode free it. given: the client gets the answer.
func (a *attempt) keepTurn(answer []byte, given bool) {
	env := a.env
	keeper, ok := a.conn.(connector.Retainer)
	if !ok || !a.p.Decode.Spec.Bidirectional {
		return
	}
	kept, ok := keeper.Retained(&a.c, answer)
	if !ok {
		return
	}
	k := a.retain(keeper, &kept)
	if k == nil {
		return
	}
	if !given {
		env.Retained.Free(k, 0)
		return
	}
	ids, reason := retained.IDs(&kept)
	if reason == "" && !retained.TextOnly(env.Request) {
		reason = "not_text"
	}
	a.store(retained.Entry{
		Scope: retained.Scope(env.Request),
		Name:  strings.Clone(env.Prompts.ClientID(env.Source())),
		IDs:   ids,
		Turn:  gaps.Turn{Ending: ending(env.Request.API, answer)},
		Value: k,
	}, reason)
}

// retain returns the KV that an answer of decode names; nil if the proxy cannot name it, and so
// cannot free it.
func (a *attempt) retain(keeper connector.Retainer, kept *connector.Retained) *retained.KV {
	if kept.Unfit == "incomplete_kv_params" {
		a.env.Journal.Fallback("turn_kv", kept.Unfit)
		return nil
	}
	return retained.New(keeper, &a.c, a.newJob(), kept.Host, kept.Params)
}

// store stores KV that decode retains, and reports whether the store has it. If no later turn can use
// the KV, store makes decode free it. reason is why none can; "": one can as far as the caller knows.
func (a *attempt) store(e retained.Entry, reason string) bool {
	env := a.env
	if env.WarmUp {
		env.Retained.Free(e.Value, 0)
		return false
	}
	if e.Value.Foreign() {
		reason = connector.ForeignHost
	}
	now := time.Now()
	e.Expires = retained.Expires(a.p.Decode, now)
	if reason == "" && !env.Retained.Put(e, now) {
		reason = coordinator.ReasonCoordinator
	}
	if reason != "" {
		env.Journal.Fallback("turn_kv", reason)
		env.Retained.Free(e.Value, 0)
		return false
	}
	env.Journal.RetainedKV("kept")
	switch d := e.Value.Decision(); {
	case d.Policy == "":
	case d.Keep == 0:
		env.Journal.Note("decode frees the KV of this turn: " + d.Policy + " does not expect a next turn")
	default:
		env.Journal.Note(fmt.Sprintf("decode keeps the KV of this turn for %v: %s expects the next turn with a likelihood of %.2f", d.Keep.Round(time.Millisecond), d.Policy, d.Likelihood))
	}
	return true
}

// giveUpTurn frees the KV of the previous turn after an attempt that failed before prefill
// answered. If prefill may have received the leg, the call waits cleanup.Yield, and then until
// prefill responds: prefill aborts the leg meanwhile and reads no freed blocks.
func (a *attempt) giveUpTurn() {
	yield := time.Duration(0)
	if a.prefill.sent {
		yield = cleanup.Yield
		a.turn.Hold(a.p.Prefill)
	}
	a.env.Retained.Free(a.turn, yield)
}

// passTurn makes the clean-up free the KV of the previous turn when the late prefill leg has ended.
// Prefill may begin to read the KV until then. If prefill has served the leg, it has read the KV,
// and the engine that retained the KV has freed it.
func (a *attempt) passTurn(late *cleanup.Late) {
	if a.turn == nil {
		return
	}
	store, k := a.env.Retained, a.turn
	k.Hold(a.p.Prefill)
	a.turn = nil
	late.Ended = func(served bool) {
		if !served {
			store.Free(k, cleanup.Yield)
		}
	}
}
