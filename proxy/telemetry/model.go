package telemetry

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
)

// OtherModel is the label model of requests for models that no engine serves, and of
// requests whose body could not be read.
const OtherModel = "other"

const (
	// maxModels bounds the values of the label model. Engines choose the names of their
	// models, and LoRA adapters are models, too.
	maxModels = 256
	// MaxModelName bounds the length of the label, in bytes.
	MaxModelName = 256
)

// Stage is the present step of a request. The gauges pdproxy_requests_running and
// pdproxy_requests_waiting count the requests in each stage.
type Stage uint8

// The stages. StageNone: the request is not counted; its body is not read yet, or it has
// ended.
const (
	StageNone        Stage = iota
	StageWaitsPlace        // for a place among limits.max_exchanges
	StageWaitsEngine       // for an engine that is ready
	StageWaitsPolicy       // for a plan policy that holds the request
	StageSaturated         // for a place, because the engines of the model are saturated
	StageRuns              // on engines, or being placed

	stageCount
)

// flows and outcomes bound the table of counters of a model.
const (
	flows    = int(abi.FlowReject) + 1
	outcomes = int(OutcomeInternal) + 1
)

// Model holds the instruments of one model. A request looks its Model up once. No method
// allocates after its first call with the same arguments. It is safe for concurrent use.
type Model struct {
	Name         string // value of the label; does not change
	metrics      *Metrics
	stages       [stageCount]prometheus.Gauge // that of StageNone is not registered
	exchanges    [flows][outcomes]atomic.Pointer[prometheus.Counter]
	duration     prometheus.Observer
	firstToken   prometheus.Observer
	wholeAnswer  prometheus.Observer
	queueWait    prometheus.Observer
	interEvent   *intervalHistogram
	tokens       [3]prometheus.Counter // prompt, completion, cached
	promptTokens prometheus.Observer
	outputTokens prometheus.Observer
	open         atomic.Int64 // requests in a stage other than StageNone
	gone         atomic.Bool  // the series are removed
}

// models holds the Models of all names.
type models struct {
	mu      sync.Mutex // serializes additions and removals
	byName  atomic.Pointer[map[string]*Model]
	served  func(name string) bool // guarded by mu; nil: all are served
	removed time.Time              // of the last search for models to remove; guarded by mu
}

// removeEvery is the shortest time between two searches for models to remove.
const removeEvery = time.Second

// ModelsServed sets the function that reports whether an engine serves a model now. When there
// is no room for a new name, the models that no engine serves lose their series.
func (m *Metrics) ModelsServed(served func(name string) bool) {
	m.models.mu.Lock()
	defer m.models.mu.Unlock()
	m.models.served = served
}

// Model returns the instruments of a model that the engines serve. The caller must not
// call it with other names, because a client may choose them: OtherModel is for these.
// When there are maxModels names, all of which are served, Model returns OtherModel's for new
// names.
func (m *Metrics) Model(name string) *Model {
	if found := (*m.models.byName.Load())[name]; found != nil {
		return found
	}
	if len(name) > MaxModelName || !utf8.ValidString(name) || name == "" {
		return m.Other
	}
	m.models.mu.Lock()
	defer m.models.mu.Unlock()
	old := *m.models.byName.Load()
	if found := old[name]; found != nil {
		return found
	}
	next := maps.Clone(old)
	if len(next) >= maxModels {
		m.removeModels(next)
	}
	if len(next) >= maxModels {
		return m.Other
	}
	made := m.newModel(name)
	next[name] = made
	m.models.byName.Store(&next)
	return made
}

// removeModels removes the models without requests that no engine serves from names, and their
// series. The caller holds models.mu.
func (m *Metrics) removeModels(names map[string]*Model) {
	now := time.Now()
	if m.models.served == nil || now.Sub(m.models.removed) < removeEvery {
		return
	}
	m.models.removed = now
	for name, o := range names {
		if o.open.Load() > 0 || m.models.served(name) {
			continue
		}
		o.gone.Store(true)
		delete(names, name)
		of := prometheus.Labels{"model": name}
		for _, v := range []interface {
			DeletePartialMatch(labels prometheus.Labels) int
		}{m.exchanges, m.exchangeTime, m.firstToken, m.wholeAnswer, m.queueWait, m.promptTokens, m.outputTokens, m.tokens, m.running, m.waiting} {
			v.DeletePartialMatch(of)
		}
		m.interEvent.remove(name)
		if p := m.Pusher.Load(); p != nil {
			p.forget(name)
		}
		if x := m.extension.Load(); x != nil {
			x.forget(name)
		}
	}
}

func (m *Metrics) newModel(name string) *Model {
	return &Model{
		Name: name, metrics: m,
		stages: [stageCount]prometheus.Gauge{
			StageNone:        prometheus.NewGauge(prometheus.GaugeOpts{}),
			StageWaitsPlace:  m.waiting.WithLabelValues(name, "max_exchanges"),
			StageWaitsEngine: m.waiting.WithLabelValues(name, "no_engine"),
			StageWaitsPolicy: m.waiting.WithLabelValues(name, "policy"),
			StageSaturated:   m.waiting.WithLabelValues(name, "saturated"),
			StageRuns:        m.running.WithLabelValues(name),
		},
		duration:    m.exchangeTime.WithLabelValues(name),
		firstToken:  m.firstToken.WithLabelValues(name, "true"),
		wholeAnswer: m.wholeAnswer.WithLabelValues(name),
		queueWait:   m.queueWait.WithLabelValues(name),
		interEvent:  m.interEvent.with(name),
		tokens: [3]prometheus.Counter{
			m.tokens.WithLabelValues(name, "prompt"), m.tokens.WithLabelValues(name, "completion"), m.tokens.WithLabelValues(name, "cached"),
		},
		promptTokens: m.promptTokens.WithLabelValues(name),
		outputTokens: m.outputTokens.WithLabelValues(name),
	}
}

// Move counts a request that leaves one stage and enters another.
func (o *Model) Move(from, to Stage) {
	o.stages[from].Dec()
	o.stages[to].Inc()
	if from == StageNone {
		o.open.Add(1)
	}
	if to == StageNone {
		o.open.Add(-1)
	}
}

// FirstByte observes the time until the client's first byte, of a stream or of a whole
// answer.
func (o *Model) FirstByte(stream bool, d time.Duration) {
	if stream {
		o.firstToken.Observe(d.Seconds())
		return
	}
	o.wholeAnswer.Observe(d.Seconds())
}

// Exchange is a request that has ended.
type Exchange struct {
	Model     string // Name of the Model
	Flow      abi.Flow
	Outcome   Outcome
	Stream    bool
	Waited    time.Duration // in the proxy; negative: the request has not come to the point where it may wait
	FirstByte time.Duration // until the client's first byte; 0: the client got nothing
	Duration  time.Duration // until the end
	Intervals *Intervals    // of the stream

	Prompt, Completion, Cached int64 // tokens; negative: the engine has not reported the number

	// Only for the Extension:
	Requested      string // the name in the request that led to Model; "": Model
	Tenant         string // "": none
	Priority       int    // of the class
	Status         int    // of the answer to the client; 0: unknown
	Received, Sent int64  // bytes of the bodies

	// Only for spans and the Pusher:
	Operation     string   // gen_ai.operation.name, for example chat; "": no model runs
	AnsweredModel string   // that the answer names; only for the span; "": unknown
	FinishReasons []string // in the order of the choices; only for the span; nil: unknown
}

// Ended counts an exchange that has ended.
func (o *Model) Ended(e *Exchange) {
	if e.Waited >= 0 {
		o.queueWait.Observe(e.Waited.Seconds())
	}
	for b, n := range e.Intervals.counts {
		if n > 0 {
			o.interEvent.counts[b].Add(uint64(n))
		}
	}
	o.interEvent.sum.Add(int64(e.Intervals.sum))
	if e.Prompt > 0 {
		o.tokens[0].Add(float64(e.Prompt))
		o.promptTokens.Observe(float64(e.Prompt))
	}
	if e.Completion > 0 {
		o.tokens[1].Add(float64(e.Completion))
		o.outputTokens.Observe(float64(e.Completion))
	}
	if e.Cached > 0 {
		o.tokens[2].Add(float64(e.Cached))
	}
	if o.gone.Load() { // WithLabelValues would make a series again
		return
	}
	at := &o.exchanges[min(int(e.Flow), flows-1)][min(int(e.Outcome), outcomes-1)]
	c := at.Load()
	if c == nil {
		made := o.metrics.exchanges.WithLabelValues(o.Name, e.Flow.String(), e.Outcome.String())
		c = &made
		at.Store(c)
	}
	(*c).Inc()
	o.duration.Observe(e.Duration.Seconds())
	if x := o.metrics.extension.Load(); x != nil {
		kept := *e // only this copy is allocated
		x.Ended(&kept)
	}
}
