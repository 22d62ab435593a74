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
	"runtime/debug"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/accesslog"
	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// Books has the destinations to which the journals of all requests of a process write. It
// is safe for concurrent use.
type Books struct {
	Ended   Ring    // the requests that ended last
	Running Running // the requests that run

	metrics *telemetry.Metrics
	tracer  *telemetry.Tracer // nil: no spans
	access  *accesslog.Log    // nil: no access log
	log     *slog.Logger
}

// NewBooks returns books. tracer may be nil: then there are no spans. worker may be nil: then no
// other process needs the number of requests that run here.
func NewBooks(metrics *telemetry.Metrics, tracer *telemetry.Tracer, access *accesslog.Log, log *slog.Logger, worker *balance.Worker) *Books {
	return &Books{Running: Running{worker: worker}, metrics: metrics, tracer: tracer, access: access, log: log}
}

// Journal is the account of one request. The goroutine of the request owns it, but
// BeginLeg, the methods that have a *Leg, Fallback, PrefillDone, Timing, Panic and
// the methods that only read may be called by both legs of the request at the same time.
// Open comes first and Close last; then the journal may be opened again, with its memory.
type Journal struct {
	books     *Books
	rec       record
	view      view
	span      *telemetry.Span
	filters   *abi.StreamInfo  // nil: no filter needs facts
	last      coordinator.Pair // of the last placement
	client    string           // name of the client's API key; "" without keys
	warmUp    bool
	intervals telemetry.Intervals
	operation string           // in the terms of OpenTelemetry; "": none
	model     *telemetry.Model // instruments of the request's model; other before Model is called
	class     *telemetry.Class // instruments of the priority class; nil: the configuration has no classes
	stage     telemetry.Stage
	staged    time.Time     // when stage began
	waited    time.Duration // time in the earlier stages
	counted   int64         // tokens of the answer, estimated
	answered  string        // the model that the answer names; "" without a span
	reasons   []string      // the finish reasons of the answer; nil without a span
}

// Open begins the account of the request with that id. ctx and header are those of the
// request.
func (j *Journal) Open(b *Books, ctx context.Context, header http.Header, id string) {
	j.books = b
	j.rec.open(id, time.Now())
	j.model = b.metrics.OtherModel()
	j.span = b.tracer.Start(header, j.rec.Start)
	j.view.requestID, j.view.start = id, j.rec.Start
	b.Running.add(&j.view)
	if j.filters = abi.StreamInfoFrom(ctx); j.filters != nil {
		j.publishID()
	}
}

// ID returns the id of the request.
func (j *Journal) ID() string { return j.rec.RequestID }

// Began returns when the request arrived.
func (j *Journal) Began() time.Time { return j.rec.Start }

// AnswerBegan returns when the client got the first event or the whole answer; zero: it
// got none.
func (j *Journal) AnswerBegan() time.Time { return j.rec.FirstByte }

// Inject gives the header lines of the request's span to set.
func (j *Journal) Inject(set func(name, value string)) { j.span.Inject(set) }

// Client notes the name of the client's API key.
func (j *Journal) Client(key string) { j.client = key }

// Class notes the priority class of the request.
func (j *Journal) Class(name string) { j.class = j.books.metrics.Class(name) }

// WarmUp records that no client sent the request. The request is not counted as a client's request,
// and the times of its legs do not count as measurements of the engines' speed.
func (j *Journal) WarmUp() { j.warmUp = true }

// Model sets the instruments of the request's model. Call it before Stage.
func (j *Journal) Model(m *telemetry.Model) { j.model = m }

// Stage notes that the request begins to wait, or to run.
func (j *Journal) Stage(s telemetry.Stage) {
	now := time.Now()
	if j.stage.Waits() {
		j.waited += now.Sub(j.staged)
	}
	j.model.Move(j.stage, s)
	j.class.Move(j.stage, s)
	j.stage, j.staged = s, now
}

// Described notes the model of the parsed request and whether the client requested a
// stream. It publishes the request to the filters that need it.
func (j *Journal) Described(r *openai.Request) {
	j.rec.Model, j.rec.Stream, j.operation = r.Model, r.Stream, operationOf(r.API)
	if j.filters != nil {
		j.publishRequest(r)
	}
}

// Requested notes the name of the model in the request, a name of [[model]].
func (j *Journal) Requested(name string) { j.rec.Requested = name }

// RequestedModel returns the name that Requested has noted, or "".
func (j *Journal) RequestedModel() string { return j.rec.Requested }

// Placing notes the start of a placement.
func (j *Journal) Placing() { j.rec.Placing = time.Now() }

// Coordinated counts the coordination policy that placed the request.
func (j *Journal) Coordinated(policy string) {
	j.rec.coordination = policy
	j.books.metrics.Coordinated(policy)
}

// Pick is the choice of an ext_proc picker.
type Pick struct {
	Result       string // as in pdproxy_picker_requests_total
	Took         time.Duration
	Destinations []string // as the picker names them
	Prefill      []string
	Encoders     []string
	BodyChanged  bool
}

// Picked counts and records the choice of an ext_proc picker, or why there is none. It keeps p.
func (j *Journal) Picked(p *Pick) {
	j.rec.pick = p
	j.books.metrics.Picked(p.Result, p.Took)
}

// Placed notes a placement, the length of the prompt in tokens, and the candidates. It
// recycles the memory of p's candidates.
func (j *Journal) Placed(p *coordinator.Placement, promptTokens int64) {
	j.rec.place(p)
	p.Recycle()
	j.last = coordinator.Pair{Prefill: p.Prefill, Decode: p.Decode}
	if j.filters != nil {
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
	j.rec.fallback(what, reason)
}

// Note adds lines to the record.
func (j *Journal) Note(lines ...string) {
	j.rec.notes = append(j.rec.notes, lines...)
}

// BeginLeg begins a leg on t. attempt is the number of the try of this phase. id is the
// leg's request id as the engine gets it.
func (j *Journal) BeginLeg(phase abi.Phase, t engine.Target, attempt int, id string) *Leg {
	return j.rec.leg(phase, t, attempt, id)
}

// LegAnswered notes the status of a leg's answer.
func (j *Journal) LegAnswered(l *Leg, status int) { l.answered(time.Now(), status) }

// LegTimed notes the timing that the engine of a leg reports.
func (j *Journal) LegTimed(l *Leg, t connector.Timing) { j.rec.timed(l, t) }

// LegEnded notes that a leg ended for a reason that is not a failure of the engine.
func (j *Journal) LegEnded(l *Leg, reason string) { l.end(time.Now(), reason) }

// LegCancelled counts a leg that the proxy ended because its result was no longer needed.
func (j *Journal) LegCancelled(l *Leg) {
	l.end(time.Now(), "cancelled")
	j.books.metrics.Cancelled(l.Phase)
}

// LegFailed counts a leg that failed.
func (j *Journal) LegFailed(l *Leg, reason string) {
	l.end(time.Now(), reason)
	l.failed = true
	j.books.metrics.LegError(l.Phase, l.engine, reason)
}

// LegSucceeded counts a leg that succeeded, on an engine with that connector.
func (j *Journal) LegSucceeded(l *Leg, connector string) {
	now := time.Now()
	l.end(now, "")
	if !j.warmUp { // most of its time was the handshake of the engines
		j.books.metrics.Leg(l.Phase, connector, now.Sub(l.Start))
	}
}

// Retry counts that a leg is tried again because it failed on an engine.
func (j *Journal) Retry(phase abi.Phase, engine, reason string) {
	j.books.metrics.Retry(phase, reason)
	j.Warn("leg failed, retrying", "phase", phase.String(), "engine", engine, "reason", reason)
}

// PrefillDone notes that prefill has answered.
func (j *Journal) PrefillDone() {
	if j.filters != nil {
		j.publishPrefill()
	}
}

// RetainedKV counts the outcomes of KV that decode engines retain between turns.
func (j *Journal) RetainedKV(outcome string) { j.books.metrics.Turn(outcome) }

// FirstByte notes that the client's answer begins now, before anything of it is written.
// l is the leg that answers; nil if the answer is that of prefill alone.
func (j *Journal) FirstByte(l *Leg) {
	now := time.Now()
	j.rec.firstByte(l, now)
	if j.warmUp {
		return
	}
	j.model.FirstByte(j.rec.Stream, now.Sub(j.rec.Start))
	j.class.FirstByte(j.rec.Stream, now.Sub(j.rec.Start))
	if j.filters != nil {
		j.publishFirstByte(now)
	}
}

// Read notes the time between two reads of a stream.
func (j *Journal) Read(interval time.Duration) { j.intervals.Observe(interval) }

// Reads returns how many times Read was called.
func (j *Journal) Reads() int64 { return j.intervals.Count() }

// Used notes the tokens that the engine reports.
func (j *Journal) Used(u openai.Usage) { j.rec.Usage = u }

// Reported returns the tokens that the engine reported.
func (j *Journal) Reported() openai.Usage { return j.rec.Usage }

// Count notes the estimated tokens of an answer whose engine may report none.
func (j *Journal) Count(tokens int64) { j.counted = tokens }

// Counted returns the tokens that Count has noted.
func (j *Journal) Counted() int64 { return j.counted }

// Answered notes the status that the client gets.
func (j *Journal) Answered(status int) { j.rec.Status = status }

// Expose adds the placement to the header of the client's answer.
func (j *Journal) Expose(h http.Header) { j.rec.expose(h) }

// Shed counts a request that the proxy rejects because the proxy's own resources are
// exhausted.
func (j *Journal) Shed(code string) { j.books.metrics.Shed(code) }

// Broken counts a stream that broke off. err is logged unless it is nil.
func (j *Journal) Broken(kind string, err error) {
	j.books.metrics.BrokenStream(kind)
	if err != nil {
		j.Warn("stream broke off", "error", err)
	}
}

// Ends notes the outcome, which may be replaced until End.
func (j *Journal) Ends(o telemetry.Outcome) { j.rec.Outcome = o }

// Ending returns the outcome that was noted last.
func (j *Journal) Ending() telemetry.Outcome { return j.rec.Outcome }

// End stores the final outcome and the end time of the request. Close must still be
// called.
func (j *Journal) End() {
	j.rec.End = time.Now()
	if j.warmUp {
		return
	}
	j.measure()
	j.trace()
	j.logAccess()
	if j.books.log.Enabled(context.Background(), slog.LevelDebug) {
		j.logLegs()
	}
	if j.filters != nil {
		j.publishEnd()
	}
}

// measure adds the request to the metrics.
func (j *Journal) measure() {
	admitted := j.stage != telemetry.StageNone
	j.Stage(telemetry.StageNone)
	if admitted {
		j.model.QueueWait(j.waited)
		j.class.QueueWait(j.waited)
	}
	j.class.Exchange(j.rec.Usage.Prompt, j.rec.Usage.Completion, j.rec.Outcome)
	j.model.Exchange(j.rec.Flow, j.rec.Outcome, j.rec.End.Sub(j.rec.Start))
	j.model.MergeIntervals(&j.intervals)
	j.model.Tokens(j.rec.Usage.Prompt, j.rec.Usage.Completion, j.rec.Usage.Cached)
	if j.client != "" {
		j.books.metrics.Client(j.client, j.rec.Outcome)
	}
	op := j.ended()
	j.books.metrics.Operation(&op)
}

// Close stores the record for operators and drops the references to the request.
func (j *Journal) Close() {
	if !j.warmUp {
		j.books.Ended.put(&j.rec)
	}
	j.books.Running.remove(&j.view)
	j.view.placed.Store(nil)
	j.books, j.span, j.filters, j.last = nil, nil, nil, coordinator.Pair{}
	j.client, j.warmUp, j.intervals = "", false, telemetry.Intervals{}
	j.operation, j.model, j.stage, j.waited = "", nil, telemetry.StageNone, 0
	j.class, j.counted, j.answered, j.reasons = nil, 0, "", nil
	j.rec.reset()
}

// Finish returns the facts of a completed request for the finish hook. It combines asked,
// the facts that the coordinator got, with the record.
func (j *Journal) Finish(asked abi.RequestFacts) abi.FinishFacts {
	f := abi.FinishFacts{
		Request: asked, Outcome: abi.Outcome(j.rec.Outcome), Flow: j.rec.Flow, Status: uint32(j.rec.Status),
		ID: j.rec.DisaggID, FirstByte: -1, Total: j.rec.End.Sub(j.rec.Start).Microseconds(), Attempts: uint32(j.rec.legs),
		PromptTokens: -1, CachedTokens: -1, OutputTokens: -1,
	}
	f.Request.Model, f.Request.Prompt = j.rec.Model, "" // the memory of the body may be freed
	if d := j.last.Decode; !d.IsZero() {
		f.Decode, f.DecodeRank = d.ID, int32(d.Rank)
		f.Placed = j.rec.Placed.Sub(j.rec.Start).Microseconds()
	}
	if p := j.last.Prefill; !p.IsZero() {
		f.Prefill, f.PrefillRank = p.ID, int32(p.Rank)
	}
	if !j.rec.FirstByte.IsZero() {
		f.FirstByte = j.rec.FirstByte.Sub(j.rec.Start).Microseconds()
	}
	if j.rec.Usage != (openai.Usage{}) { // all zero: the engine reported none
		f.PromptTokens, f.CachedTokens, f.OutputTokens = j.rec.Usage.Prompt, j.rec.Usage.Cached, j.rec.Usage.Completion
	}
	if f.Outcome != abi.OutcomeOK {
		for _, l := range j.rec.rows[:j.rec.legs] {
			if l.reason != "" && l.reason != "cancelled" {
				f.Failed, f.Reason = l.Phase, l.reason
			}
		}
	}
	return f
}

// Warn logs a message of the request. args are as those of slog and hold nothing of a
// body.
func (j *Journal) Warn(message string, args ...any) { j.books.log.Warn(message, j.attrs(args...)...) }

// Panic logs a panic with its stack. The deferred function that recovered from it calls.
func (j *Journal) Panic(v any) {
	j.books.log.Error("panic in an exchange", j.attrs("panic", v, "stack", string(debug.Stack()))...)
}

func (j *Journal) attrs(more ...any) []any {
	return append([]any{"request_id", j.rec.RequestID}, more...)
}

func (j *Journal) logLegs() {
	for _, l := range j.rec.rows[:j.rec.legs] {
		j.books.log.Debug("leg", j.attrs("leg_id", l.id, "phase", l.Phase.String(), "engine", l.engine, "rank", l.rank,
			"attempt", l.attempt, "status", l.status, "error", l.reason, "ms", l.ended.Sub(l.Start).Milliseconds())...)
	}
	j.books.log.Debug("exchange", j.attrs("flow", j.rec.Flow.String(), "outcome", j.rec.Outcome.String(),
		"status", j.rec.Status, "ms", j.rec.End.Sub(j.rec.Start).Milliseconds())...)
}
