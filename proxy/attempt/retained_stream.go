package attempt

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/retained"
	"github.com/pdproxy/pdproxy/proxy/state/gaps"
)

// streamedTurn is the KV that decode retains of a stream, from the event on that names it.
type streamedTurn struct {
	kv     *retained.KV // nil: the store has it, or decode frees it
	tokens int
	unfit  string         // as connector.Retained.Unfit
	entry  retained.Entry // that the store has; without a value: none
}

// NamesTurn reports whether the stream of decode at p names the KV that decode retains for the proxy.
// Then the leg asks for token ids, which prove to which text the KV belongs.
func (env *Env) NamesTurn(p *coordinator.Placement) bool {
	if !p.Decode.Spec.Bidirectional || p.Prefill.IsZero() || env.WarmUp || env.trusts() {
		return false
	}
	keeper, ok := env.Connector(p.Decode.Spec.Connector).(connector.Retainer)
	return ok && keeper.NamesInStreams(env.Request.API, p.Decode.Facts())
}

// beginTurn keeps what the store needs of the client's request, before its body is released.
func (k *Kept) beginTurn(env *Env) {
	switch {
	case !k.Turn || k.unproven != "":
	case !retained.TextOnly(env.Request):
		if k.unproven = "not_text"; !k.holds() {
			k.free()
		}
	default:
		k.scope, k.name = retained.Scope(env.Request), strings.Clone(env.Prompts.ClientID(env.Source()))
	}
}

// proof returns the ids of the first n tokens of prompt and answer, or why they are not known, as a
// reason of a fallback. The caller owns the ids. k may be nil.
func (k *Kept) proof(n int) (ids []uint32, reason string) {
	switch {
	case k == nil || !k.Turn:
		return nil, "no_token_ids"
	case k.unproven == "" && n > k.Prompt+k.Output():
		return nil, "kv_ahead" // decode retains the KV of more tokens than ids are known
	case k.unproven == "":
		k.Load()
	}
	if k.unproven != "" {
		return nil, k.unproven
	}
	return slices.Clone(k.IDs[:n]), ""
}

// cutKept removes the parameters of retained KV from whole events of decode's stream. The first KV
// that they name is streamed then. cutKept also notes the tools that the answer calls.
func (a *attempt) cutKept(whole []byte) []byte {
	keeper, ok := a.conn.(connector.Retainer)
	if !ok {
		return whole
	}
	openai.StreamedToolCalls(a.env.Request.API, whole, a.ending.Call)
	rest, kept, ok := keeper.CutRetained(&a.c, whole)
	if ok && a.streamed == nil {
		a.streamed = &streamedTurn{kv: a.retain(keeper, &kept), tokens: kept.Tokens, unfit: kept.Unfit}
	}
	return rest
}

// storeStreamed stores the KV of a stream. It is called before the client gets the event that names the
// KV, because the client may send its next turn at once.
func (a *attempt) storeStreamed() {
	t := a.streamed
	if t.kv == nil {
		return
	}
	e := retained.Entry{Turn: gaps.Turn{Ending: a.ending}, Value: t.kv}
	reason := t.unfit
	if reason == "" {
		e.IDs, reason = a.env.Kept.proof(t.tokens)
	}
	if reason == "" {
		e.Scope, e.Name = a.env.Kept.scope, a.env.Kept.name
	}
	t.kv = nil
	if a.store(e, reason) {
		t.entry = e
	}
}

// recallTurn makes decode free the KV of a stream whose end could not be written to the client.
func (a *attempt) recallTurn() {
	if e := &a.streamed.entry; e.Value != nil {
		a.env.Retained.Recall(context.WithoutCancel(a.env.Context), e.Scope, e.IDs, time.Now())
	}
}

// notNamed counts a stream that has ended without naming the KV that decode may retain. Then decode frees
// the KV after its own time. A stream that could have named KV has left none. The streams of responses
// name it in every release.
func (a *attempt) notNamed() {
	if a.streamed == nil && a.env.Request.API != openai.Responses && !a.env.NamesTurn(a.p) {
		a.env.Journal.Fallback("turn_kv", "stream")
	}
}
