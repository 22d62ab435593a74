package telemetry

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// classVecs are the instruments of all priority classes.
type classVecs struct {
	exchanges  *prometheus.CounterVec
	tokens     *prometheus.CounterVec
	queueWait  *prometheus.HistogramVec
	firstToken *prometheus.HistogramVec
	requests   *prometheus.GaugeVec

	byName sync.Map // of *Class
}

// Class holds the instruments of one priority class. It is safe for concurrent use.
type Class struct {
	vecs       *classVecs
	name       string
	tokens     [2]prometheus.Counter // prompt, completion
	queueWait  prometheus.Observer
	firstToken prometheus.Observer
	stages     [stageCount]prometheus.Gauge // nil: the stage has no gauge
}

// Class returns the instruments of a class. The names must come from the configuration.
func (m *Metrics) Class(name string) *Class {
	if found, ok := m.classes.byName.Load(name); ok {
		return found.(*Class)
	}
	v := &m.classes
	waiting := v.requests.WithLabelValues(name, "waiting")
	made := &Class{
		vecs: v, name: name,
		tokens:     [2]prometheus.Counter{v.tokens.WithLabelValues(name, "prompt"), v.tokens.WithLabelValues(name, "completion")},
		queueWait:  v.queueWait.WithLabelValues(name),
		firstToken: v.firstToken.WithLabelValues(name),
		stages: [stageCount]prometheus.Gauge{
			StageWaitsPlace: waiting, StageWaitsEngine: waiting, StageWaitsPolicy: waiting, StageSaturated: waiting, StageRuns: v.requests.WithLabelValues(name, "running"),
		},
	}
	found, _ := v.byName.LoadOrStore(name, made)
	return found.(*Class)
}

// Name returns the name of the class.
func (c *Class) Name() string { return c.name }

// Move counts a request that leaves one stage and enters another.
func (c *Class) Move(from, to Stage) {
	if g := c.stages[from]; g != nil {
		g.Dec()
	}
	if g := c.stages[to]; g != nil {
		g.Inc()
	}
}

// FirstByte observes the time until the first byte of a stream.
func (c *Class) FirstByte(d time.Duration) { c.firstToken.Observe(d.Seconds()) }

// Ended counts an exchange that has ended.
func (c *Class) Ended(e *Exchange) {
	if e.Waited >= 0 {
		c.queueWait.Observe(e.Waited.Seconds())
	}
	c.vecs.exchanges.WithLabelValues(c.name, e.Outcome.String()).Inc()
	c.tokens[0].Add(float64(max(0, e.Prompt)))
	c.tokens[1].Add(float64(max(0, e.Completion)))
}
