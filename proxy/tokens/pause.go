package tokens

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/circuit"
)

// These are the pauses in which an instance gets no requests in one form, and the numbers
// of consecutive failures of each kind before a pause. absentPause is long, because only
// another version of the engine can have a missing endpoint. faultPause is short. It
// exists because an engine that answers late delays each request by the time-out.
const (
	absentPause  = 5 * time.Minute
	faultPause   = 10 * time.Second
	maxFaults    = 3
	refusalPause = time.Minute
	maxRefusals  = 8
)

var (
	absentRules  = circuit.Fixed(1, absentPause)
	faultRules   = circuit.Fixed(maxFaults, faultPause)
	refusalRules = circuit.Fixed(maxRefusals, refusalPause)
)

// health has one circuit for each kind of failures of one form at an instance.
type health struct{ absent, faults, refusals circuit.Breaker }

// pauses records the forms in which instances are not asked at present. The zero value
// is ready for use.
type pauses struct {
	mu    sync.Mutex
	table map[pauseKey]*health // of forms that failed last; guarded by mu
}

type pauseKey struct {
	instance string
	way      way
}

func (p *pauses) paused(instance string, w way, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.table[pauseKey{instance, w}]
	return h != nil && (h.absent.Circuit(now) == circuit.Open || h.faults.Circuit(now) == circuit.Open || h.refusals.Circuit(now) == circuit.Open)
}

// note records the result of a tokenize request.
func (p *pauses) note(instance string, w way, r Reason) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := pauseKey{instance, w}
	switch r {
	case OK:
		delete(p.table, key)
	case Unsupported:
		p.of(key).absent.Failure()
	case TimedOut, Failed, BadAnswer:
		p.of(key).faults.Failure()
	case Refused:
		p.of(key).refusals.Failure()
	}
}

// of returns the entry of a form, new if there is none; p.mu is held.
func (p *pauses) of(key pauseKey) *health {
	h := p.table[key]
	if h == nil {
		h = new(health)
		h.absent.Init(circuit.Options{Rules: absentRules})
		h.faults.Init(circuit.Options{Rules: faultRules})
		h.refusals.Init(circuit.Options{Rules: refusalRules})
		if p.table == nil {
			p.table = make(map[pauseKey]*health)
		}
		p.table[key] = h
	}
	return h
}

func (p *pauses) forget(instance string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key := range p.table {
		if key.instance == instance {
			delete(p.table, key)
		}
	}
}
