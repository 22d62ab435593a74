package exchange

import (
	"fmt"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// maxBooked is how many generated tokens a waiting request is charged with at most when it
// gets its place. Clients often set a limit of tokens that their answers never reach. The real
// number replaces the booked one at the end of the request.
const maxBooked = 1024

// maxSequences is how many sequences a request is charged with at most when it gets its place.
// A client may ask for any number of them; the engine, not the proxy, refuses too many.
const maxSequences = 8

// admit waits for the request's turn, and until the engines of the model are not saturated; ""
// is no model. leave ends its place.
func (x *exchange) admit(client, model string) error {
	class, err := x.class()
	if err != nil {
		return err
	}
	if x.placing.ask.Deadline, err = x.deadline(class); err != nil {
		return err
	}
	if len(x.env.Config.PriorityClasses) > 0 {
		own := class // class itself must not move to the heap
		x.env.Class = &own
		x.journal.Class(class.Name)
	}
	x.journal.Stage(telemetry.StageWaitsPlace)
	claim := admission.Claim{Client: client, Class: class, Model: model, Tokens: x.req.PromptTokens + x.booked()}
	if t := x.account.tenant; t != nil {
		claim.Tenant, claim.Weight = t.Name, t.Weight
	} else if name := x.flow(); name != "" {
		claim.Tenant = "flow " + name // no tenant and no address has a space
	}
	ctx, cancel := x.untilDeadline(x.env.Context)
	defer cancel()
	if err = x.enter(ctx, claim); err != nil {
		x.journal.Shed(admission.Reason(err))
		return err
	}
	x.journal.Stage(telemetry.StageRuns)
	return nil
}

// booked returns how many generated tokens the request is charged with at its begin.
func (x *exchange) booked() int64 {
	if !x.req.API.Generates() {
		return 0
	}
	limit := x.req.MaxTokens
	if limit < 0 || limit > maxBooked {
		limit = maxBooked
	}
	return limit * min(max(1, x.req.N), maxSequences)
}

// leave gives the place back, with the tokens that the request has used: those that the engine
// reported, or those that the proxy has seen.
func (x *exchange) leave() {
	used := x.journal.Usage
	prompt, completion := used.Prompt, used.Completion
	if prompt <= 0 {
		prompt = x.placing.ask.Request.PromptTokens
	}
	if completion <= 0 {
		completion = x.journal.Counted
	}
	x.admitted.Leave(bounded(prompt) + bounded(completion)) // an engine may report any number
}

// class returns the priority class of the request: that of its tenant, or the one that its
// header names. A class that the configuration does not have counts as the default class.
func (x *exchange) class() (config.PriorityClass, error) {
	cfg := x.env.Config
	own, _ := cfg.PriorityClass(config.DefaultClass)
	if t := x.account.tenant; t != nil {
		if class, found := cfg.PriorityClass(t.Class); found {
			own = class
		}
	}
	header := cfg.Limits.PriorityHeader
	if header == "" {
		return own, nil
	}
	name := x.client.Header().Get(header)
	if name == "" {
		return own, nil
	}
	asked, found := cfg.PriorityClass(name)
	switch {
	case !found:
		return own, openai.NewFieldError(openai.CodeInvalidPriority, header, fmt.Sprintf("the header %s does not name a priority class", header))
	case asked.Priority > own.Priority && !cfg.Limits.TrustPriority:
		return own, openai.NewFieldError(openai.CodeInvalidPriority, header, fmt.Sprintf("the header %s names a class that is more urgent than this client's class %q", header, own.Name))
	}
	return asked, nil
}

// flow returns the flow that the request names; "" for none.
func (x *exchange) flow() string {
	header := x.env.Config.Limits.FairnessHeader
	if header == "" {
		return ""
	}
	return x.client.Header().Get(header)
}

// withoutQueueLines removes the header lines that name the class, the deadline and the flow from
// the fields of the legs.
func (x *exchange) withoutQueueLines() {
	l := &x.env.Config.Limits
	for _, header := range [...]string{l.PriorityHeader, l.DeadlineHeader, l.FairnessHeader} {
		if header != "" {
			x.env.Fields = downstream.Without(x.env.Fields, header)
		}
	}
}
