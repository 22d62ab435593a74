// Package tokens turns the prompt of a request into the token ids that an
// engine will compute for it, so that its blocks can be looked up in the KV
// index. Ids come from the client, from an engine's own tokenize endpoint, or
// from a local tokenizer file, in the order of the configuration; where none
// has them, the index works on text.
//
// Ids are a routing hint. Nothing here is sent on with the request, and no
// failure here fails one: whatever goes wrong costs at most the time-out and
// is named in the [Result].
//
// What an endpoint is asked is the client's bytes with some members cut out or
// put in; the prompt is not decoded. Shaping the question (ask.go) and reading
// the answer (answer.go) are pure; sending it is the business of an [Asker].
package tokens

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Source is where token ids come from. The names are those of the
// configuration and of metric labels.
type Source uint8

// The sources; None is a Result without ids.
const (
	None   Source = iota
	Client        // the request carries ids
	Engine        // an engine's tokenize endpoint
	Local         // a tokenizer file of this host
)

var sourceNames = [...]string{None: "none", Client: "client", Engine: "engine", Local: "local"}

func (s Source) String() string { return sourceNames[s] }

// ParseSource gives the source of a name other than "none".
func ParseSource(name string) (s Source, ok bool) {
	for i, n := range sourceNames {
		if n == name && i > 0 {
			return Source(i), true
		}
	}
	return None, false
}

// Reason says why a request has no ids, for a metric label.
type Reason uint8

// The reasons.
const (
	OK          Reason = iota
	Unsupported        // no source knows prompts of this form
	NoEngine           // no engine that could be asked, or all of them are paused
	Busy               // too many questions are under way
	TimedOut           // no answer within the time-out
	Refused            // the engine answered 4xx
	Failed             // the connection broke, or the engine answered 5xx
	BadAnswer          // the answer cannot be read
	Canceled           // the client left
)

var reasonNames = [...]string{OK: "ok", Unsupported: "unsupported", NoEngine: "no_engine", Busy: "busy",
	TimedOut: "timeout", Refused: "refused", Failed: "failed", BadAnswer: "bad_answer", Canceled: "canceled"}

func (r Reason) String() string { return reasonNames[r] }

// Prompt is what is to be turned into ids. It is only read while Tokens runs.
type Prompt struct {
	Request *openai.Request
	// IDs are token ids that the client sent elsewhere than in the prompt
	// itself, and that its engine takes for the prompt; nil: none.
	IDs []uint32
	// Model is the model that serves the request, whether or not the body
	// names it; it chooses the local tokenizer.
	Model string
	// Instances can be asked; the first that answers counts. They serve the
	// Model.
	Instances []Instance
}

// Instance is an engine instance that can be asked.
type Instance struct {
	Name    string
	Dialect Dialect
}

// Result is what Tokens found. IDs are shared with other requests: they must
// not be changed.
type Result struct {
	IDs    []uint32
	Source Source
	Cached bool // the answer to an equal question was at hand
	// Exact says that an engine computes just these ids: it was sent them, or it
	// was asked in a form in which nothing is left out that shapes them.
	Exact  bool
	Reason Reason // why there are no ids; OK if there are
	// Instance is the engine that was asked last; "" if none was.
	Instance string
	// Err tells more where an engine or a tokenizer failed. It holds nothing
	// of a prompt.
	Err error
}

// Asker sends one question to an engine.
type Asker interface {
	// Ask POSTs a JSON body to a path of an instance and gives its answer,
	// read up to MaxAnswer bytes; longer ones are an error. An error is one of
	// transport, not a status. It may run in several goroutines at once and
	// gives up when ctx ends.
	Ask(ctx context.Context, instance, path string, body []byte) (status int, answer []byte, err error)
}

// MaxAnswer is the longest answer in bytes that is worth reading: two million
// ids.
const MaxAnswer = 16 << 20

// Encoder is a local tokenizer. It is safe for concurrent use.
type Encoder interface {
	// Append appends the ids of text, which is UTF-8; special says whether the
	// model's own first and last tokens are put around them.
	Append(dst []uint32, text string, special bool) ([]uint32, error)
}

// Options shape a Tokenizer; zero values stand for the defaults named.
type Options struct {
	Order       []Source           // tried in this order; nil: Client, Engine, Local
	Asker       Asker              // nil: no engine is asked
	Local       map[string]Encoder // by model; "" serves every other
	LocalBytes  int                // longest prompt, as JSON, that is encoded here; 256 KiB
	Timeout     time.Duration      // for all questions of one request together; 250 ms
	Concurrency int                // questions under way at once; 64
	CacheTokens int                // ids kept for equal questions, 4 bytes each; 4 Mi; < 0: none
}

// Tokenizer finds token ids. It is safe for concurrent use, starts no
// goroutine and holds nothing to close.
type Tokenizer struct {
	order   []Source
	asker   Asker
	local   map[string]Encoder
	most    int // bytes of a prompt for a local tokenizer
	timeout time.Duration
	slots   chan struct{}
	cache   cache
	pauses  pauses
	turn    atomic.Uint32 // spreads questions over instances
	bodies  sync.Pool     // *[]byte, of questions that were not sent
}

// New builds a Tokenizer.
func New(o Options) *Tokenizer {
	if o.Order == nil {
		o.Order = []Source{Client, Engine, Local}
	}
	if o.LocalBytes == 0 {
		o.LocalBytes = 256 << 10
	}
	if o.Timeout == 0 {
		o.Timeout = 250 * time.Millisecond
	}
	if o.Concurrency == 0 {
		o.Concurrency = 64
	}
	if o.CacheTokens == 0 {
		o.CacheTokens = 4 << 20
	}
	return &Tokenizer{
		order:   o.Order,
		asker:   o.Asker,
		local:   o.Local,
		most:    o.LocalBytes,
		timeout: o.Timeout,
		slots:   make(chan struct{}, o.Concurrency),
		cache:   cache{limit: max(o.CacheTokens, 0)},
		bodies:  sync.Pool{New: func() any { return new([]byte) }},
	}
}

// Tokens finds the ids of a prompt, from the first source in order that has
// them. It blocks no longer than the time-out, and not at all where no engine
// is asked.
func (t *Tokenizer) Tokens(ctx context.Context, p Prompt) Result {
	miss := Result{Reason: Unsupported}
	for _, source := range t.order {
		var r Result
		switch source {
		case Client:
			r = fromClient(p)
		case Engine:
			r = t.fromEngine(ctx, p)
		case Local:
			r = t.fromLocal(p)
		}
		if len(r.IDs) > 0 {
			r.Source = source
			r.Exact = r.Exact || source == Client
			return r
		}
		if r.Reason != Unsupported || r.Err != nil {
			miss = r
		}
	}
	return miss
}

// Forget drops what is known of an instance, because it left or restarted. All
// cached ids go with it: another tokenizer may come back under the same name.
func (t *Tokenizer) Forget(instance string) {
	t.pauses.forget(instance)
	t.cache.clear()
}

func fromClient(p Prompt) Result {
	if len(p.IDs) > 0 {
		return Result{IDs: p.IDs}
	}
	ids, err := p.Request.AppendTokenIDs(nil)
	if err != nil {
		return Result{Reason: Unsupported}
	}
	return Result{IDs: ids}
}

func (t *Tokenizer) fromLocal(p Prompt) Result {
	encoder, ok := t.local[p.Model]
	if !ok {
		encoder = t.local[""]
	}
	raw, plain := plainText(p.Request)
	if encoder == nil || !plain || len(raw) > t.most {
		return Result{Reason: Unsupported}
	}
	dialect := NoTokenizer
	if len(p.Instances) > 0 {
		dialect = p.Instances[0].Dialect
	}
	around, ok := special(dialect, p.Request)
	if !ok {
		return Result{Reason: Unsupported}
	}
	text, ok := openai.String(raw)
	if !ok {
		return Result{Reason: Unsupported}
	}
	ids, err := encoder.Append(make([]uint32, 0, len(text)/3+8), text, around)
	if err != nil {
		return Result{Reason: Failed, Err: fmt.Errorf("encode prompt: %w", err)}
	}
	return Result{IDs: ids}
}

// fromEngine asks for ids, after a look at the cache. Where no instance answers
// a question the next best form of it is tried; one that broke is put to one
// more instance.
func (t *Tokenizer) fromEngine(ctx context.Context, p Prompt) Result {
	switch {
	case t.asker == nil:
		return Result{Reason: Unsupported}
	case len(p.Instances) == 0:
		return Result{Reason: NoEngine}
	}
	miss := Result{Reason: Unsupported}
	now := time.Now()
	start, broke := t.turn.Add(1), 0
	for w := way(1); w < ways; w++ {
		speaks := func(i Instance) bool { return i.Dialect == w.dialect() }
		if !slices.ContainsFunc(p.Instances, speaks) || !w.suits(p.Request) {
			continue
		}
		q, ids := t.question(w, p)
		if ids != nil {
			return Result{IDs: ids, Cached: true, Exact: w.exact()}
		}
		for i := range p.Instances {
			instance := p.Instances[(int(start%uint32(len(p.Instances)))+i)%len(p.Instances)]
			if !speaks(instance) {
				continue
			}
			if t.pauses.paused(instance.Name, w, now) {
				if miss.Reason == Unsupported {
					miss.Reason = NoEngine
				}
				continue
			}
			if miss = t.ask(ctx, now.Add(t.timeout), instance.Name, q); len(miss.IDs) > 0 {
				miss.Exact = w.exact()
				return miss
			}
			switch miss.Reason {
			case Unsupported: // it has no such endpoint
			case Failed, BadAnswer:
				if broke++; broke == 2 {
					return miss
				}
			default:
				return miss
			}
		}
	}
	return miss
}

// question is a form of it, shaped for a request.
type question struct {
	way  way
	key  xxh3.Uint128
	body []byte
}

// question shapes a question; ids are those that the cache has for it, and then
// there is nothing to ask.
func (t *Tokenizer) question(w way, p Prompt) (q question, ids []uint32) {
	room := t.bodies.Get().(*[]byte)
	body := w.appendBody((*room)[:0], p.Request)
	q = question{w, key(w, p.Model, body), body}
	if ids = t.cache.get(q.key); ids != nil {
		*room = body
		t.bodies.Put(room)
	}
	// Else the body is not used again: the transport of an Asker that gave up
	// may still read it.
	return q, ids
}

// ask puts a question to one instance.
func (t *Tokenizer) ask(ctx context.Context, deadline time.Time, instance string, q question) Result {
	select {
	case t.slots <- struct{}{}:
		defer func() { <-t.slots }()
	default:
		return Result{Reason: Busy, Instance: instance}
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	status, answer, err := t.asker.Ask(ctx, instance, q.way.path(), q.body)
	var ids []uint32
	if err == nil {
		ids, err = q.way.readAnswer(status, answer)
	}
	reason := OK
	if err != nil {
		reason, err = reasonOf(ctx, err), fmt.Errorf("ask %s for %s: %w", instance, q.way.path(), err)
	} else {
		t.cache.put(q.key, ids)
	}
	t.pauses.note(instance, q.way, reason, time.Now())
	return Result{IDs: ids, Reason: reason, Instance: instance, Err: err}
}

func reasonOf(ctx context.Context, err error) Reason {
	var s *statusError
	switch {
	case errors.As(err, &s):
		return s.reason()
	case errors.Is(err, errVersion):
		return Unsupported
	case errors.Is(err, errAnswer):
		return BadAnswer
	case errors.Is(ctx.Err(), context.DeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return TimedOut
	case ctx.Err() != nil:
		return Canceled
	}
	return Failed
}
