package proxy

import (
	"bytes"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// turnMargin is how long before decode's time-out its KV is not asked for any
// more: the request may wait at prefill, which itself gives up 5 s before.
const turnMargin = 30 * time.Second

// keptTurn is KV that a decode engine keeps of a turn, for prefill to pull at the
// next one. It is used once: what is pulled, decode frees.
type keptTurn struct {
	params []byte
	host   string // where prefill would look for it
	holder engine.Target
	since  time.Time   // of the holder's state: it has not restarted as long as that stands
	forget *cleanupJob // has the holder free it
}

// pullTurn has prefill pull the KV of the turn before, where a bidirectional
// decode engine keeps it and the prompt begins with just the tokens that it is
// of: engines compare no token. The first attempt of an exchange alone does so.
func (a *attempt) pullTurn() {
	x := a.x
	if !a.p.Prefill.Spec.Bidirectional || a.c.Trust || x.warm || x.turned || x.s.turns.empty() {
		return
	}
	x.turned = true
	k := x.takeTurn()
	if k == nil {
		return
	}
	switch reason := a.unfit(k); reason {
	case "":
	case "engine_gone":
		x.fallback("turn_kv", reason)
		return
	default:
		x.fallback("turn_kv", reason)
		x.s.forgetTurn(k, 0)
		return
	}
	a.turn, a.c.RetainedKV = k, k.params
	x.rec.notes = append(x.rec.notes, "prefill pulls the KV of the turn before from "+k.holder.Name())
	x.s.deps.Metrics.Turn("pulled")
}

// unfit says why a's prefill cannot pull k, "" if it can.
func (a *attempt) unfit(k *keptTurn) string {
	p, d := a.p.Prefill, k.holder
	state := d.State()
	switch {
	case d.Gone() || state != engine.Ready && state != engine.Draining || !d.Since().Equal(k.since):
		return "engine_gone"
	case p.BlockTokens() != d.BlockTokens() || a.conn.Compatible(p.Facts(), d.Facts()) != nil:
		return "incompatible"
	case !connector.Sound(d.Instance, p.Instance, k.params):
		return connector.ForeignHost
	}
	return ""
}

// takeTurn takes what is kept of the turn before; nil for nothing that the prompt
// is proven to begin with.
func (x *exchange) takeTurn() *keptTurn {
	s, now, scope := x.s, time.Now(), turnScope(&x.req)
	name := s.prompts.ClientID(x.source())
	named := name != "" && s.turns.named(x.ctx, scope, name)
	reason := "not_text"
	var ids []uint32
	if textOnly(&x.req) {
		ids = s.prompts.ExactIDs(x.ctx, &x.prompt, x.source(), named)
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
	k, found := s.turns.take(x.ctx, scope, name, ids, now)
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
	x.fallback("turn_kv", reason)
	return nil
}

// keepTurn remembers what decode says, in its whole answer, that it keeps; what no
// turn can use, it is told to free.
func (a *attempt) keepTurn(answer []byte) {
	x := a.x
	keeper, ok := a.conn.(connector.Retainer)
	if !ok || !a.p.Decode.Spec.Bidirectional {
		return
	}
	kept, ok := keeper.Retained(&a.c, answer)
	if !ok {
		return
	}
	if kept.Unfit == "incomplete_kv_params" { // there is no telling it apart
		x.fallback("turn_kv", kept.Unfit)
		return
	}
	k := a.holdTurn(keeper, kept.Host, kept.Params)
	ids, reason := turnIDs(&kept)
	switch {
	case x.warm:
		x.s.forgetTurn(k, 0)
		return
	case k.host == "":
		reason = connector.ForeignHost
	case reason == "" && !textOnly(&x.req):
		reason = "not_text"
	}
	if reason != "" {
		x.fallback("turn_kv", reason)
		x.s.forgetTurn(k, 0)
		return
	}
	now := time.Now()
	if !x.s.turns.put(conversation.OnShelf[*keptTurn]{
		Scope:   turnScope(&x.req),
		Name:    strings.Clone(x.s.prompts.ClientID(x.source())),
		IDs:     ids,
		Expires: now.Add(a.p.Decode.Spec.KeepsFor() - turnMargin),
		Value:   k,
	}, now) {
		x.fallback("turn_kv", coordinator.ReasonCoordinator)
		x.s.forgetTurn(k, 0)
		return
	}
	x.s.deps.Metrics.Turn("kept")
}

// turnIDs are the ids of the tokens whose KV is kept, or why they are not known.
func turnIDs(k *connector.Retained) (ids []uint32, unfit string) {
	if k.Unfit != "" {
		return nil, k.Unfit
	}
	ids, err := tokens.AppendIDs(make([]uint32, 0, k.Tokens+1), k.Prompt)
	if err == nil {
		ids, err = tokens.AppendIDs(ids, k.Answer)
	}
	switch {
	case err != nil:
		return nil, "no_token_ids"
	case k.Tokens > len(ids): // it had begun with more
		return nil, "kv_ahead"
	}
	return ids[:k.Tokens], ""
}

// holdTurn is the KV that a's decode says it keeps. Its host is empty, and nobody
// is sent there, if that is one at which decode is not known to be.
func (a *attempt) holdTurn(keeper connector.Retainer, host string, params []byte) *keptTurn {
	p, d := a.p.Prefill, a.p.Decode
	k := &keptTurn{params: bytes.Clone(params), host: host, holder: d, since: d.Since()}
	call := connector.Cleanup{Phase: abi.Decode, How: "engine_timeout"}
	switch {
	case !d.Owns(host, p.Instance) || !connector.Sound(d.Instance, p.Instance, params):
		k.host = ""
	case p.Spec.Bidirectional:
		call = keeper.FreeRetained(&a.c, params)
	}
	k.forget = a.cleanupJob([]connector.Cleanup{call})
	k.forget.calls[0].holder, k.forget.slow = d, true
	return k
}

// forgetTurn has the holder of k free it, after yield: by the prefill of that turn,
// or by another where that one is not well.
func (s *Server) forgetTurn(k *keptTurn, yield time.Duration) {
	k.forget.since, k.forget.yield = time.Now(), yield
	k.forget.calls[0].relay = func() *engine.Instance { return s.messenger(k) }
	s.janitor.start(k.forget)
}

// messenger is a prefill engine that can tell the holder of k to free it; nil for
// none.
func (s *Server) messenger(k *keptTurn) *engine.Instance {
	d := k.holder
	conn := s.connector(d.Spec.Connector)
	for _, p := range s.deps.Registry.Snapshot().Instances {
		if p.Spec.Bidirectional && p.Role == abi.RolePrefill && p.State() == engine.Ready &&
			p.BlockTokens() == d.BlockTokens() && conn.Compatible(p.Facts(), d.Facts()) == nil && d.Owns(k.host, p) && connector.Sound(d.Instance, p, k.params) {
			return p
		}
	}
	return nil
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
		yield = cleanupYield
	}
	if le := silentLeg(err); le != nil && le.silent == a.p.Prefill {
		a.turn.forget.calls[0].after = le.silent
	}
	a.x.s.forgetTurn(a.turn, yield)
}

// spare keeps prefill from being blamed where it may be that decode did not hand
// out the KV of the turn before.
func (a *attempt) spare(e *legError) *legError {
	if a.turn != nil && e.status/100 == 5 {
		e.spared = true
		a.x.fallback("turn_kv", "pull_failed")
	}
	return e
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
		a.x.fallback("turn_kv", "stream")
		a.x.s.forgetTurn(a.holdTurn(keeper, name, params), 0)
	}
	return rest
}

// turnScope is what, besides the token ids, KV depends on, and what sets clients'
// caches apart.
func turnScope(r *openai.Request) string {
	return r.Model + "\x00" + r.LoRA() + "\x00" + r.CacheSalt()
}

// textOnly reports whether the prompt's token ids are all that its KV depends on:
// an image's stand for any other as well.
func textOnly(r *openai.Request) bool {
	for _, key := range [...]string{"prompt_embeds", "features", "content_parts"} {
		if v, _ := r.Get(key); !openai.IsNull(v) {
			return false
		}
	}
	switch r.API {
	case openai.Completions, openai.VLLMGenerate:
		return true
	case openai.Chat:
	default:
		return false
	}
	messages, err := openai.Elements(r.PromptRaw())
	if err != nil {
		return false
	}
	for message := range messages {
		content, _ := openai.Find(message, "content")
		if len(content) == 0 || content[0] != '[' {
			continue
		}
		parts, err := openai.Elements(content)
		if err != nil {
			return false
		}
		for part := range parts {
			if kind, _ := openai.Find(part, "type"); string(kind) != `"text"` {
				return false
			}
		}
	}
	return true
}
