package predict

import (
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
// its prefill elsewhere, and the time of a token.
type Engine struct{ Prefill, Start, Token Model }

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

// Target is the prefill queue of one target, as far as predictions need it. Its zero value
// is empty.
type Target struct {
	requests  atomic.Int64
	tokens    atomic.Int64
	attention atomic.Int64
	since     atomic.Int64 // ns: from when the oldest request has been computed
}

// Prompt is the work of a prompt on a target.
type Prompt struct {
	Tokens int64 // of the prompt
	Cached int64 // of these, leading tokens whose KV the target holds
}

// work returns the tokens to compute, and the sum of their positions over 1024.
func (p Prompt) work() (tokens, attention int64) {
	cached := min(max(p.Cached, 0), max(p.Tokens-1, 0))
	tokens = max(p.Tokens-cached, 0)
	return tokens, (tokens * ((cached + p.Tokens) / 2)) >> 10
}

// Streams are the streams of a target.
type Streams struct{ Requests, Tokens int64 }

const (
	perTokens    = 1.0 / 1000
	perAttention = 1.0 / 10000
)

// prefill returns the features of a prompt behind the queue, and the time in µs for which
// the oldest request of the queue has been computed.
func (t *Target) prefill(p Prompt, streams Streams, now int64) (x Features, done float64) {
	requests := t.requests.Load()
	tokens, attention := p.work()
	x = Features{
		float64(requests + 1), float64(t.tokens.Load()+tokens) * perTokens,
		float64(t.attention.Load()+attention) * perAttention, float64(streams.Requests),
	}
	if requests > 0 {
		done = float64(max(0, now-t.since.Load())) / 1000
	}
	return x, done
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
		micros, wait := t.expect(f, p, streams, now.UnixNano())
		out.Prefill, out.PrefillError, out.Wait = float32(micros), float32(micros*f.err), float32(wait)
	}
	if roles&abi.RoleDecode == 0 {
		return out
	}
	if f := e.Start.fit.Load(); f != nil {
		x := start(p, streams)
		micros := f.of(&x)
		out.Start, out.StartError = float32(micros), float32(micros*f.err)
	}
	if f := e.Token.fit.Load(); f != nil {
		x := token(Streams{streams.Requests + 1, streams.Tokens + p.Tokens})
		micros := f.of(&x)
		out.Token, out.TokenError = float32(micros), float32(micros*f.err)
	}
	return out
}

// expect returns the expected time of a prompt in µs, and the part of it for the queue.
func (t *Target) expect(f *fit, p Prompt, streams Streams, now int64) (micros, wait float64) {
	tokens, attention := p.work()
	w := &f.weights
	alone := w[0] + w[1]*perTokens*float64(tokens) + w[2]*perAttention*float64(attention) + w[3]*float64(streams.Requests)
	if requests := t.requests.Load(); requests > 0 {
		done := float64(max(0, now-t.since.Load())) / 1000
		queue := w[0]*float64(requests) + w[1]*perTokens*float64(t.tokens.Load()) + w[2]*perAttention*float64(t.attention.Load())
		wait = max(0, queue-done)
	}
	return wait + alone, wait
}

// Prefill is a prompt in the queue of a target. Its methods are not safe for concurrent use.
type Prefill struct {
	t                 *Target
	e                 *Engine
	x                 Features
	done, said        float64
	tokens, attention int64
	began             int64
}

// Begin adds a prompt to the queue.
func (t *Target) Begin(e *Engine, p Prompt, streams Streams, now time.Time) *Prefill {
	at := now.UnixNano()
	k := &Prefill{t: t, e: e, began: at}
	k.tokens, k.attention = p.work()
	k.x, k.done = t.prefill(p, streams, at)
	if f := e.Prefill.fit.Load(); f != nil {
		k.said, _ = t.expect(f, p, streams, at)
	}
	if t.requests.Add(1) == 1 {
		t.since.Store(at)
	}
	t.tokens.Add(k.tokens)
	t.attention.Add(k.attention)
	return k
}

// Said returns the predicted time in µs; 0: none.
func (k *Prefill) Said() float64 { return k.said }

// Done removes the prompt after its prefill and learns from it.
func (k *Prefill) Done(now time.Time) {
	if k.t == nil {
		return
	}
	at := now.UnixNano()
	k.e.Prefill.Learn(&k.x, float64(at-k.began)/1000, k.done, k.said)
	k.t.since.Store(at)
	k.Drop()
}

// Drop removes the prompt without a sample, because its leg failed or ended early. Calls
// after Done or Drop do nothing.
func (k *Prefill) Drop() {
	if k.t == nil {
		return
	}
	k.t.requests.Add(-1)
	k.t.tokens.Add(-k.tokens)
	k.t.attention.Add(-k.attention)
	k.t = nil
}

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
	s.e.Start.Learn(&s.x, float64(took)/1000, 0, s.said)
}

// Streamed learns from a stream that took so long for a number of tokens after the first
// one. streams are those of its target at its end, including this stream.
func (e *Engine) Streamed(streams Streams, tokens int64, took time.Duration) {
	if tokens > 0 {
		x := token(streams)
		said, _ := e.Token.Predict(&x)
		e.Token.Learn(&x, float64(took)/1000/float64(tokens), 0, said)
	}
}
