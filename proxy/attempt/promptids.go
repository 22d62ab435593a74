package attempt

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/continuation"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// minShared is the length of a request's body, in bytes, from which its prompt is tokenized once
// for both legs. docs/performance.md has the gain by length.
const minShared = 4 << 10

// sharePrompt makes the legs share one tokenization of the prompt if the engines take token ids.
// Ids that are known already go into each leg. Otherwise the prefill leg asks for the ids, and
// takeIDs puts them into the decode leg.
func (a *attempt) sharePrompt() {
	env := a.env
	if env.PromptIDs != nil || len(env.Request.Raw()) < minShared || a.c.Trust || !a.takesIDs(a.p.Decode) || !a.takesIDs(a.p.Prefill) {
		return
	}
	var ids []uint32
	if env.Hooks == nil { // a leg hook may change the text
		ids = env.Prompts.ExactIDs(env.Context, env.Prompt, env.Source(), false)
	}
	if len(ids) > 0 {
		a.writeIDs(ids)
	} else if a.p.Flow == abi.FlowPrefillFirst {
		a.asksIDs = a.conn.(connector.Tokened).AnswersIDs(env.Request)
	}
}

// takesIDs reports whether the engine of a leg, if there is one, takes token ids as the prompt.
func (a *attempt) takesIDs(t engine.Target) bool {
	tokened, ok := a.conn.(connector.Tokened)
	return ok && (t.IsZero() || tokened.TakesIDs(a.env.Request, t))
}

// writeIDs writes ids, which the engines would compute, for the legs of this attempt.
func (a *attempt) writeIDs(ids []uint32) {
	room := continuation.TextOf(ids)
	if a.env.Client.Derive(3*room) != nil { // each leg has a copy
		a.notShared("memory")
		return
	}
	list := continuation.AppendIDs(make([]byte, 0, room), ids)
	if a.env.Request.API == openai.Responses && continuation.Harmony(list) {
		return // vLLM renders a response of gpt-oss without a look at the ids
	}
	a.shared, a.c.PromptIDs = true, list
	a.env.Journal.Note("the legs have the prompt as token ids")
}

// takeIDs takes the token ids of the prompt from prefill's answer for the decode leg, if the prefill
// leg asked for them. Without usable ids decode tokenizes the prompt itself.
func (a *attempt) takeIDs() {
	if !a.asksIDs || a.prefill.handoff.Done {
		return
	}
	answer := a.prefill.answer.B
	list := continuation.FindPrompt(answer)
	switch u, _ := openai.ParseUsage(answer); {
	case list == nil:
		a.notShared("no_token_ids")
	case int64(continuation.CountIDs(list)) != u.Prompt:
		a.notShared("bad_token_ids")
	case a.env.Client.Derive(len(list)) != nil: // the leg has a copy
		a.notShared("memory")
	default:
		a.shared, a.c.PromptIDs = true, list
		a.env.Journal.Note("decode has the prompt as token ids of prefill")
	}
}

// notShared counts a prompt that decode tokenizes itself.
func (a *attempt) notShared(reason string) { a.env.Journal.Fallback("prompt_ids", reason) }
