package predict

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// Type identifies engines that are equally fast.
type Type struct {
	Model    string
	Role     abi.Role
	Hardware uint32 // LabelID of the label hardware; 0: none
}

// Engine has the models of one type: the prefill of a prompt, the start of a stream after
// its prefill elsewhere, and the time of a token. Its zero value knows nothing.
type Engine struct {
	Prefill, Start, Token Model

	chunk atomic.Int32 // index in chunks
	delay delay

	mu  sync.Mutex
	off [len(chunks)]float64 // mean error of the ends of steps by chunk size; guarded by mu
}

// Table has the engines by their types. Its zero value is empty. It has one entry for
// each type that ever was; their number is bounded by the configuration.
type Table struct{ types sync.Map }

// Of returns the models of a type.
func (t *Table) Of(of Type) *Engine {
	e, ok := t.types.Load(of)
	if !ok {
		e, _ = t.types.LoadOrStore(of, new(Engine))
	}
	return e.(*Engine)
}

// learn adds the work of one or more steps that took µs, and the error of each chunk size
// for the end of the last one, as a share of the time of its prompt. The chunk size of
// the least error becomes the engine's.
func (e *Engine) learn(x *Features, took float64, off []float64) {
	e.mu.Lock()
	best := int(e.chunk.Load())
	for i := range off {
		e.off[i] += (off[i] - e.off[i]) / errorMemory
		if e.off[i] < 0.9*e.off[best] {
			best = i
		}
	}
	e.chunk.Store(int32(best))
	e.mu.Unlock()
	var said float64
	if f := e.Prefill.fit.Load(); f != nil {
		said = f.weights.Of(x)
	}
	e.Prefill.Learn(x, took, said)
}

// PrefillError returns the mean absolute error of predictions of prefill as a share of
// them.
func (e *Engine) PrefillError() (share float64, known bool) { return e.delay.mean() }

// Stream is an answer whose prompt another target computes.
type Stream struct {
	e    *Engine
	x    Features
	said float64
}

// Stream notes a stream of a prompt.
func (e *Engine) Stream(p Prompt, streams Streams) *Stream {
	s := &Stream{e: e, x: start(p, streams)}
	s.said, _ = e.Start.Predict(&s.x)
	return s
}

// Said returns the predicted time in µs from the end of prefill to the first token; 0: none.
func (s *Stream) Said() float64 { return s.said }

// Started learns from the time from the end of prefill to the first token.
func (s *Stream) Started(took time.Duration) {
	s.e.Start.Learn(&s.x, float64(took)/1000, s.said)
}

// Streamed learns from a stream that took so long for a number of tokens after the first
// one. streams are those of its target at its end, including this stream.
func (e *Engine) Streamed(streams Streams, tokens int64, took time.Duration) {
	if tokens > 0 {
		x := token(streams)
		said, _ := e.Token.Predict(&x)
		e.Token.Learn(&x, float64(took)/1000/float64(tokens), said)
	}
}

// Near is the largest error of a near prediction, as a share of the real time.
const Near = 0.2

const (
	classes  = 20
	perRatio = 0.0405465 // natural logarithm of the ratio of two bins: a tenth of that of 1+Near and 1-Near
	lowest   = -20       // bin of the smallest ratio
	bins     = 64        // up to a ratio of 6
	below    = 4         // bins of real times that are near, below a prediction: log(1+Near)
	above    = 5         // and above: -log(1-Near)
	trust    = 8         // samples without delay that each class begins with
	fading   = 1 - 1.0/512

	maxError = 4 // largest error of one prediction, as a share of it, that counts in the mean
)

// delay learns how much longer prompts take because later prompts join their last step.
// This depends on the time until that step begins. For each class of this time, delay has
// a histogram of the ratios of real times to those without the delay. The factor is the
// one with the most near predictions.
type delay struct {
	factors [classes]atomic.Uint32 // bits of a float32; 0: 1
	share   atomic.Uint64          // bits of the mean error

	mu     sync.Mutex
	ratios [classes][bins]float64 // guarded by mu
	begun  [classes]bool          // guarded by mu
	errs   float64                // guarded by mu
	count  int                    // guarded by mu
}

func (d *delay) factor(class int) float64 {
	if b := d.factors[class].Load(); b != 0 {
		return float64(math.Float32frombits(b))
	}
	return 1
}

// err returns the mean error of predictions of that time in µs.
func (d *delay) err(micros float64) float64 {
	return micros * math.Float64frombits(d.share.Load())
}

func (d *delay) mean() (share float64, known bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.errs, d.count > 0
}

// learn adds a prompt that took µs.
func (d *delay) learn(x *expected, took float64) {
	if !(took > 0 && took < longest) {
		return
	}
	bin := int(math.Round(math.Log(took/x.micros)/perRatio)) - lowest
	bin = min(max(bin, 0), bins-1)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.count = min(d.count+1, errorMemory)
	d.errs += (min(math.Abs(took-x.said)/x.said, maxError) - d.errs) / float64(d.count)
	d.share.Store(math.Float64bits(d.errs))
	r := &d.ratios[x.class]
	if !d.begun[x.class] {
		d.begun[x.class] = true
		r[-lowest] = trust
	}
	for i := range r {
		r[i] *= fading
	}
	r[bin]++
	d.factors[x.class].Store(math.Float32bits(float32(densest(r))))
}

// densest returns the factor whose predictions are near most of the ratios: the middle of
// the best factors.
func densest(r *[bins]float64) float64 {
	var sums [bins]float64
	sum, most := 0.0, 0.0
	for i := range r {
		sum += r[i]
		if i > below+above {
			sum -= r[i-below-above-1]
		}
		sums[i] = sum
		most = max(most, sum)
	}
	at, n := 0.0, 0.0
	for i := below + above; i < bins; i++ {
		if sums[i] >= 0.998*most {
			at, n = at+float64(i), n+1
		}
	}
	return math.Exp((at/n - above + lowest) * perRatio)
}
