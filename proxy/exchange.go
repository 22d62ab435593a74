package proxy

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/prompt"
	"github.com/pdproxy/pdproxy/proxy/recording"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// exchange is one client request with all its legs. Its owner is the handler's
// goroutine, from open to close; close is its only exit and runs once whatever
// happens. Every other goroutine that an attempt starts is waited for or handed
// to the janitor before close.
type exchange struct {
	s   *Server
	cfg *config.Config // as it stood when the exchange opened
	ctx context.Context

	client downstream.Client
	req    openai.Request
	base   []upstream.Field // the client's lines that every leg carries
	ask    coordinator.Ask
	prompt prompt.Prompt
	held   *coordinator.Lease // of the last placement; released here too if a panic kept the attempt from it

	key       string              // name of the client's API key; "" without keys
	tries     [abi.Encode + 1]int // legs sent, by phase
	encoded   bool                // encoders have done their part
	route     sidecar.Route
	journal   journal.Journal
	legs      legs
	line      recording.Line // of the recording
	legPolicy LegPolicy      // nil: none
	warm      bool           // a warm-up: no client asked for it
	denied    *legError      // the failure for which the retry budget had no retry
	turned    bool           // the KV of the turn before has been looked for
}

// serveExchange runs one generating request.
func (s *Server) serveExchange(w http.ResponseWriter, r *http.Request, api openai.API) {
	x := s.open(w, r)
	defer x.close()
	defer x.recovered()
	x.fail(x.serve(r, api))
	if x.client.MustCut() {
		panic(http.ErrAbortHandler) // net/http's way to end a connection mid-answer
	}
}

// recovered makes a fault of the proxy's own visible, and ends the client's
// connection; the exchange is closed like any other.
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

// open begins the exchange: request id, span, start of the clock.
func (s *Server) open(w http.ResponseWriter, r *http.Request) *exchange {
	x := s.exchanges.Get().(*exchange)
	x.s, x.cfg, x.ctx = s, s.cfg.Load(), r.Context()
	x.client.Open(s.bodies, x.cfg, w, r)
	x.journal.Open(s.books, x.ctx, r.Header, downstream.RequestID(r))
	w.Header().Set("X-Request-Id", x.journal.ID())
	s.budget.exchange(x.journal.Began())
	x.legPolicy = s.legPolicyNow()
	return x
}

// serve reads the body of the exchange, admits the exchange and runs it; an error
// means that nothing has been answered yet, unless x.client.Begun(). A request that is
// refused for what it says, or whose body does not come, takes no place of those
// that run.
func (x *exchange) serve(r *http.Request, api openai.API) error {
	x.req.API = api // errors have its form from here on
	r, err := x.s.keys.Load().Authenticate(r)
	if err != nil {
		return err
	}
	x.key = admission.KeyName(r)
	x.journal.Client(x.key)
	client := admission.Client(r)
	if err := x.readRoute(); err != nil {
		return err
	}
	x.client.CountFor(client)
	if err := x.client.ReadBody(client); err != nil {
		return err
	}
	if err := openai.ParseRequest(api, x.client.Body(), &x.req); err != nil {
		return err
	}
	if n := x.req.Size(); n > downstream.MinDerived {
		if err := x.client.Derive(n); err != nil {
			return err
		}
	}
	if err := x.route.Check(); err != nil {
		return err
	}
	leave, err := x.s.queue.Enter(x.ctx, client, x.cfg.Limits)
	if err != nil {
		x.journal.Shed(admission.Reason(err))
		return err
	}
	defer leave()
	if err := x.prepare(); err != nil {
		return err
	}
	return x.run()
}

// readRoute reads the headers that are for a sidecar.
func (x *exchange) readRoute() error {
	return x.route.Read(x.s.sidecar.Load(), sidecar.Request{
		Context: x.ctx, ID: x.journal.ID(), Body: &x.req, Ask: &x.ask, Exchange: x, ScheduleStyle: x.cfg.Retry.ScheduleStyle,
	}, x.client.Header(), x.client.RemoteAddr())
}

// prepare turns the scanned request into what is asked of the coordinator.
func (x *exchange) prepare() error {
	x.base = x.client.AppendFields(x.base[:0], x.key == "", x.cfg.Server.TrustPDFields)
	if sc := x.route.Sidecar(); sc != nil {
		x.base = sc.Strip(x.base)
	}
	x.journal.Inject(func(name, value string) {
		x.base = append(downstream.Without(x.base, name), upstream.Field{Name: name, Value: value})
	})
	x.ask.Model = x.req.Model
	x.ask.Request = abi.RequestFacts{
		PromptTokens: x.req.PromptTokens,
		MaxTokens:    x.req.MaxTokens,
		N:            x.req.N,
		Stream:       x.req.Stream,
	}
	if x.s.deps.Coordinator.Needs()&abi.NeedPrompt != 0 {
		if err := x.client.Reserve(len(x.req.PromptRaw())); err != nil {
			return err
		}
		x.ask.Request.Prompt = string(x.req.PromptRaw())
	}
	if err := x.s.prompts.Match(x.ctx, &x.prompt, x.source(), &x.ask); err != nil {
		return err
	}
	if r := x.s.deps.Recorder; r != nil && x.req.API.Generates() {
		x.line = r.Note(x.journal.Began(), &x.req, x.prompt.TokenIDs(), x.s.prompts.ClientID(x.source()))
	}
	if !x.req.API.Generates() {
		x.ask.Aggregate = abi.RoleDecode // any engine answers it; prefill is left to prompts
	}
	x.journal.Described(&x.req)
	return nil
}

// source is where the prompt of the exchange comes from.
func (x *exchange) source() prompt.Source {
	return prompt.Source{Request: &x.req, Header: x.client.Header(), RequestID: x.journal.ID(), Memory: &x.client}
}

// run places the request and runs attempts until one ends it. Retries happen
// only while the client has seen nothing.
func (x *exchange) run() error {
	var last error
	for {
		p, err := x.place()
		if err != nil {
			return firstError(x.ctx, last, err)
		}
		hook, err := x.try(p)
		if err == nil {
			return nil
		}
		if errors.Is(err, coordinator.ErrNoTarget) && x.tries[abi.Prefill] < x.cfg.Retry.Attempts {
			continue // nothing was sent: the last decode of the group went away before
		}
		if !x.mayRetry(err, hook) {
			return err
		}
		x.exclude(err, hook)
		last = err
	}
}

// try runs one attempt at the placement p. Whatever happens in it, it ends.
func (x *exchange) try(p *coordinator.Placement) (hook hookAnswer, err error) {
	a := x.newAttempt(p)
	err = errPanicked
	defer func() { a.end(err) }()
	if err = a.run(); err != nil {
		hook = a.askHook(err)
	}
	return hook, err
}

// fail answers the client with err, if it has seen nothing yet, and settles the
// outcome. A nil err is success.
func (x *exchange) fail(err error) {
	if err == nil {
		if x.journal.Ending() == telemetry.OutcomeNone {
			x.journal.Ends(telemetry.OutcomeOK)
		}
		return
	}
	if x.client.Gone() && !downstream.BodyStopped(err) || errors.Is(err, downstream.ErrWrite) {
		x.journal.Ends(telemetry.OutcomeCancelled)
		x.journal.Answered(499)
		x.client.Cut() // to return in silence would make it an empty 200, or a stream that looks whole
		return
	}
	if x.client.Begun() { // a stream that broke off has said so
		return
	}
	x.journal.Ends(outcomeOf(err))
	if downstream.OwnFault(err) || errors.Is(err, downstream.ErrReading) {
		x.journal.Shed(publicError(err).Code)
	}
	if o := x.journal.Ending(); o == telemetry.OutcomeEngineError || o == telemetry.OutcomeTimeout {
		x.journal.Warn("request failed", "error", err) // names phase and engine, never bodies
	}
	x.reply(err)
}

// close is the one exit of an exchange. Every attempt has ended its legs and
// released its lease before; what is left is to settle the books.
func (x *exchange) close() {
	if x.held != nil {
		x.held.Release()
	}
	x.journal.End()
	if !x.warm {
		x.settle()
	}
	x.journal.Close()
	x.releaseBody()
	x.client.Close()
	s := x.s
	x.reset()
	s.exchanges.Put(x)
}

// settle tells the recorder and the finish hook how the exchange ended.
func (x *exchange) settle() {
	if r := x.s.deps.Recorder; r != nil && x.journal.Ending() == telemetry.OutcomeOK {
		r.Write(&x.line, x.journal.Reported(), x.ask.Request.PromptTokens, x.journal.Reads())
	}
	if x.legPolicy != nil {
		x.finish()
	}
}

// releaseBody gives the request's bytes back, and what was made of them; nothing may
// be retried after it.
func (x *exchange) releaseBody() {
	x.req.Object.Reset() // it refers to the bytes
	x.prompt.DropTokenIDs()
	x.client.ReleaseBody()
}

// reset drops every reference to the request and keeps the memory.
func (x *exchange) reset() {
	clear(x.base)
	clear(x.ask.Excluded)
	x.base, x.ask = x.base[:0], coordinator.Ask{Excluded: x.ask.Excluded[:0]}
	x.s, x.cfg, x.ctx, x.held, x.legPolicy = nil, nil, nil, nil, nil
	x.key, x.warm, x.tries = "", false, [abi.Encode + 1]int{}
	x.encoded, x.turned, x.denied = false, false, nil
	x.prompt.Reset()
	x.route.Reset()
	x.line = recording.Line{}
	x.req.Reset()
	x.legs.reset()
}

// newAttempt readies one attempt at the placement p.
func (x *exchange) newAttempt(p *coordinator.Placement) *attempt {
	a := &attempt{
		x: x, p: p,
		conn: x.s.connector(p.Decode.Spec.Connector),
		c: connector.Attempt{
			Request: &x.req, ID: p.ID, LegID: x.s.legID(),
			Prefill: p.Prefill, Decode: p.Decode, Trust: x.cfg.Server.TrustPDFields || x.route.CallerCoordinates(),
			TRTLLM: *x.s.trtllm.Load(), Conversation: prompt.Conversation(&x.ask),
		},
	}
	a.began = decodeState{restarts: p.Decode.Restarts(), forced: p.Decode.Breaker.Circuit(time.Now()) == engine.CircuitOpen}
	a.chooseFlow()
	x.placed(p)
	a.joinPair()
	if p.FirstByte > 0 {
		a.deadline = time.Now().Add(p.FirstByte)
	}
	return a
}

// outcomeOf says how an exchange ended that was answered with err.
func outcomeOf(err error) telemetry.Outcome {
	var le *legError
	if downstream.OwnFault(err) {
		return telemetry.OutcomeShed
	}
	if errors.As(err, &le) && !le.permanent {
		if le.code == 504 {
			return telemetry.OutcomeTimeout
		}
		return telemetry.OutcomeEngineError
	}
	if le != nil {
		return telemetry.OutcomeClientError
	}
	oe := publicError(err)
	switch {
	case oe.Code == "no_target" || oe.Code == "rejected_by_policy":
		return telemetry.OutcomeNoTarget
	case oe.Status == 429 || oe.Code == "queue_timeout":
		return telemetry.OutcomeShed
	case oe.Status/100 == 4 || oe.Status == 501:
		return telemetry.OutcomeClientError
	}
	return telemetry.OutcomeInternal
}

// reply answers the client with err. Nothing has been sent before.
func (x *exchange) reply(err error) {
	var le *legError
	if errors.As(err, &le) && le.reply != nil {
		x.replyEngineError(le)
		return
	}
	oe := publicError(err)
	x.journal.Answered(oe.Status)
	x.client.Error(x.req.API, oe)
}

// replyEngineError relays an engine's own 4xx as it wrote it.
func (x *exchange) replyEngineError(le *legError) {
	h := x.client.AnswerHeader()
	if le.reply.contentType != "" {
		h.Set("Content-Type", le.reply.contentType)
	}
	if le.reply.retryAfter != "" {
		h.Set("Retry-After", le.reply.retryAfter)
	}
	_ = x.writeWhole(le.status, le.reply.body) // the client may be gone
}

// commit sends the head of the answer. From here on nothing is retried.
func (x *exchange) commit(status int) {
	x.noteStatus(status)
	x.client.Begin(status)
}

// writeWhole answers with a body that is there in full.
func (x *exchange) writeWhole(status int, body []byte) error {
	x.noteStatus(status)
	return x.client.Whole(status, body)
}

// noteStatus records the status of the answer, and puts the placement into its header
// where the configuration asks for that.
func (x *exchange) noteStatus(status int) {
	x.journal.Answered(status)
	if x.cfg.Server.ExposePlacement {
		x.journal.Expose(x.client.AnswerHeader())
	}
}
