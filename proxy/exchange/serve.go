package exchange

import (
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Serve runs one request to an engine: it calls each step of the request, from the API key to
// the clean-up.
func (run *Runner) Serve(w http.ResponseWriter, r *http.Request, api openai.API) {
	run.serve(w, r, api, nil)
}

// ServeGateway serves a request that the gateway g itself sends to the engine. It writes to w only
// the head of the engine's answer, or an error if g sends nothing.
func (run *Runner) ServeGateway(w http.ResponseWriter, r *http.Request, api openai.API, g attempt.Gateway) {
	run.serve(w, r, api, g)
}

func (run *Runner) serve(w http.ResponseWriter, r *http.Request, api openai.API, g attempt.Gateway) {
	x := run.open(w, r)
	x.gateway, x.env.Gateway = g, g
	defer x.close()
	defer x.recovered()
	x.answer(x.serve(r, api))
	if x.client.MustCut() {
		panic(http.ErrAbortHandler) // net/http's way to end a connection in the middle of an answer
	}
}

// serve admits, reads and describes the request. Then it places the request and runs attempts
// until one succeeds or no retry is allowed. If serve returns an error, the client has no
// complete answer; the answer may have begun.
func (x *exchange) serve(r *http.Request, api openai.API) error {
	client, err := x.authenticate(r, api)
	if err != nil {
		return err
	}
	if err := x.read(client); err != nil {
		return err
	}
	if err := x.charge(); err != nil {
		return err
	}
	if err := x.admit(client, x.saturable()); err != nil {
		return err
	}
	defer x.leave()
	if err := x.askPicker(); err != nil {
		return err
	}
	if err := x.describe(); err != nil {
		return err
	}
	for {
		placement, err := x.placing.next()
		if err != nil {
			return err
		}
		x.admitted.Sent() // the load of the engines has the request now
		outcome := attempt.Run(&x.env, placement)
		if x.placing.learn(outcome) {
			return outcome.Err
		}
	}
}

// open begins the exchange.
func (run *Runner) open(w http.ResponseWriter, r *http.Request) *exchange {
	x, _ := run.exchanges.Get().(*exchange)
	if x == nil {
		x = new(exchange)
	}
	cfg := run.Config()
	x.run = run
	if x.picker = run.Picker(); x.picker != nil {
		x.observed.ResponseWriter = w
		w = &x.observed
	}
	x.placing.open(x)
	x.client.Open(run.Bodies, cfg, w, r)
	x.journal.Open(run.Books, r.Context(), r.Header, downstream.RequestID(r))
	w.Header().Set("X-Request-Id", x.journal.ID())
	run.Budget.Request(x.journal.Began())
	x.req.Memory = &x.client
	e := &x.env
	e.Services, e.Context, e.Config, e.Hooks = run.Services, r.Context(), cfg, run.hooksNow()
	e.Client, e.Request, e.Ask, e.Prompt, e.Route, e.Journal = &x.client, &x.req, &x.placing.ask, &x.prompt, &x.placing.route, &x.journal
	return x
}

// authenticate checks the API key, and returns the name under which the client is counted.
func (x *exchange) authenticate(r *http.Request, api openai.API) (client string, err error) {
	x.req.API = api // from now on errors have the form of this API
	if r, err = x.run.Keys().Authenticate(r); err != nil {
		return "", err
	}
	x.env.Key, x.account.tenant = admission.KeyName(r), admission.Tenant(r)
	x.journal.Client(x.env.Key)
	return x.run.ClientOf(r), nil
}

// read reads the sidecar's headers and the body, and scans the body. A request that read
// rejects has taken no place among the running requests.
func (x *exchange) read(client string) error {
	if err := x.checkContentType(); err != nil {
		return err
	}
	err := x.placing.route.Read(x.run.Sidecar(), sidecar.Request{
		Body: &x.req, Ask: &x.placing.ask, Journal: &x.journal, ScheduleStyle: x.env.Config.TRTLLM.ScheduleStyle,
	}, x.client.Header(), x.client.RemoteAddr())
	if err != nil {
		return err
	}
	x.client.CountFor(client)
	if err := x.client.ReadBody(client); err != nil {
		return err
	}
	if err := x.scan(); err != nil {
		return err
	}
	if err := x.permit(); err != nil {
		return err
	}
	if err := x.resolve(); err != nil {
		return err
	}
	x.meter()
	if n := x.req.Size(); n > downstream.MinDerived {
		if err := x.client.Derive(n); err != nil {
			return err
		}
	}
	return x.placing.route.Check()
}

// checkContentType rejects a body of another type than the API takes. The engine checks the line of
// a request that a gateway sends. A body without a type is JSON, unless a web page may have sent it:
// browsers name the origin of each page that sends a POST.
func (x *exchange) checkContentType() error {
	h := x.client.Header()
	if x.gateway != nil || h["Content-Type"] == nil && h["Origin"] == nil {
		return nil
	}
	return openai.CheckContentType(x.req.API, h.Get("Content-Type"))
}

// scan scans the body.
func (x *exchange) scan() error {
	if err := openai.ReadRequest(x.req.API, x.client.Header().Get("Content-Type"), x.client.Body(), &x.req); err != nil {
		return err
	}
	if x.req.API == openai.EngineRoute {
		return x.req.ReadTarget(strings.TrimSuffix(x.client.URL().Path, "/"), x.client.URL().RawQuery)
	}
	return nil
}

// describe fills in the question for the coordinator.
func (x *exchange) describe() error {
	e := &x.env
	e.Fields = x.client.AppendFields(e.Fields[:0], x.req.ContentType(), e.Key == "", e.Config.Server.TrustPDFields)
	x.withoutQueueLines()
	if sc := x.placing.route.Sidecar(); sc != nil {
		e.Fields = sc.Strip(e.Fields)
	}
	if x.changes != nil {
		e.Fields = sidecar.Mutate(e.Fields, x.changes, e.Config.Server.TrustPDFields)
	}
	x.journal.Inject(func(name, value string) {
		e.Fields = append(downstream.Without(e.Fields, name), upstream.Field{Name: name, Value: value})
	})
	x.placing.ask.Model = x.req.Model
	x.placing.ask.Request = abi.RequestFacts{
		PromptTokens: x.req.PromptTokens,
		MaxTokens:    x.req.MaxTokens,
		N:            x.req.N,
		Stream:       x.req.Stream,
	}
	if err := x.describeForPolicies(x.run.Coordinator.Needs()); err != nil {
		return err
	}
	source := e.Source()
	if err := x.run.Prompts.Match(e.Context, &x.prompt, source, &x.placing.ask); err != nil {
		return err
	}
	if r := x.run.Recorder; r != nil && x.req.API.Generates() {
		x.line = r.Note(x.journal.Began(), &x.req, x.prompt.TokenIDs(), x.run.Prompts.ClientID(source))
	}
	if !x.req.API.Generates() {
		x.placing.ask.Aggregate = abi.RoleDecode // every engine can answer; keep the prefill engines free for prompts
	}
	x.journal.Described(&x.req)
	if x.req.API == openai.Responses {
		return x.follow()
	}
	return nil
}

// describeForPolicies adds the facts of the request that policies need.
func (x *exchange) describeForPolicies(needs abi.Needs) error {
	r := &x.placing.ask.Request
	if needs&abi.NeedPrompt != 0 {
		if err := x.client.Reserve(len(x.req.PromptRaw())); err != nil {
			return err
		}
		r.Prompt = string(x.req.PromptRaw())
	}
	if needs&abi.NeedTraits != 0 {
		r.Traits = prompt.Traits(&x.req)
	}
	if needs&abi.NeedHeaders != 0 {
		r.Headers = declared(x.client.Header(), x.run.Coordinator.Headers())
	}
	if needs&abi.NeedIdentity != 0 {
		r.Identity = x.identity()
	}
	return nil
}

// identity returns hashes of the names of the client, its tenant and its priority class.
func (x *exchange) identity() abi.Identity {
	i := abi.Identity{Client: abi.ClientID(x.env.Key)}
	if t := x.account.tenant; t != nil {
		i.Tenant = abi.LabelID(t.Name)
	}
	if c := x.env.Class; c != nil {
		i.Class = abi.LabelID(c.Name)
	}
	return i
}

// answer records the outcome and, if the answer has not begun, sends err to the client. A nil
// err is success.
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
		x.client.Cut() // a normal return would send an empty 200, or a stream that looks complete
		return
	}
	if x.client.Begun() { // a broken stream has ended with an error event or a cut connection
		return
	}
	outcome := outcomeOf(err)
	x.journal.Ends(outcome)
	if downstream.OwnFault(err) || errors.Is(err, downstream.ErrReading) {
		x.journal.Shed(PublicError(err).Code.String())
	}
	if outcome == telemetry.OutcomeEngineError || outcome == telemetry.OutcomeTimeout {
		x.journal.Warn("request failed", "error", err) // the text names phase and engine, and contains nothing of the bodies
	}
	x.reply(err)
}

// recovered logs a panic of the proxy and aborts the client's connection. The deferred close
// then closes the exchange as usual.
func (x *exchange) recovered() {
	v := recover()
	if v == nil {
		return
	}
	if v != http.ErrAbortHandler {
		x.journal.Ends(telemetry.OutcomeInternal)
		x.journal.Panic(v)
	}
	x.client.Cut() // the answer is not whole
	panic(http.ErrAbortHandler)
}

// close ends every exchange. Each attempt has ended its legs and released its lease before. close
// completes the record, writes the trace line, calls the finish hook and frees the memory.
func (x *exchange) close() {
	x.env.End() // an attempt that a panic has left
	x.settleTenant()
	x.journal.End()
	if !x.env.WarmUp {
		x.settle()
	}
	x.journal.Close()
	x.closeObserved()
	x.env.ReleaseBody()
	x.client.Close()
	run := x.run
	x.reset()
	run.exchanges.Put(x)
}

// settle reports the end of the exchange to the recorder and to the finish hook.
func (x *exchange) settle() {
	if r := x.run.Recorder; r != nil && x.journal.Ending() == telemetry.OutcomeOK {
		r.Write(&x.line, x.journal.Reported(), x.placing.ask.Request.PromptTokens, x.journal.Reads())
	}
	if x.env.Hooks != nil {
		f := x.journal.Finish(x.placing.ask.Request)
		f.Request.Remaining = x.placing.ask.Remaining(time.Now())
		x.env.Hooks.Finish(&f)
	}
}
