// Package tokens converts the prompt of a request to the token ids that an engine will
// compute for it, so that its blocks can be looked up in the KV index. Ids come from
// the client, from an engine's tokenize endpoint, or from a local tokenizer file, in
// the configured order. If no source has them, the index works on text.
//
// Ids are a routing hint, unless they are exact: then the legs may have them in the place of the
// text. No failure here fails a request: a failure costs at most the time-out, and the [Result]
// names it.
//
// The body of a tokenize request consists of the client's bytes with some members removed
// or inserted; the prompt is not decoded. Building the request (ask.go) and reading the
// answer (answer.go) are pure; an [Asker] sends it.
//
// The decisions behind this package are in docs/design/placement.md.
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

// Source is a source of token ids. Its names are those of the configuration and of
// metric labels.
type Source uint8

// The sources; None is the source of a Result without ids.
const (
	None   Source = iota
	Client        // the request carries ids
	Engine        // an engine's tokenize endpoint
	Local         // a tokenizer file of this host
)

var sourceNames = [...]string{None: "none", Client: "client", Engine: "engine", Local: "local"}

func (s Source) String() string { return sourceNames[s] }

// ParseSource returns the source of a name other than "none".
func ParseSource(name string) (s Source, ok bool) {
	for i, n := range sourceNames {
		if n == name && i > 0 {
			return Source(i), true
		}
	}
	return None, false
}

// Reason is the reason why a request has no ids, as a metric label.
type Reason uint8

// The reasons.
const (
	OK          Reason = iota
	Unsupported        // no source can tokenize prompts of this form
	NoEngine           // no engine can be asked, or all of them are paused
	Busy               // too many tokenize requests are in progress
	TimedOut           // no answer within the time-out
	Refused            // the engine answered 4xx
	Failed             // the connection broke, or the engine answered 5xx
	BadAnswer          // the answer cannot be read
	Canceled           // the client has left
)

var reasonNames = [...]string{OK: "ok", Unsupported: "unsupported", NoEngine: "no_engine", Busy: "busy",
	TimedOut: "timeout", Refused: "refused", Failed: "failed", BadAnswer: "bad_answer", Canceled: "canceled"}

func (r Reason) String() string { return reasonNames[r] }

// Prompt is the input of Tokens. It is only read, and only while Tokens runs.
type Prompt struct {
	Request *openai.Request
	// IDs are token ids that the client sent outside the prompt, and that its engine
	// uses as the prompt; nil: none.
	IDs []uint32
	// Model is the model that serves the request, even if the body does not name it. It
	// selects the local tokenizer.
	Model string
	// Instances lists the instances to which requests may go, and must serve the Model.
	// The first answer counts.
	Instances []Instance
}

// Instance is an engine instance that can be asked.
type Instance struct {
	Name    string
	Dialect Dialect
}

// Result is the result of Tokens. IDs are shared with other requests: they must not be
// changed.
type Result struct {
	IDs    []uint32
	Source Source
	Cached bool // the ids were in the cache
	// Exact: an engine computes exactly these ids, because the client sent them, or
	// because the tokenize request contained every member that influences them.
	Exact  bool
	Reason Reason // why there are no ids; OK if there are ids
	// Instance is the engine that got the last tokenize request; "": none.
	Instance string
	// Err is the error of an engine or a tokenizer. It contains nothing of a prompt.
	Err error
}

// Asker sends one tokenize request to an engine.
type Asker interface {
	// Ask POSTs a JSON body to a path of an instance and returns its answer. An answer
	// longer than MaxAnswer bytes is an error. Errors are of the transport; an error
	// status is returned as status. Ask must be safe for concurrent use and end with
	// ctx.
	Ask(ctx context.Context, instance, path string, body []byte) (status int, answer []byte, err error)
}

// MaxAnswer bounds an answer in bytes: two million ids.
const MaxAnswer = 16 << 20

// Encoder is a local tokenizer. It is safe for concurrent use.
type Encoder interface {
	// Append appends the ids of text, which must be UTF-8. special: also append the
	// model's first and last tokens.
	Append(dst []uint32, text string, special bool) ([]uint32, error)
}

// defaultCacheTokens is the number of cached ids. With 4 bytes each the cache takes 16 MiB, and has
// the ids of 1000 prompts of 4096 tokens.
const defaultCacheTokens = 4 << 20

// Options configures a Tokenizer. Zero values mean the defaults named here.
type Options struct {
	Order       []Source           // tried in this order; nil: Client, Engine, Local
	Asker       Asker              // nil: no tokenize requests
	Local       map[string]Encoder // by model; "" serves every other
	LocalBytes  int                // longest prompt, as JSON bytes, that is encoded locally; 256 KiB
	Timeout     time.Duration      // for all tokenize requests of one request together; 250 ms
	Concurrency int                // concurrent tokenize requests; 64
	CacheTokens int                // cached ids, 4 bytes each; 0: defaultCacheTokens; < 0: none
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
	turn    atomic.Uint32 // spreads tokenize requests over instances
	bodies  sync.Pool     // *[]byte, bodies of tokenize requests that were not sent
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
		o.CacheTokens = defaultCacheTokens
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

// Tokens returns the ids of a prompt from the first source, in the configured order, that
// has them. It blocks at most for the time-out, and only for a request to an engine.
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

// Forget drops the state of an instance that left or restarted. All cached ids are
// dropped too, because an engine with another tokenizer may return under the same name.
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

// fromEngine returns ids from the cache or from an engine. If no instance answers one
// form of the request, it tries the next best form. After a broken answer it tries one
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
			case Unsupported: // the instance has no such endpoint
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

// question is one form of the tokenize request for a prompt.
type question struct {
	way  way
	key  xxh3.Uint128
	body []byte
}

// question builds a tokenize request. ids are the cached ids for it; then no engine
// needs to be asked.
func (t *Tokenizer) question(w way, p Prompt) (q question, ids []uint32) {
	room := t.bodies.Get().(*[]byte)
	body := w.appendBody((*room)[:0], p.Request)
	q = question{w, key(w, p.Model, body), body}
	if ids = t.cache.get(q.key); ids != nil {
		*room = body
		t.bodies.Put(room)
	}
	// Otherwise the body is not reused: the transport of an Asker that has returned may
	// still read it.
	return q, ids
}

// ask sends a tokenize request to one instance.
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
	t.pauses.note(instance, q.way, reason)
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
