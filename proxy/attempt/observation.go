package attempt

import (
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// maxObserved limits the part of an answer that is kept to read the usage, in bytes. Streams
// of events are not kept.
const maxObserved = 1 << 20

// observation is an answer that passes through the gateway.
type observation struct {
	a    *attempt
	l    *leg
	g    Gateway
	head GatewayHead

	unknown bool // no known engine has answered

	events openai.EventScanner
	start  openai.StreamHead
	first  []byte    // the stream until start has its verdict
	last   time.Time // of the last read after the first content; zero: no content has come
	body   []byte    // of an answer that is no stream
	lost   bool      // body was too large to keep
}

// leaveEngine records that the gateway had to leave the chosen engine, as a failure of that engine.
// The attempt then needs a placement on the engine that has answered.
func (o *observation) leaveEngine() {
	a := o.a
	a.env.Journal.Fallback("gateway", "other_endpoint")
	a.legFailed(o.l, a.classify(o.l, o.l.failedBy("other_endpoint", 502, nil)))
	a.needs, a.observation = NeedsServing, o
}

// goOn moves the request with its load to the placement on the engine that has answered; nil: that
// engine is not known.
func (o *observation) goOn(p *coordinator.Placement) error {
	a, env := o.a, o.a.env
	a.leavePlacement()
	if p == nil {
		o.unknown = true
		return o.begin()
	}
	a.p, a.c.Decode = p, p.Decode
	env.Journal.Placed(p, env.Ask.Request.PromptTokens)
	o.l = env.beginLeg(abi.Decode, p.Decode, 2, a.c.LegID)
	env.Journal.LegAnswered(&o.l.Leg, o.head.Status)
	return o.begin()
}

// begin begins the client's answer and reads the answer of the gateway to its end.
func (o *observation) begin() error {
	o.a.env.note(o.head.Status)
	o.a.env.Client.Begin(o.head.Status)
	if o.head.Hidden && o.ok() {
		o.a.p.Lease.Answered(o.stream())
		o.a.env.Journal.AnswerBegins(&o.l.Leg)
	}
	return o.run()
}

// run reads the answer to its end.
func (o *observation) run() error {
	if o.stream() && o.a.env.Journal.Span != nil {
		defer o.a.env.Journal.Finished(&o.events)
	}
	for {
		chunk, err := o.g.Next(o.a.env.Context)
		if len(chunk) > 0 {
			o.read(chunk)
		}
		switch {
		case err == nil:
		case err == io.EOF, o.events.Done && !o.events.MidEvent():
			o.ended()
			o.g.Used(o.used())
			return nil
		default:
			return o.brokeOff(err)
		}
	}
}

// brokeOff records an answer that has not come to its end. err is the error of Next.
func (o *observation) brokeOff(err error) error {
	if o.stream() {
		o.count()
	}
	switch {
	case o.a.env.evicted():
		o.g.Used(o.usedUntilNow())
		o.stop()
	case o.unknown:
		return err
	default: // the client has left, or the engine; the gateway does not say who
		o.l.target.ProbeSoon()
	}
	return o.a.legEnded(o.a.env.Context, o.l, err)
}

// used returns the cost of an answer that has come to its end.
func (o *observation) used() Used {
	env, u := o.a.env, Used{Prompt: -1, Completion: -1, Cached: -1}
	if !o.unknown {
		u.Engine = o.a.p.Decode.Spec.Name
	}
	reported := env.Journal.Usage
	if !o.ok() || o.head.Hidden && reported == (openai.Usage{}) {
		return u
	}
	u.Prompt, u.Completion = env.Ask.Request.PromptTokens, env.Journal.Counted
	if reported != (openai.Usage{}) {
		u.Cached = reported.Cached
		if reported.Prompt >= 0 {
			u.Prompt = reported.Prompt
		}
		if reported.Completion >= 0 {
			u.Completion = reported.Completion
		}
	}
	return u
}

// usedUntilNow returns the cost of an answer that the proxy ends. The engine tells nothing about the
// tokens of an answer before its end, unless the answer is a stream.
func (o *observation) usedUntilNow() Used {
	u := o.used()
	if !o.ok() {
		return u
	}
	if u.Prompt < 0 { // the gateway does not show the body
		u.Prompt = o.a.env.Ask.Request.PromptTokens
	}
	if !o.stream() {
		u.Completion = -1
	}
	return u
}

// stop ends the client's answer, because the proxy has ended the request for one of a higher class.
func (o *observation) stop() {
	env, e := o.a.env, o.a.env.Stopped()
	env.Journal.Outcome = telemetry.OutcomeBroken
	env.Journal.Broken(openai.CodeEvicted.String(), nil)
	var event []byte
	if o.stream() && o.events.Held() == 0 && !o.events.MidEvent() { // the client has every byte
		event = env.Request.API.AppendErrorEvent(nil, e, o.events.NextSequence())
	}
	o.g.Stop(e, event)
}

// ok reports whether the engine has answered the request.
func (o *observation) ok() bool { return o.head.Status/100 == 2 }

// stream reports whether the answer is a stream of events.
func (o *observation) stream() bool { return o.ok() && o.head.Events && o.a.env.Request.Stream }

// read notes the facts in the next bytes of the answer.
func (o *observation) read(chunk []byte) {
	env := o.a.env
	env.Client.Relayed(len(chunk))
	if o.head.Hidden {
		return
	}
	if !o.stream() {
		if !o.lost && (len(o.body)+len(chunk) > maxObserved || env.Client.Reserve(len(chunk)) != nil) {
			o.body, o.lost = nil, true
		}
		if !o.lost {
			o.body = append(o.body, chunk...)
		}
		return
	}
	held := o.events.Held()
	o.events.Feed(chunk)
	if env.Sent != nil {
		env.Sent.Store(o.events.Events)
	}
	if n := o.events.Held(); n > held {
		_ = env.Client.Reserve(n - held) // the bytes are in memory already; without room the next request waits
	}
	now := time.Now()
	switch {
	case !o.last.IsZero():
		env.Journal.Intervals.Observe(now.Sub(o.last))
		o.last = now
	case o.hasBegun(chunk):
		o.a.p.Lease.Answered(true)
		env.Journal.AnswerBegins(&o.l.Leg)
		o.last = now
	}
}

// hasBegun reports whether the stream has content with its next bytes. It must not be called
// again after it has returned true.
func (o *observation) hasBegun(chunk []byte) bool {
	if o.start.Verdict > openai.ContentEvent {
		return false
	}
	if len(o.first)+len(chunk) > maxHead || o.a.env.Client.Reserve(len(chunk)) != nil {
		o.start.Verdict = openai.ContentEvent // no head of a failed answer is this large
	} else {
		o.first = append(o.first, chunk...)
		o.start.Read(o.first)
	}
	if o.start.Verdict < openai.ContentEvent {
		return false
	}
	if o.a.env.Journal.Span != nil {
		o.a.env.Journal.StreamBegan(o.a.env.Request.API, o.first)
	}
	o.first, o.start.Data = nil, nil
	return o.start.Verdict == openai.ContentEvent
}

// ended records an answer that has come to its end.
func (o *observation) ended() {
	a, env := o.a, o.a.env
	switch {
	case !o.ok():
		o.refused()
		return
	case o.head.Hidden:
		o.succeeded()
		return
	case o.stream():
		o.streamEnded()
		return
	}
	if env.Journal.Span != nil {
		env.Journal.Whole(env.Request.API, o.body)
	}
	if reason, status := openai.WholeFailure(env.Request.API, o.body); reason != "" {
		o.failedWith(reason, status, telemetry.OutcomeEngineError)
		return
	}
	a.p.Lease.Answered(false)
	env.Journal.AnswerBegins(&o.l.Leg)
	if u, ok := openai.ParseUsage(o.body); ok {
		env.Journal.Usage = u
		if a.p.Flow == abi.FlowAggregated && a.p.Matched >= 0 {
			a.reportCached(o.body)
		}
	} else {
		env.Journal.Counted = wholeTokens(env.Request.API, o.body)
	}
	o.succeeded()
}

// count notes the tokens of the stream until now.
func (o *observation) count() {
	journal := o.a.env.Journal
	journal.Counted = o.events.Events
	if u, ok := o.events.Usage(); ok {
		journal.Usage = u
	}
}

// streamEnded records a stream of events that has come to its end.
func (o *observation) streamEnded() {
	env, events := o.a.env, &o.events
	events.Finish()
	o.count()
	if u, ok := events.Usage(); ok {
		env.Registry.MeasureOutput(o.a.p.Decode, u.Completion-1, time.Since(env.Journal.FirstByte))
	}
	reason := ""
	switch {
	case events.Failed:
		reason = "error_event"
	case events.Aborted:
		reason = "aborted"
	case o.start.Verdict == openai.EmptyAnswer:
		reason, events.Status = "empty_answer", o.start.Status
	case !events.Done && env.Request.API.Generates():
		reason = "no_end"
	default:
		o.succeeded()
		return
	}
	env.Journal.Broken(reason, nil)
	o.failedWith(reason, events.Status, telemetry.OutcomeBroken)
}

// failedWith records a failure that an answer with a 2xx status reports inside.
func (o *observation) failedWith(reason string, status int, outcome telemetry.Outcome) {
	f := o.l.failedBy(reason, 502, nil)
	f.Status, f.Permanent = status, upstream.RequestAtFault(status)
	o.failed(f, outcome)
}

// refused records an answer whose status is no success.
func (o *observation) refused() {
	status, outcome := o.head.Status, telemetry.OutcomeEngineError
	f := o.l.failedBy("status_"+strconv.Itoa(status), 502, nil)
	f.Status, f.Permanent = status, upstream.RequestAtFault(status)
	f.Overloaded = openai.Overloaded(status, o.head.RetryAfter, o.body)
	f.exempt = status == http.StatusRequestTimeout
	switch {
	case f.Permanent:
		outcome = telemetry.OutcomeClientError
	case status == http.StatusGatewayTimeout:
		outcome = telemetry.OutcomeTimeout
	}
	o.failed(f, outcome)
}

// failed records the failure f of the leg.
func (o *observation) failed(f *failure, outcome telemetry.Outcome) {
	if o.a.env.Journal.Outcome = outcome; o.unknown {
		return
	}
	if f.Status/100 == 5 && !f.Overloaded {
		o.l.target.ProbeSoon() // the gateway itself answers 503 and 504 for an engine that is gone
	}
	o.a.legFailed(o.l, o.a.classify(o.l, f))
}

func (o *observation) succeeded() {
	if !o.unknown { // otherwise no engine has this success
		o.a.legSucceeded(o.l)
	}
}
