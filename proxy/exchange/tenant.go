package exchange

import (
	"fmt"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// account is the request in the books of its tenant. The zero value is a request without a
// tenant.
type account struct {
	tenant   *tenant.Tenant
	open     bool   // Settle must be called
	number   uint64 // for Settle
	reserved int64  // tokens
	prompt   int64  // tokens of the prompt, estimated
	asked    bool   // engines are asked for a stored response, without a leg
}

// assumedOutput is the number of tokens that is reserved for an answer without max_tokens.
const assumedOutput = 512

// permit rejects a request for a model or an adapter that its tenant may not use. The error is that
// for a model that does not exist, so that it tells nothing about other tenants. For every client,
// permit rejects fields that change an engine.
func (x *exchange) permit() error {
	if field := x.req.EngineField; field != "" && !x.env.Config.Server.TrustEngineFields {
		return openai.NewFieldError(openai.CodeFieldNotAllowed, field, "'"+field+"' changes the engine or runs code in it, and the proxy does not allow it (server.trust_engine_fields)")
	}
	t := x.account.tenant
	if t == nil || t.Models == nil {
		return nil
	}
	if x.req.Opaque {
		return openai.NewError(openai.CodeNotFound, "the client may not use every model, so it may not send a request whose model the proxy does not know")
	}
	name := x.req.Model
	if name == "" {
		if name = x.knownModel(); name == "" {
			return openai.NewFieldError(openai.CodeMissingField, "model", "model is needed: the client may not use every model")
		}
	}
	if !t.Allows(name) {
		return UnknownModel(name, x.models())
	}
	return x.permitAdapters(name)
}

// permitAdapters rejects a request for an adapter that its tenant may not use. The list of the
// tenant names an adapter alone, or as SGLang does: MODEL:ADAPTER.
func (x *exchange) permitAdapters(model string) (err error) {
	t := x.account.tenant
	x.req.EachAdapter(func(a openai.Adapter) bool {
		switch {
		case a.Name != "" && !t.Allows(a.Name) && !t.Allows(model+":"+a.Name):
			err = UnknownModel(a.Name, x.models())
		case !a.Exact && !x.env.Config.Server.TrustEngineFields:
			err = openai.NewFieldError(openai.CodeFieldNotAllowed, a.Field, "'"+a.Field+"' selects an adapter by more than its name, and the client may not use every model (server.trust_engine_fields)")
		}
		return err == nil
	})
	return err
}

// models returns the models that the client may request, sorted.
func (x *exchange) models() []string {
	return Permitted(x.account.tenant, x.run.Models().Merge(x.run.Registry.Snapshot().Models()))
}

// Permitted returns those of the models that a tenant may request. It may return names itself.
func Permitted(t *tenant.Tenant, names []string) []string {
	if t == nil || t.Models == nil {
		return names
	}
	var list []string
	for _, name := range names {
		if t.Allows(name) {
			list = append(list, name)
		}
	}
	return list
}

// charge takes the request from the budgets of its tenant, which has one. settle gives back what the request
// does not use.
func (x *exchange) charge() error {
	c := &x.account
	if c.tenant.Limits == (tenant.Limits{}) {
		return nil
	}
	c.prompt = x.promptTokens()
	a := x.run.Budgets.Take(x.env.Context, c.tenant, c.prompt+x.outputTokens())
	a.SetHeader(x.client.AnswerHeader())
	if a.Refused == tenant.Admitted {
		c.open, c.number, c.reserved = true, a.Number, a.Reserved
		x.env.Answering = x.settleTenant
		return nil
	}
	e, reason := x.refusal(&a)
	x.journal.Shed(reason)
	x.run.Metrics.TenantRefused(c.tenant.Name, reason)
	return e
}

// refusal returns the client's error, and the reason for metrics.
func (x *exchange) refusal(a *tenant.Answer) (e *openai.Error, reason string) {
	switch a.Refused {
	case tenant.Exchanges:
		text := fmt.Sprintf("%d requests of this tenant run already, as many as may", x.account.tenant.Limits.Exchanges)
		return openai.NewError(openai.CodeTenantLimit, text), "tenant_limit"
	case tenant.Requests:
		e, reason = openai.NewError(openai.CodeRateLimitExceeded, exceeded("requests", a.Requests.Limit, a)), "tenant_requests"
	default:
		e, reason = openai.NewError(openai.CodeRateLimitExceeded, exceeded("tokens", a.Tokens.Limit, a)), "tenant_tokens"
	}
	if !x.req.API.Anthropic() {
		e.Type = reason[len("tenant_"):] // OpenAI names the budget in the type
	}
	return e, reason
}

func exceeded(what string, limit int64, a *tenant.Answer) string {
	return fmt.Sprintf("Rate limit reached: the limit of this tenant is %d %s per minute. Please try again in %ds.", limit, what, a.RetrySeconds())
}

// promptTokens returns the estimated tokens of the prompt that count against the budget.
func (x *exchange) promptTokens() int64 {
	switch x.req.API {
	case openai.Tokenize, openai.Detokenize, openai.CountTokens: // no model runs
		return 0
	}
	return min(x.req.PromptTokens, tenant.MaxPerMinute)
}

// outputTokens returns the largest number of tokens of the answer, or assumedOutput for each
// sequence.
func (x *exchange) outputTokens() int64 {
	if !x.req.API.Generates() {
		return 0
	}
	n := x.req.MaxTokens
	if n < 0 {
		n = assumedOutput
	}
	for _, factor := range [...]int64{x.req.BestOf, int64(x.req.PromptCount)} {
		n = min(n*min(max(1, factor), 1<<31), tenant.MaxPerMinute)
	}
	return n
}

// settleTenant ends the request in the books of its tenant. A second call does nothing.
func (x *exchange) settleTenant() {
	c := &x.account
	if !c.open {
		return
	}
	c.open = false
	s := tenant.Spent{Number: c.number, Reserved: c.reserved}
	if s.Undone = !x.env.Reached() && !c.asked; !s.Undone {
		s.Used = x.spent()
		x.run.Metrics.TenantTokens(c.tenant.Name, s.Used)
	}
	x.run.Budgets.Settle(c.tenant, s)
}

// spent returns the tokens that the request has cost: those that the engine reported, else
// those that the proxy has counted. A request that an engine rejected costs no tokens.
func (x *exchange) spent() int64 {
	u := x.journal.Usage
	if u == (openai.Usage{}) { // the engine reported none
		switch {
		case x.journal.Outcome == telemetry.OutcomeClientError:
			return 0
		case x.unseen():
			return x.account.reserved
		}
		return bounded(x.account.prompt) + bounded(x.journal.Counted)
	}
	if u.Prompt < 0 {
		u.Prompt = x.account.prompt
	}
	return bounded(u.Prompt) + bounded(u.Completion)
}

// unseen reports whether an engine may have computed an answer of which the proxy has seen nothing:
// the client has left before the end of a whole answer or before the first event of a stream, a
// gateway does not show the answer, or the response continues in the background.
func (x *exchange) unseen() bool {
	switch x.journal.Outcome {
	case telemetry.OutcomeNone, telemetry.OutcomeOK, telemetry.OutcomeCancelled:
		background, _ := x.req.Get("background")
		return x.journal.Counted == 0 || string(background) == "true"
	}
	return false // an engine failed
}
