package exchange

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// maxBooked is how many generated tokens a waiting request is charged with at most when it
// gets its place. Clients often set a limit of tokens that their answers never reach. The real
// number replaces the booked one at the end of the request.
const maxBooked = 1024

// maxSequences is how many sequences a request is charged with at most when it gets its place.
// A client may ask for any number of them; the engine, not the proxy, refuses too many.
const maxSequences = 8

// maxDeadline bounds the values of limits.deadline_header and limits.token_time_header, in milliseconds.
const maxDeadline = 24 * 60 * 60 * 1000

// onlyClass is the class of all requests of a configuration without [[priority_class]].
var onlyClass, _ = new(config.Config).PriorityClass(config.DefaultClass)

// admit waits for the request's turn, and until the engines of the model are not saturated; ""
// is no model. leave ends its place.
func (x *exchange) admit(client, model string) (err error) {
	cfg, o := x.env.Config, admission.Objective{Class: onlyClass}
	classes := len(cfg.PriorityClasses) > 0 || cfg.EPP.Pool != ""
	if classes {
		if o, err = x.objective(); err != nil {
			return err
		}
	}
	class := o.Class
	if class.Deadline > 0 || cfg.Limits.DeadlineHeader != "" {
		if x.placing.ask.Deadline, err = x.deadline(class); err != nil {
			return err
		}
	}
	if class.TokenTime > 0 || cfg.Limits.TokenTimeHeader != "" {
		if x.journal.TokenTime, err = x.limit(cfg.Limits.TokenTimeHeader, class.TokenTime); err != nil {
			return err
		}
	}
	if classes {
		own := class // class itself must not move to the heap
		x.env.Class = &own
		x.journal.Class(class.Name, class.Priority)
	}
	x.journal.Stage(telemetry.StageWaitsPlace)
	claim := admission.Claim{Client: client, Class: class, Model: model, Tokens: x.req.PromptTokens + x.booked(), Sheddable: o.Sheddable}
	if t := x.account.tenant; t != nil {
		claim.Tenant, claim.Weight = t.Name, t.Weight
	} else if header := cfg.Limits.FairnessHeader; header != "" {
		if flow := x.client.Header().Get(header); flow != "" {
			claim.Tenant = "flow " + flow // no tenant and no address has a space
		}
	}
	if classes {
		x.mayEvict(&claim)
	}
	ctx := x.env.Context
	if !x.placing.ask.Deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = x.untilDeadline(ctx)
		defer cancel()
	}
	if model == "" {
		x.admitted, err = x.run.Queue.Enter(ctx, claim, cfg.Limits)
	} else {
		err = x.admitUnsaturated(ctx, claim)
	}
	if err != nil {
		if d := new(admission.DisplacedError); errors.As(err, &d) {
			x.journal.Note("a request of the class " + d.For + " got the place of the request in the full queue")
		}
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

// admitUnsaturated waits for a place while the engines of claim.Model are not saturated. The
// explanation of the request then names the saturation.
func (x *exchange) admitUnsaturated(ctx context.Context, claim admission.Claim) (err error) {
	var since time.Time
	claim.Gated = func() {
		since = time.Now()
		x.journal.Stage(telemetry.StageSaturated)
	}
	x.admitted, err = x.run.Queue.Enter(ctx, claim, x.env.Config.Limits)
	if !since.IsZero() {
		x.journal.Note("the engines of the model were saturated: the request waited for " + time.Since(since).Round(time.Millisecond).String())
	}
	var late *admission.SaturatedError
	if errors.As(err, &late) {
		x.client.AnswerHeader().Set("Retry-After", strconv.FormatInt(late.RetrySeconds(), 10))
		x.journal.Note("the engines of the model were saturated: their work would have delayed the request by " + late.Delay.Round(time.Millisecond).String())
	}
	return err
}

// leave gives the place back, with the tokens that the request has used if they count.
func (x *exchange) leave() {
	used := int64(0)
	if x.admitted.Charged() {
		used = x.used()
	}
	x.admitted.Leave(used)
}

// used returns the tokens that the request has used: those that the engine reported, or those that
// the proxy has seen.
func (x *exchange) used() int64 {
	prompt, completion := x.journal.Usage.Prompt, x.journal.Usage.Completion
	if prompt <= 0 {
		prompt = x.placing.ask.Request.PromptTokens
	}
	if completion <= 0 {
		completion = x.journal.Counted
	}
	return bounded(prompt) + bounded(completion) // an engine may report any number
}

// bounded limits a count of tokens that an engine reports.
func bounded(n int64) int64 { return min(max(0, n), tenant.MaxPerMinute) }

// objective returns the priority class of the request: that of its tenant, or the one that its
// header names, as a class of the configuration or as an InferenceObjective. A name that is neither
// has the priority of the default class, as in llm-d, but never a higher one than the client's own
// class. A class of a tenant that the configuration does not have counts as the default class.
func (x *exchange) objective() (admission.Objective, error) {
	cfg := x.env.Config
	base, _ := cfg.PriorityClass(config.DefaultClass)
	own := admission.Objective{Class: base}
	if t := x.account.tenant; t != nil {
		if class, found := cfg.PriorityClass(t.Class); found {
			own.Class = class
		}
	}
	header, name := x.priorityLine()
	if name == "" {
		return own, nil
	}
	asked := admission.Objective{}
	found := false
	if asked.Class, found = cfg.PriorityClass(name); !found {
		if asked, found = x.run.Objectives()[name]; !found {
			asked.Class = base
		}
	}
	if asked.Class.Priority <= own.Class.Priority || cfg.Limits.TrustPriority {
		return asked, nil
	}
	if !found {
		return own, nil
	}
	return own, openai.NewFieldError(openai.CodeInvalidPriority, header, fmt.Sprintf("the header %s names a class that is more urgent than this client's class %q", header, own.Class.Name))
}

// priorityLine returns the name and the value of the header line with the class of the request.
func (x *exchange) priorityLine() (header, value string) {
	for _, header := range x.env.Config.PriorityHeaders() {
		if header == "" {
			continue
		}
		if value := x.client.Header().Get(header); value != "" {
			return header, value
		}
	}
	return "", ""
}

// deadline returns the time at which the first token is due: that of limits.deadline_header, or
// else that of the request's class. Zero: none.
func (x *exchange) deadline(class config.PriorityClass) (time.Time, error) {
	limit, err := x.limit(x.env.Config.Limits.DeadlineHeader, class.Deadline)
	if limit == 0 {
		return time.Time{}, err
	}
	return x.journal.Start.Add(limit), nil
}

// limit returns the limit in the header line of the request, or else the class's. header "": requests
// have no such line.
func (x *exchange) limit(header string, class config.Duration) (time.Duration, error) {
	if header == "" {
		return time.Duration(class), nil
	}
	text := x.client.Header().Get(header)
	if text == "" {
		return time.Duration(class), nil
	}
	ms, err := strconv.ParseUint(text, 10, 32)
	if err != nil || ms < 1 || ms > maxDeadline {
		return 0, &openai.Error{
			Status: 400, Code: openai.CodeBadHeader, Param: header,
			Message: "the header " + header + " must be a number of milliseconds from 1 to " + strconv.Itoa(maxDeadline),
		}
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// untilDeadline returns a context that ends with ctx, and with admission.ErrDeadline at the
// deadline of the request. The caller calls cancel.
func (x *exchange) untilDeadline(ctx context.Context) (_ context.Context, cancel context.CancelFunc) {
	if x.placing.ask.Deadline.IsZero() {
		return ctx, func() {}
	}
	return context.WithDeadlineCause(ctx, x.placing.ask.Deadline, admission.ErrDeadline)
}

// withoutQueueLines removes the header lines that name the class, the limits, the flow and the
// model from the fields of the legs.
func (x *exchange) withoutQueueLines() {
	l := &x.env.Config.Limits
	priority := x.env.Config.PriorityHeaders()
	for _, header := range [...]string{priority[0], priority[1], l.DeadlineHeader, l.TokenTimeHeader, l.FairnessHeader, x.env.Config.EPP.ModelHeader} {
		if header != "" {
			x.env.Fields = downstream.Without(x.env.Fields, header)
		}
	}
}
