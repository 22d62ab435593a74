package exchange

import (
	"errors"
	"math"
	"net/http"
	"strings"

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
// the clean-up. If g is not nil, the gateway g itself sends the request to the engine: Serve then
// writes to w only the head of the engine's answer, or an error if g sends nothing.
func (run *Runner) Serve(w http.ResponseWriter, r *http.Request, api openai.API, g attempt.Gateway) {
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
	if x.account.tenant != nil {
		if err := x.charge(); err != nil {
			return err
		}
	}
	saturable := "" // the model whose saturated engines make the request wait
	if x.env.Config.Limits.SaturationQueueDepth > 0 && api != openai.EngineRoute {
		saturable = x.knownModel()
	}
	if err := x.admit(client, saturable); err != nil {
		return err
	}
	defer x.leave()
	if x.picker != nil && !x.placing.route.Restricted { // the picker of a sidecar only chooses decode
		if err := x.askPicker(); err != nil {
			return err
		}
	}
	if err := x.describe(); err != nil {
		return err
	}
	for {
		placement, err := x.placing.next()
		if err != nil {
			return err
		}
		if saturable != "" {
			x.admitted.Sent() // the load of the engines has the request now
		}
		if x.req.Stream && placement != nil {
			x.keep(placement)
		}
		outcome := attempt.Run(&x.env, placement)
		if over, err := x.placing.learn(outcome); over {
			return err
		}
	}
}

// authenticate checks the API key, and returns the name under which the client is counted.
func (x *exchange) authenticate(r *http.Request, api openai.API) (client string, err error) {
	x.req.API = api // from now on errors have the form of this API
	if keys := x.run.Keys(); keys != nil {
		if r, err = keys.Authenticate(r); err != nil {
			return "", err
		}
		x.env.Key, x.account.tenant = admission.KeyName(r), admission.Tenant(r)
	}
	if t := x.account.tenant; t != nil {
		x.env.Tenant = t.Name
	}
	x.journal.Client = x.env.Key
	if x.journal.Filters != nil && x.account.tenant != nil { // filters of the body may read it
		x.journal.Tenant(x.account.tenant.Name)
	}
	return x.run.Proxies().Client(r), nil
}

// read reads the sidecar's headers and the body, and scans the body. A request that read
// rejects has taken no place among the running requests.
func (x *exchange) read(client string) error {
	h, route, t := x.client.Header(), &x.placing.route, x.account.tenant
	// The engine checks the type of a body that a gateway sends. A body without a type is JSON, unless
	// a web page may have sent it: browsers name the origin of each page that sends a POST.
	if x.gateway == nil && (h["Content-Type"] != nil || h["Origin"] != nil) {
		if err := openai.CheckContentType(x.req.API, h.Get("Content-Type")); err != nil {
			return err
		}
	}
	if sc := x.run.Sidecar(); sc != nil {
		if err := route.Read(sc, x.routed(), h, x.client.RemoteAddr()); err != nil {
			return err
		}
	}
	if err := x.client.ReadBody(client); err != nil {
		return err
	}
	if err := x.scan(); err != nil {
		return err
	}
	x.journal.Asked = x.req.Model
	if header := x.env.Config.EPP.ModelHeader; header != "" && x.gateway != nil {
		if err := x.takeModel(h.Get(header)); err != nil {
			return err
		}
	}
	if x.req.EngineField != "" || t != nil && t.Models != nil {
		if err := x.permit(); err != nil {
			return err
		}
	}
	if table := x.run.Models(); table != nil || len(x.env.Config.Remotes) > 0 {
		if err := x.resolve(table); err != nil {
			return err
		}
	}
	x.meter()
	if n := x.req.Size(); n > downstream.MinDerived {
		if err := x.client.Derive(n); err != nil {
			return err
		}
	}
	if route.Restricted {
		return route.Check()
	}
	return nil
}

// scan scans the body.
func (x *exchange) scan() error {
	contentType, url := x.client.Header().Get("Content-Type"), x.client.URL()
	path := strings.TrimSuffix(url.Path, "/")
	if x.req.API == openai.EngineRoute && x.gateway != nil {
		path = url.EscapedPath() // a gateway may pass every path, with its slash at the end
		if openai.Opaque(contentType, x.client.Body()) {
			openai.ReadOpaque(contentType, &x.req)
			return x.req.ReadTarget(path, url.RawQuery)
		}
	}
	if err := openai.ReadRequest(x.req.API, contentType, x.client.Body(), &x.req); err != nil {
		return err
	}
	if x.req.API == openai.EngineRoute {
		return x.req.ReadTarget(path, url.RawQuery)
	}
	return nil
}

// describe fills in the question for the coordinator.
func (x *exchange) describe() error {
	e, ask, route := &x.env, &x.placing.ask, &x.placing.route
	e.Fields = x.client.AppendFields(e.Fields[:0], x.req.ContentType, e.Key == "", e.Config.Server.TrustPDFields)
	if l, epp := &e.Config.Limits, &e.Config.EPP; l.PriorityHeader != "" || l.DeadlineHeader != "" || l.TokenTimeHeader != "" || l.FairnessHeader != "" || epp.Pool != "" || epp.ModelHeader != "" {
		x.withoutQueueLines()
	}
	if route.Restricted && route.Sidecar() != nil {
		e.Fields = route.Sidecar().Strip(e.Fields)
	}
	if x.changes != nil {
		e.Fields = sidecar.Mutate(e.Fields, x.changes, e.Config.Server.TrustPDFields)
	}
	if span := x.journal.Span; span != nil {
		span.Inject(func(name, value string) {
			e.Fields = append(downstream.Without(e.Fields, name), upstream.Field{Name: name, Value: value})
		})
	}
	if x.req.Opaque {
		e.Fields = downstream.Without(e.Fields, "Content-Type") // the gateway keeps that of the client
	}
	if ask.Model = x.req.Model; ask.Model == "" && x.req.API == openai.EngineRoute && x.gateway != nil {
		if err := x.chooseModel(); err != nil {
			return err
		}
	}
	ask.Request = abi.RequestFacts{PromptTokens: x.req.PromptTokens, MaxTokens: x.req.MaxTokens, N: x.req.N, Stream: x.req.Stream}
	needs := x.run.Coordinator.Needs()
	if needs&(abi.NeedPrompt|abi.NeedTraits|abi.NeedHeaders|abi.NeedIdentity|abi.NeedMedia) != 0 {
		if err := x.describeForPolicies(needs); err != nil {
			return err
		}
	}
	if !x.req.API.Generates() {
		ask.Aggregate = abi.RoleDecode // every engine can answer; keep the prefill engines free for prompts
	} else {
		if needs&(abi.NeedBlocks|abi.NeedConversation) != 0 {
			if err := x.run.Prompts.Match(e.Context, &x.prompt, e.Source(), ask); err != nil {
				return err
			}
		}
		if r := x.run.Recorder; r != nil {
			x.line = r.Note(x.journal.Start, &x.req, x.prompt.TokenIDs(), x.run.Prompts.ClientID(e.Source()))
		}
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
		r.TokenMicros = uint32(min(x.journal.TokenTime.Microseconds(), math.MaxUint32))
	}
	if needs&abi.NeedMedia != 0 {
		x.placing.ask.Key.Media = x.prompt.Media(&x.req)
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
		if x.journal.Outcome == telemetry.OutcomeNone {
			x.journal.Outcome = telemetry.OutcomeOK
		}
		return
	}
	if x.client.Gone() && !downstream.BodyStopped(err) || errors.Is(err, downstream.ErrWrite) {
		x.journal.Outcome = telemetry.OutcomeCancelled
		x.journal.Status = 499
		x.client.Cut() // a normal return would send an empty 200, or a stream that looks complete
		return
	}
	if e := x.evicted(); e != nil {
		x.noteEviction(e)
		err = e // the legs may have failed in other ways
	}
	if x.client.Begun() {
		if x.stream != nil && x.stream.end != nil {
			x.endBroken()
		}
		return
	}
	outcome := outcomeOf(err)
	x.journal.Outcome = outcome
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
	x.placing.endWaits()
	if v != http.ErrAbortHandler {
		x.journal.Outcome = telemetry.OutcomeInternal
		x.journal.Panic(v)
	}
	x.client.Cut() // the answer is not whole
	panic(http.ErrAbortHandler)
}
