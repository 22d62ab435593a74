// Package journal records the events of a request. The caller reports each event once.
// The journal writes it to all records of requests: the record behind GET /v1/explain and
// GET /perf_metrics, the metrics, the spans, the log and the facts for filters.
//
// The decisions behind this package are in docs/design/request.md.
package journal

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// HTTP has the facts of a client's request and of its answer that the access log shows.
type HTTP struct {
	Address, Method, Path, Protocol string // the path is escaped and without a query
	Received, Sent                  int64  // bytes of the bodies
	Class                           string // the priority class; "" without classes
}

// Journal is the account of one request. The goroutine of the request owns it and its fields, but
// BeginLeg, the methods that have a *Leg, Fallback, PrefillDone, Timing, Panic and
// the methods that only read may be called by both legs of the request at the same time.
// Open comes first and Close last; then the journal may be opened again, with its memory.
type Journal struct {
	Record
	Client    string           // name of the client's API key; "" without keys
	Asked     string           // the client's name for the model; "" if the request has none
	Meter     *telemetry.Model // instruments of the request's model; Metrics.Other until the model is known
	Span      *telemetry.Span  // nil: the request is not traced
	Filters   *abi.StreamInfo  // nil: no filter needs facts
	Intervals telemetry.Intervals
	TokenTime time.Duration // limit of the request for the mean time between two tokens; 0: none
	Counted   int64         // tokens of the answer, estimated, as its engine may report none

	Route          string // the name that has led to the model; "": the name of the model itself
	Account        string // name of the tenant; "" without one
	Priority       int    // of the class
	Received, Sent int64  // bytes of the bodies; set before End

	// WarmUp: no client sent the request. The request is not counted as a client's request,
	// and the times of its legs do not count as measurements of the engines' speed.
	WarmUp bool

	books    *Books
	view     view
	mu       sync.Mutex       // guards rows and fallbacks of Record while two legs run
	last     coordinator.Pair // of the last placement
	api      openai.API       // of the request that Described has got
	class    *telemetry.Class // instruments of the priority class; nil: the configuration has no classes
	retries  int              // of all legs
	stage    telemetry.Stage
	staged   time.Time     // when stage began
	waited   time.Duration // time in the earlier stages
	answered string        // the model that the answer names; "" without a span
	reasons  []string      // the finish reasons of the answer; nil without a span
}

// Open begins the account of the request with that id. ctx and header are those of the
// request.
func (j *Journal) Open(b *Books, ctx context.Context, header http.Header, id string) {
	j.books, j.Meter = b, b.metrics.Other
	j.RequestID, j.Start = id, time.Now()
	if b.tracer != nil {
		j.Span = b.tracer.Start(header, j.Start)
	}
	j.view.requestID, j.view.start = id, j.Start
	b.Running.add(&j.view)
	if j.Filters = abi.StreamInfoFrom(ctx); j.Filters != nil {
		j.publishID()
	}
}

// Class notes the priority class of the request, and its priority.
func (j *Journal) Class(name string, priority int) {
	j.class, j.Priority = j.books.metrics.Class(name), priority
}

// Stage notes that the request begins to wait, or to run. Meter must be set before.
func (j *Journal) Stage(s telemetry.Stage) {
	now := time.Now()
	if j.stage != telemetry.StageNone && j.stage != telemetry.StageRuns {
		j.waited += now.Sub(j.staged)
	}
	j.Meter.Move(j.stage, s)
	if j.class != nil {
		j.class.Move(j.stage, s)
	}
	j.stage, j.staged = s, now
}

// Described notes the model of the parsed request and whether the client requested a
// stream. It publishes the request to the filters that need it.
func (j *Journal) Described(r *openai.Request) {
	j.Model, j.Stream, j.api = r.Model, r.Stream, r.API
	if j.Filters != nil {
		j.publishRequest(r)
	}
}

// Coordinated counts the coordination policy that placed the request.
func (j *Journal) Coordinated(policy string) {
	j.coordination = policy
	j.books.metrics.Coordinated(policy)
}

// Picked counts and records the choice of an ext_proc picker, or why there is none. It keeps p.
func (j *Journal) Picked(p *Pick) {
	j.pick = p
	j.books.metrics.Picked(p.Result, p.Took)
}

// Placed notes a placement with the table it was chosen from, and the length of the prompt in
// tokens. It recycles the memory of p's candidates.
func (j *Journal) Placed(p *coordinator.Placement, promptTokens int64) {
	if j.placed.IsZero() {
		j.placed = time.Now()
	}
	j.DisaggID, j.Flow, j.Policy, j.turn = p.ID, p.Flow, p.Policy, p.Turn
	j.prefill, j.decode = p.Prefill.Name(), p.Decode.Name()
	j.candidates, j.scored, j.scale = j.candidates[:0], p.Facts.Scored, p.Facts.Scale
	for i := range p.Facts.Candidates {
		j.candidates = append(j.candidates, candidate{engine: p.Targets[i].Name(), facts: p.Facts.Candidates[i]})
	}
	j.noteScores(p)
	j.notes = append(j.notes, p.Notes...)
	p.Recycle()
	j.last = coordinator.Pair{Prefill: p.Prefill, Decode: p.Decode}
	if j.Filters != nil {
		j.publishPlacement(p)
	}
	j.view.placed.Store(p)
	if p.Matched >= 0 {
		j.books.metrics.Matched(p.Matched, promptTokens)
	}
	for _, f := range p.Fallbacks {
		j.Fallback(f.What, f.Reason)
	}
}

// Fallback counts a deviation from the configuration and adds it to the record.
func (j *Journal) Fallback(what, reason string) {
	j.books.metrics.Fallback(what, reason)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.fallbacks = append(j.fallbacks, coordinator.Fallback{What: what, Reason: reason})
}

// Note adds lines to the record.
func (j *Journal) Note(lines ...string) { j.notes = append(j.notes, lines...) }

// BeginLeg begins the leg l on t. attempt is the number of the try of this phase. id is the leg's
// request id as the engine gets it. The caller may use l for another leg after Close.
func (j *Journal) BeginLeg(l *Leg, phase abi.Phase, t engine.Target, attempt int, id string) {
	*l = Leg{Phase: phase, id: id, engine: t.Name(), rank: t.Rank, attempt: attempt, Start: time.Now()}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.rows = append(j.rows, l)
}

// LegAnswered notes the status of a leg's answer.
func (j *Journal) LegAnswered(l *Leg, status int) { l.head, l.status = time.Now(), status }

// LegTimed notes the timing that the engine of a leg reports.
func (j *Journal) LegTimed(l *Leg, t connector.Timing) {
	if t.IsZero() {
		return
	}
	j.mu.Lock()
	l.timing = t
	j.mu.Unlock()
}

// maxCause bounds the text of a cause, in bytes.
const maxCause = 256

// LegEnded notes that a leg ended for a reason that is not a failure of the engine. cause is the text
// of the error for operators, which holds nothing of a body; "": the reason says all.
func (j *Journal) LegEnded(l *Leg, reason, cause string) {
	l.ended, l.reason, l.cause = time.Now(), reason, cause[:min(len(cause), maxCause)]
}

// LegCancelled counts a leg that the proxy ended because its result was no longer needed. cause is as
// for LegEnded.
func (j *Journal) LegCancelled(l *Leg, cause string) {
	j.LegEnded(l, "cancelled", cause)
	j.books.metrics.Cancelled(l.Phase)
}

// LegFailed counts a leg that failed. cause is as for LegEnded.
func (j *Journal) LegFailed(l *Leg, reason, cause string) {
	j.LegEnded(l, reason, cause)
	l.failed = true
	j.books.metrics.LegError(l.Phase, l.engine, reason)
}

// LegSucceeded counts a leg that succeeded, on an engine with that connector.
func (j *Journal) LegSucceeded(l *Leg, connector string) {
	l.ended = time.Now()
	if !j.WarmUp { // most of its time was the handshake of the engines
		j.books.metrics.Leg(l.Phase, connector, l.ended.Sub(l.Start))
	}
}

// Retry counts that a leg is tried again because it failed on an engine.
func (j *Journal) Retry(phase abi.Phase, engine, reason string) {
	j.retries++
	j.books.metrics.Retry(phase, reason)
	j.Warn("leg failed, retrying", "phase", phase.String(), "engine", engine, "reason", reason)
}

// RetainedKV counts the outcomes of KV that decode engines retain between turns.
func (j *Journal) RetainedKV(outcome string) { j.books.metrics.Turn(outcome) }

// AnswerBegins notes that the client's answer begins now, before anything of it is written.
// l is the leg that answers; nil if the answer is that of prefill alone.
func (j *Journal) AnswerBegins(l *Leg) {
	now := time.Now()
	if l != nil {
		l.firstByte = now
	}
	if !j.FirstByte.IsZero() { // another leg continues the answer
		return
	}
	j.FirstByte = now
	if j.WarmUp {
		return
	}
	took := now.Sub(j.Start)
	j.Meter.FirstByte(j.Stream, took)
	if j.class != nil && j.Stream {
		j.class.FirstByte(took)
	}
	if j.Filters != nil {
		j.publishFirstByte(took)
	}
}

// Expose adds the placement to the header of the client's answer.
func (j *Journal) Expose(h http.Header) {
	if j.prefill != "" {
		h.Set("X-Pdproxy-Prefill", j.prefill)
	}
	h.Set("X-Pdproxy-Decode", j.decode)
	h.Set("X-Pdproxy-Flow", j.Flow.String())
}

// Shed counts a request that the proxy rejects because the proxy's own resources are
// exhausted.
func (j *Journal) Shed(code string) { j.books.metrics.Shed(code) }

// Evicted counts a request of that class that the proxy has ended for a waiting one of a higher class.
// reason is why that one waits.
func (j *Journal) Evicted(class, higher, reason, policy string) {
	j.books.metrics.Evicted(class, reason)
	j.ErrorCode = openai.CodeEvicted
	j.Note("the policy " + policy + " ended the request, because a request of the class " + higher + " waited (" + reason + ")")
}

// Progress fills in the phase and the engines of the request. It is safe for concurrent use until Close.
func (j *Journal) Progress(r *abi.Evictable) {
	p := j.view.placed.Load()
	if p == nil {
		return
	}
	if r.Phase = abi.Prefill; r.Sent > 0 {
		r.Phase = abi.Decode
	}
	r.Decode = p.Decode.ID
	if !p.Prefill.IsZero() {
		r.Prefill = p.Prefill.ID
	}
}

// Broken counts a stream that broke off. err is logged unless it is nil.
func (j *Journal) Broken(kind string, err error) {
	j.books.metrics.BrokenStream(kind)
	if err != nil {
		j.Warn("stream broke off", "error", err)
	}
}

// Continued counts a stream that the last placement continues. The client has waited for gap since
// the last event before the seam, behind that number of tokens of the answer.
func (j *Journal) Continued(tokens int, gap time.Duration) {
	j.seams = append(j.seams, seam{at: time.Now(), tokens: tokens, gap: gap, prefill: j.prefill, decode: j.decode, result: resultContinued})
	j.books.metrics.Continuation(resultContinued)
	j.Warn("stream continues on another engine", "engine", j.decode, "tokens", tokens, "gap", gap)
}

// Completed counts a stream that lacked only its closing events, which the proxy has sent.
func (j *Journal) Completed(tokens int) { j.NotContinued(tokens, "completed") }

// NotContinued counts a stream that has broken off and is not continued.
func (j *Journal) NotContinued(tokens int, reason string) {
	j.seams = append(j.seams, seam{at: time.Now(), tokens: tokens, result: reason})
	j.books.metrics.Continuation(reason)
}

// End ends the request with Outcome: it adds the request to the metrics and writes its span and
// its lines of the logs. h may be empty unless LogsAccess. Close must still be called.
func (j *Journal) End(h HTTP) {
	j.ended = time.Now()
	if j.WarmUp {
		return
	}
	e := telemetry.Exchange{
		Model: j.Meter.Name, Flow: j.Flow, Outcome: j.Outcome, Stream: j.Stream, Waited: -1, Duration: j.ended.Sub(j.Start),
		Intervals: &j.Intervals, Prompt: j.Usage.Prompt, Completion: j.Usage.Completion, Cached: j.Usage.Cached,
	}
	if j.stage != telemetry.StageNone {
		j.Stage(telemetry.StageNone)
		e.Waited = j.waited
	}
	if !j.FirstByte.IsZero() {
		e.FirstByte = j.FirstByte.Sub(j.Start)
	}
	e.Requested, e.Tenant, e.Priority, e.Status, e.Received, e.Sent = j.Route, j.Account, j.Priority, j.Status, j.Received, j.Sent
	b := j.books
	if j.TokenTime > 0 {
		j.countTokenTime()
	}
	j.Meter.Ended(&e)
	if j.class != nil {
		j.class.Ended(&e)
	}
	if j.Client != "" {
		b.metrics.Client(j.Client, j.Outcome)
	}
	if pusher := b.metrics.Pusher.Load(); pusher != nil {
		e.Operation = operationOf(j.api)
		pusher.Record(&e)
	}
	if j.Span != nil {
		j.trace(&e)
	}
	if b.LogsAccess() {
		j.logAccess(&h)
	}
	if b.log.Enabled(context.Background(), slog.LevelDebug) {
		j.logLegs()
	}
	if j.Filters != nil {
		j.publishEnd()
	}
}

// countTokenTime counts whether the stream kept the limit of the request for the mean time between two
// tokens. A stream with less than two tokens, and one that broke off, does not count.
func (j *Journal) countTokenTime() {
	tokens := j.Usage.Completion
	if tokens <= 0 {
		tokens = j.Counted
	}
	if !j.Stream || j.Outcome != telemetry.OutcomeOK || j.FirstByte.IsZero() || tokens < 2 {
		return
	}
	class := ""
	if j.class != nil {
		class = j.class.Name()
	}
	j.books.metrics.TokenTime(class, j.ended.Sub(j.FirstByte) <= time.Duration(tokens-1)*j.TokenTime)
}

// Close stores the record for operators and drops the references to the request.
func (j *Journal) Close() {
	if !j.WarmUp {
		j.books.Ended.put(&j.Record)
	}
	j.books.Running.remove(&j.view)
	clear(j.candidates)
	clear(j.rows)
	clear(j.scorings)
	*j = Journal{Record: Record{
		rows: j.rows[:0], candidates: j.candidates[:0], fallbacks: j.fallbacks[:0],
		scorings: j.scorings[:0], scores: j.scores[:0], units: j.units[:0],
	}}
}
