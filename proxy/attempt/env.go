package attempt

import (
	"context"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Env is the request that attempts are made for, and what they need. It stays the same for
// all attempts of a request. The goroutine of the request uses it; a concurrent prefill leg
// only reads it. The zero value is ready to be filled in; Reset keeps its memory for another
// request.
type Env struct {
	*Services
	Context  context.Context
	Config   *config.Config // as it stood when the request came
	Client   *downstream.Client
	Request  *openai.Request
	Fields   []upstream.Field // header lines of the client that every leg has
	Ask      *coordinator.Ask
	Prompt   *prompt.Prompt
	Route    *sidecar.Route
	Journal  *journal.Journal
	Hooks    Hooks    // nil: no leg or finish hook
	Key      string   // name of the client's API key; "" without keys
	WarmUp   bool     // no client sent the request
	Replacer Replacer // the way to another decode engine

	tries   [abi.Encode + 1]int // legs sent, by phase
	encoded bool                // the encoders have done their part
	pulled  bool                // the KV of the turn before has been looked for
	legs    legs
}

// Replacer places the decode leg of an attempt again, with the prefill target and the disagg
// id as they are.
type Replacer interface {
	// Replace places the decode leg of p, which failed with err, on another engine. answer is
	// what the leg hook wants. False: the leg stays failed.
	Replace(p *coordinator.Placement, err error, answer HookAnswer) (*coordinator.Placement, bool)
	// Pick lets the picker of a sidecar choose the decode engine after prefill has answered.
	// False: decode stays as it is in p.
	Pick(p *coordinator.Placement) (*coordinator.Placement, bool)
}

// Tries returns how many legs of a phase have been sent for the request.
func (env *Env) Tries(phase abi.Phase) int { return env.tries[phase] }

// SkipEncode says that the request needs no encoders any more.
func (env *Env) SkipEncode() { env.encoded = true }

// Source returns where the prompt of the request comes from.
func (env *Env) Source() prompt.Source {
	return prompt.Source{Request: env.Request, Header: env.Client.Header(), RequestID: env.Journal.ID(), Memory: env.Client}
}

// ReleaseBody gives the bytes of the request back, and what was made of them. Nothing may be
// retried afterwards.
func (env *Env) ReleaseBody() {
	env.Request.Object.Reset() // it refers to the bytes
	env.Prompt.DropTokenIDs()
	env.Client.ReleaseBody()
}

// begin sends the head of the answer. Nothing is retried afterwards.
func (env *Env) begin(status int) {
	env.note(status)
	env.Client.Begin(status)
}

func (env *Env) note(status int) {
	env.Journal.Answered(status)
	if env.Config.Server.ExposePlacement {
		env.Journal.Expose(env.Client.AnswerHeader())
	}
}

// Answer answers with a whole body. The error is downstream.ErrWrite.
func (env *Env) Answer(status int, body []byte) error {
	env.note(status)
	return env.Client.Whole(status, body)
}

// AnswerReply answers with the engine's own answer of a failed leg: e.Reply is not nil.
func (env *Env) AnswerReply(e *Error) {
	h := env.Client.AnswerHeader()
	if e.Reply.contentType != "" {
		h.Set("Content-Type", e.Reply.contentType)
	}
	if e.Reply.retryAfter != "" {
		h.Set("Retry-After", e.Reply.retryAfter)
	}
	_ = env.Answer(e.Status, e.Reply.body) // the client may be gone
}

// Reset forgets the request and keeps the memory.
func (env *Env) Reset() {
	clear(env.Fields)
	env.legs.reset()
	*env = Env{Fields: env.Fields[:0], legs: legs{list: env.legs.list}}
}

// Hooks is the seam of the leg and finish hooks. Implementations must not
// block longer than their own budget, must not keep the facts, and are called by
// many goroutines.
type Hooks interface {
	// Leg is asked before a leg is sent and after one has failed before the
	// client's first byte. The edits of abi.LegEdited are appended to edits, in
	// the encoding that abi.NextEdit reads. A reason that is not empty says that
	// there is no usable answer, as one of coordinator's Reason constants; all
	// but ReasonAbsent are counted.
	Leg(ctx context.Context, f *abi.LegFacts, edits []byte) (d abi.LegDecision, list []byte, reason string)
	// Finish is told of every exchange that has ended. The client's answer ends
	// after it has returned.
	Finish(f *abi.FinishFacts)
}

// HookAnswer is what the leg hook wants to follow a failed leg. The zero value is the built-in
// rule.
type HookAnswer struct {
	failed   *Error // about which the hook was asked; nil: about none
	Decision abi.LegDecision
	Same     coordinator.Pair // of a retry on the same targets
}

// beginLeg begins a leg on t, the given try of its phase.
func (env *Env) beginLeg(phase abi.Phase, t engine.Target, try int, id string) *leg {
	l := env.legs.take()
	l.target, l.try = t, try
	l.Leg = env.Journal.BeginLeg(phase, t, try, id)
	return l
}
