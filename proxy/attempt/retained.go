package attempt

import (
	"bytes"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/retained"
)

// pullTurn has prefill pull the KV of the turn before, where a bidirectional
// decode engine keeps it and the prompt begins with just the tokens that it is
// of: engines compare no token. The first attempt of an exchange alone does so.
func (a *attempt) pullTurn() {
	env := a.env
	if !a.p.Prefill.Spec.Bidirectional || a.c.Trust || env.WarmUp || env.pulled || env.Retained.Empty() {
		return
	}
	env.pulled = true
	k := env.takeTurn()
	if k == nil {
		return
	}
	switch reason := k.Unusable(a.p.Prefill, a.conn); reason {
	case "":
	case retained.HolderGone:
		env.Journal.Fallback("turn_kv", reason)
		return
	default:
		env.Journal.Fallback("turn_kv", reason)
		env.Retained.Free(k, 0)
		return
	}
	a.turn, a.c.RetainedKV = k, k.Params()
	env.Journal.Note("prefill pulls the KV of the turn before from " + k.Holder().Name())
	env.Journal.RetainedKV("pulled")
}

// takeTurn takes what is kept of the turn before; nil for nothing that the prompt
// is proven to begin with.
func (env *Env) takeTurn() *retained.KV {
	now, scope := time.Now(), retained.Scope(env.Request)
	name := env.Prompts.ClientID(env.Source())
	named := name != "" && env.Retained.Named(env.Context, scope, name)
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
	case found == fleet.TurnTaken:
		return k
	case found == fleet.NothingKept && named:
		reason = "expired"
	case found == fleet.TurnLost:
		reason = "engine_gone"
	case found == fleet.TurnAway:
		reason = coordinator.ReasonCoordinator
	case found == fleet.NothingKept:
		return nil
	}
	env.Journal.Fallback("turn_kv", reason)
	return nil
}

// keepTurn remembers what decode says, in its whole answer, that it keeps; what no
// turn can use, it is told to free.
func (a *attempt) keepTurn(answer []byte) {
	env := a.env
	keeper, ok := a.conn.(connector.Retainer)
	if !ok || !a.p.Decode.Spec.Bidirectional {
		return
	}
	kept, ok := keeper.Retained(&a.c, answer)
	if !ok {
		return
	}
	if kept.Unfit == "incomplete_kv_params" { // there is no telling it apart
		env.Journal.Fallback("turn_kv", kept.Unfit)
		return
	}
	k := retained.New(keeper, &a.c, a.newJob(), kept.Host, kept.Params)
	ids, reason := retained.IDs(&kept)
	switch {
	case env.WarmUp:
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
		Value:   k,
	}, now) {
		env.Journal.Fallback("turn_kv", coordinator.ReasonCoordinator)
		env.Retained.Free(k, 0)
		return
	}
	env.Journal.RetainedKV("kept")
}

// giveUpTurn is for an attempt that failed before prefill had answered. A prefill
// that may have the leg is given the time to abort it: what it still reads then
// goes nowhere. One that has fallen silent may do so when it is back.
func (a *attempt) giveUpTurn(err error) {
	if a.turn == nil || a.orphan.PrefillDone {
		return
	}
	yield := time.Duration(0)
	if a.orphan.PrefillSent {
		yield = cleanup.Yield
	}
	if e := unresponsiveLeg(err); e != nil && e.Unresponsive == a.p.Prefill {
		a.turn.Hold(e.Unresponsive)
	}
	a.env.Retained.Free(a.turn, yield)
}

// cutKept takes out of whole events of decode's stream what they say of the KV
// that it keeps. A stream tells no token ids that would prove what that is of, so
// that decode is told to free it.
func (a *attempt) cutKept(whole []byte) []byte {
	if !a.p.Decode.Spec.Bidirectional || a.p.Prefill.IsZero() || a.c.Trust || !bytes.Contains(whole, []byte(`"kv_transfer_params"`)) {
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
