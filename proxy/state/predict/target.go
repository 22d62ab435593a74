package predict

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// Target is the prefill queue of one target, as far as predictions need it. Its zero value
// is empty.
type Target struct {
	free  atomic.Int64 // ns: when the queue is computed
	opens atomic.Int64 // ns: when the last step of the queue begins; until then it accepts prompts
	room  atomic.Int64 // tokens that this step accepts

	mu       sync.Mutex
	requests int                // guarded by mu
	plans    [len(chunks)]steps // guarded by mu
}

// Prompt is the work of a prompt on a target.
type Prompt struct {
	Tokens int64 // of the prompt
	Cached int64 // of these, leading tokens whose KV the target holds
}

// maxTokens bounds the tokens of a prompt, so that no number makes a plan of endless steps.
const maxTokens = 1 << 24

// span returns the first token to compute, and their number.
func (p Prompt) span() (from, tokens int64) {
	all := min(max(p.Tokens, 0), maxTokens)
	from = min(max(p.Cached, 0), max(all-1, 0))
	return from, all - from
}

// Streams are the streams of a target.
type Streams struct{ Requests, Tokens int64 }

const (
	perTokens    = 1.0 / 1000
	perAttention = 1.0 / 20480000
)

// attention returns the sum of the positions of tokens, as a feature.
func attention(from, tokens int64) float64 {
	return float64(tokens) * float64(2*from+tokens) * perAttention
}

// start returns the features of the start of a stream of a prompt.
func start(p Prompt, streams Streams) Features {
	return Features{1, float64(max(0, p.Tokens-p.Cached)) * perTokens, float64(streams.Requests), float64(streams.Tokens) * perTokens}
}

// token returns the features of the time of a token of one of the streams.
func token(streams Streams) Features {
	return Features{1, float64(streams.Requests), float64(streams.Tokens) * perTokens}
}

// Predict returns the prediction for a prompt at the target of an engine of type e, for the
// phases in roles. It takes no lock and allocates nothing.
func (t *Target) Predict(e *Engine, roles abi.Role, p Prompt, streams Streams, now time.Time) (out abi.Prediction) {
	if f := e.Prefill.fit.Load(); f != nil && roles&abi.RolePrefill != 0 {
		x := t.expect(e, f, p, streams, now.UnixNano())
		err := e.delay.err(x.said)
		out.Prefill, out.PrefillError, out.Wait = float32(x.said), float32(err), float32(x.wait)
	}
	if roles&abi.RoleDecode == 0 {
		return out
	}
	if f := e.Start.fit.Load(); f != nil {
		x := start(p, streams)
		micros := f.weights.Of(&x)
		out.Start, out.StartError = float32(micros), float32(micros*f.err)
	}
	if f := e.Token.fit.Load(); f != nil {
		x := token(Streams{streams.Requests + 1, streams.Tokens + p.Tokens})
		micros := f.weights.Of(&x)
		out.Token, out.TokenError = float32(micros), float32(micros*f.err)
	}
	return out
}

// expected is what expect returns, in µs.
type expected struct {
	wait   float64 // for the queue
	micros float64 // to the end of the prompt, if no later prompt joins its last step
	said   float64 // the same with the usual delay by later prompts
	class  int     // of the time until the last step begins; see delay
}

// expect returns the expected times of a prompt.
func (t *Target) expect(e *Engine, f *fit, p Prompt, streams Streams, now int64) (x expected) {
	from, tokens := p.span()
	w := &f.weights
	once := w[0] + w[3]*float64(streams.Requests)
	rest, until := tokens, int64(0)
	if free := t.free.Load(); free > now {
		x.wait = float64(free-now) / 1000
		if until = t.opens.Load() - now; until > 0 {
			rest -= t.room.Load()
		}
	}
	x.micros = x.wait + once + w[1]*perTokens*float64(tokens) + w[2]*attention(from, tokens)
	begins := float64(until) / 1000
	if rest > 0 {
		// The prompt's last tokens are in a step of their own.
		begins = x.wait
		if chunk := chunks[e.chunk.Load()]; chunk > 0 && rest > chunk {
			early := tokens - ((rest-1)&(chunk-1) + 1)
			begins += once + w[1]*perTokens*float64(early) + w[2]*attention(from, early)
		}
	}
	x.class = classOf(begins)
	if x.said = x.micros * e.delay.factor(x.class); x.said < x.wait {
		x.said = x.wait
	}
	return x
}

// classOf returns the class of a time in µs that is not negative: its order of magnitude,
// base 2.
func classOf(micros float64) int { return min(bits.Len64(uint64(micros*(1.0/512))), classes-1) }

// Prefill is a prompt in the queue of a target. Its methods are not safe for concurrent use.
type Prefill struct {
	t        *Target
	e        *Engine
	expected expected
	began    int64
	steps    [len(chunks)]int64 // number of the step that computes the last token, in each plan
}

// Begin adds a prompt to the queue.
func (t *Target) Begin(e *Engine, p Prompt, streams Streams, now time.Time) *Prefill {
	at := now.UnixNano()
	k := &Prefill{t: t, e: e, began: at}
	var w Features
	if f := e.Prefill.fit.Load(); f != nil {
		w = f.weights
		k.expected = t.expect(e, f, p, streams, at)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.requests++
	for i := range t.plans {
		k.steps[i] = t.plans[i].add(chunks[i], p, streams, &w, at)
	}
	t.publish(e)
	return k
}

// publish writes the plan of the engine's chunk size for readers without a lock. t.mu is
// held.
func (t *Target) publish(e *Engine) {
	free, opens, room := t.plans[e.chunk.Load()].last()
	t.free.Store(free)
	t.opens.Store(opens)
	t.room.Store(room)
}

// Said returns the predicted time in µs; 0: none.
func (k *Prefill) Said() float64 { return k.expected.said }

// Done removes the prompt after its prefill and learns from it.
func (k *Prefill) Done(now time.Time) {
	if k.t == nil {
		return
	}
	at := now.UnixNano()
	took := max(at-k.began, 1)
	var (
		off    [len(chunks)]float64
		sample Features
		micros float64
	)
	k.t.mu.Lock()
	chosen := int(k.e.chunk.Load())
	for i := range k.t.plans {
		x, since, end := k.t.plans[i].done(k.steps[i], at)
		off[i] = min(abs(float64(at-end))/float64(took), 1)
		if i == chosen {
			sample, micros = x, float64(since)/1000
		}
	}
	k.leave()
	k.t = nil
	k.e.learn(&sample, micros, off[:])
	if k.expected.micros > 0 {
		k.e.delay.learn(&k.expected, float64(took)/1000)
	}
}

// leave removes the prompt from the queue and unlocks its target.
func (k *Prefill) leave() {
	t := k.t
	if t.requests--; t.requests == 0 {
		for i := range t.plans {
			t.plans[i].clear()
		}
	}
	t.publish(k.e)
	t.mu.Unlock()
}

// Drop removes the prompt without a sample, because its leg failed or ended early. Calls
// after Done or Drop do nothing.
func (k *Prefill) Drop() {
	if k.t == nil {
		return
	}
	k.t.mu.Lock()
	for i := range k.t.plans {
		k.t.plans[i].drop(k.steps[i])
	}
	k.leave()
	k.t = nil
}

func abs(x float64) float64 { return max(x, -x) }
