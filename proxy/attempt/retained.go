package attempt

import (
	"bytes"
	"fmt"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/openai"
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

// keepTurn stores the KV that decode retains, according to its answer. If no later turn can
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
	if kept.Unfit == "incomplete_kv_params" { // the proxy cannot name this KV, so it cannot free it
		env.Journal.Fallback("turn_kv", kept.Unfit)
		return
	}
	k := retained.New(keeper, &a.c, a.newJob(), kept.Host, kept.Params)
	ids, reason := retained.IDs(&kept)
	switch {
	case env.WarmUp || !given:
		env.Retained.Free(k, 0)
		return
	case k.Foreign():
		reason = connector.ForeignHost
	case reason == "" && !retained.TextOnly(env.Request):
		reason = "not_text"
	}
	if reason != "" {
		env.Journal.Fallback("turn_kv", reason)
		env.Retained.Free(k, 0)
		return
	}
	now := time.Now()
	if !env.Retained.Put(retained.Entry{
		Scope:   retained.Scope(env.Request),
		Name:    strings.Clone(env.Prompts.ClientID(env.Source())),
		IDs:     ids,
		Expires: retained.Expires(a.p.Decode, now),
		Turn:    gaps.Turn{Ending: ending(env.Request.API, answer)},
		Value:   k,
	}, now) {
		env.Journal.Fallback("turn_kv", coordinator.ReasonCoordinator)
		env.Retained.Free(k, 0)
		return
	}
	env.Journal.RetainedKV("kept")
	if d := k.Decision(); d.Policy != "" {
		env.Journal.Note(fmt.Sprintf("decode keeps the KV of this turn for %v: %s expects the next turn with a likelihood of %.2f", d.Keep.Round(time.Millisecond), d.Policy, d.Likelihood))
	}
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

// cutKept removes the parameters of retained KV from whole events of decode's stream, and makes
// decode free that KV. No later turn can use it, because a stream does not contain the token
// ids of the KV.
func (a *attempt) cutKept(whole []byte) []byte {
	if !bytes.Contains(whole, []byte(`"kv_transfer_params"`)) {
		return whole
	}
	keeper, ok := a.conn.(connector.Retainer)
	if !ok {
		return whole
	}
	rest, params := keeper.CutRetained(make([]byte, 0, len(whole)), whole)
	if host, _ := openai.Find(params, "remote_host"); len(params) > 0 {
		name, _ := openai.String(host)
		a.env.Journal.Fallback("turn_kv", "stream")
		a.env.Retained.Free(retained.New(keeper, &a.c, a.newJob(), name, params), 0)
	}
	return rest
}
