package exchange

import (
	"context"
	"errors"
	"net/http"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/recording"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// exchange is one client request with all its attempts. The goroutine of the handler owns it,
// from open to close. close is its only exit and runs once in any case. Every goroutine that
// an attempt starts has ended before close, or belongs to the runner of clean-ups.
type exchange struct {
	run     *Runner
	client  downstream.Client
	req     openai.Request
	prompt  prompt.Prompt
	ask     coordinator.Ask
	route   sidecar.Route
	journal journal.Journal
	env     attempt.Env
	held    *coordinator.Lease // of the last placement; released in close too, in case a panic kept the attempt from it
	line    recording.Line     // of the recording
	denied  *attempt.Error     // the failure for which the retry budget had no retry
}

// Serve runs one generating request. Everything that happens to the request is called from
// here.
func (run *Runner) Serve(w http.ResponseWriter, r *http.Request, api openai.API) {
	x := run.open(w, r)
	defer x.close()
	defer x.recovered()
	x.answer(x.serve(r, api))
	if x.client.MustCut() {
		panic(http.ErrAbortHandler) // net/http's way to end a connection in the middle of an answer
	}
}

// serve admits, reads and describes the request, then places and attempts it until one attempt
// ends it. An error means that nothing has been answered, unless the client's answer has begun.
func (x *exchange) serve(r *http.Request, api openai.API) error {
	client, err := x.authenticate(r, api)
	if err != nil {
		return err
	}
	if err := x.read(client); err != nil {
		return err
	}
	leave, err := x.admit(client)
	if err != nil {
		return err
	}
	defer leave()
	if err := x.describe(); err != nil {
		return err
	}
	var last error
	for {
		p, err := x.place()
		if err != nil {
			return firstError(x.env.Context, last, err)
		}
		hook, err := attempt.Run(&x.env, p)
		if err == nil {
			return nil
		}
		if errors.Is(err, coordinator.ErrNoTarget) && x.env.Tries(abi.Prefill) < x.env.Config.Retry.Attempts {
			continue // nothing was sent: the last decode engine of the group went away before
		}
		if !x.mayRetry(err, hook) {
			return err
		}
		x.exclude(err, hook)
		last = err
	}
}

// open begins the exchange.
func (run *Runner) open(w http.ResponseWriter, r *http.Request) *exchange {
	x := run.exchanges.Get().(*exchange)
	cfg := run.Config()
	x.run = run
	x.client.Open(run.Bodies, cfg, w, r)
	x.journal.Open(run.Books, r.Context(), r.Header, downstream.RequestID(r))
	w.Header().Set("X-Request-Id", x.journal.ID())
	run.services.Budget.Request(x.journal.Began())
	e := &x.env
	e.Services, e.Context, e.Config, e.Hooks = run.services, r.Context(), cfg, run.hooksNow()
	e.Client, e.Request, e.Ask, e.Prompt, e.Route, e.Journal, e.Replacer = &x.client, &x.req, &x.ask, &x.prompt, &x.route, &x.journal, x
	return x
}

// authenticate checks the API key, and returns the name under which the client is counted.
func (x *exchange) authenticate(r *http.Request, api openai.API) (client string, err error) {
	x.req.API = api // errors have its form from here on
	if r, err = x.run.Keys().Authenticate(r); err != nil {
		return "", err
	}
	x.env.Key = admission.KeyName(r)
	x.journal.Client(x.env.Key)
	return x.run.ClientOf(r), nil
}

// read reads the headers for a sidecar and the body, and scans the body. A request that is
// rejected here takes no place of those that run.
func (x *exchange) read(client string) error {
	err := x.route.Read(x.run.Sidecar(), sidecar.Request{
		Context: x.env.Context, ID: x.journal.ID(), Body: &x.req, Ask: &x.ask, Exchange: x, ScheduleStyle: x.env.Config.Retry.ScheduleStyle,
	}, x.client.Header(), x.client.RemoteAddr())
	if err != nil {
		return err
	}
	x.client.CountFor(client)
	if err := x.client.ReadBody(client); err != nil {
		return err
	}
	if err := openai.ParseRequest(x.req.API, x.client.Body(), &x.req); err != nil {
		return err
	}
	if n := x.req.Size(); n > downstream.MinDerived {
		if err := x.client.Derive(n); err != nil {
			return err
		}
	}
	return x.route.Check()
}

// admit waits for the request's turn. The caller calls leave when the request has ended.
func (x *exchange) admit(client string) (leave func(), err error) {
	leave, err = x.run.Queue.Enter(x.env.Context, client, x.env.Config.Limits)
	if err != nil {
		x.journal.Shed(admission.Reason(err))
	}
	return leave, err
}

// describe makes of the request what is asked of the coordinator.
func (x *exchange) describe() error {
	e := &x.env
	e.Fields = x.client.AppendFields(e.Fields[:0], e.Key == "", e.Config.Server.TrustPDFields)
	if sc := x.route.Sidecar(); sc != nil {
		e.Fields = sc.Strip(e.Fields)
	}
	x.journal.Inject(func(name, value string) {
		e.Fields = append(downstream.Without(e.Fields, name), upstream.Field{Name: name, Value: value})
	})
	x.ask.Model = x.req.Model
	x.ask.Request = abi.RequestFacts{
		PromptTokens: x.req.PromptTokens,
		MaxTokens:    x.req.MaxTokens,
		N:            x.req.N,
		Stream:       x.req.Stream,
	}
	if x.run.Coordinator.Needs()&abi.NeedPrompt != 0 {
		if err := x.client.Reserve(len(x.req.PromptRaw())); err != nil {
			return err
		}
		x.ask.Request.Prompt = string(x.req.PromptRaw())
	}
	source := e.Source()
	if err := x.run.Prompts.Match(e.Context, &x.prompt, source, &x.ask); err != nil {
		return err
	}
	if r := x.run.Recorder; r != nil && x.req.API.Generates() {
		x.line = r.Note(x.journal.Began(), &x.req, x.prompt.TokenIDs(), x.run.Prompts.ClientID(source))
	}
	if !x.req.API.Generates() {
		x.ask.Aggregate = abi.RoleDecode // any engine answers it; prefill engines are left to prompts
	}
	x.journal.Described(&x.req)
	return nil
}

// answer answers the client with err, if the answer has not begun yet, and notes the outcome. A
// nil err is success.
func (x *exchange) answer(err error) {
	if err == nil {
		if x.journal.Ending() == telemetry.OutcomeNone {
			x.journal.Ends(telemetry.OutcomeOK)
		}
		return
	}
	if x.client.Gone() && !downstream.BodyStopped(err) || errors.Is(err, downstream.ErrWrite) {
		x.journal.Ends(telemetry.OutcomeCancelled)
		x.journal.Answered(499)
		x.client.Cut() // a plain return would make it an empty 200, or a stream that looks complete
		return
	}
	if x.client.Begun() { // a stream that broke off has told the client
		return
	}
	outcome := outcomeOf(err)
	x.journal.Ends(outcome)
	if downstream.OwnFault(err) || errors.Is(err, downstream.ErrReading) {
		x.journal.Shed(PublicError(err).Code)
	}
	if outcome == telemetry.OutcomeEngineError || outcome == telemetry.OutcomeTimeout {
		x.journal.Warn("request failed", "error", err) // names phase and engine, holds nothing of bodies
	}
	x.reply(err)
}

// recovered logs a fault of the proxy's own and ends the client's connection. The exchange is
// closed like any other.
func (x *exchange) recovered() {
	v := recover()
	if v == nil {
		return
	}
	if v != http.ErrAbortHandler {
		x.journal.Ends(telemetry.OutcomeInternal)
		x.journal.Panic(v)
	}
	panic(http.ErrAbortHandler)
}

// close is the one exit of an exchange. Every attempt has ended its legs and released its lease
// before; what is left is to settle the account.
func (x *exchange) close() {
	if x.held != nil {
		x.held.Release()
	}
	x.journal.End()
	if !x.env.WarmUp {
		x.settle()
	}
	x.journal.Close()
	x.env.ReleaseBody()
	x.client.Close()
	run := x.run
	x.reset()
	run.exchanges.Put(x)
}

// settle tells the recorder and the finish hook how the exchange ended.
func (x *exchange) settle() {
	if r := x.run.Recorder; r != nil && x.journal.Ending() == telemetry.OutcomeOK {
		r.Write(&x.line, x.journal.Reported(), x.ask.Request.PromptTokens, x.journal.Reads())
	}
	if x.env.Hooks != nil {
		f := x.journal.Finish(x.ask.Request)
		x.env.Hooks.Finish(&f)
	}
}

// reset drops every reference to the request and keeps the memory.
func (x *exchange) reset() {
	clear(x.ask.Excluded)
	x.ask = coordinator.Ask{Excluded: x.ask.Excluded[:0]}
	x.run, x.held, x.denied = nil, nil, nil
	x.env.Reset()
	x.prompt.Reset()
	x.route.Reset()
	x.line = recording.Line{}
	x.req.Reset()
}

// firstError prefers the failure of a leg to the error that no other target is left.
func firstError(ctx context.Context, leg, place error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if leg != nil {
		return leg
	}
	return place
}
