package enginesim

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// trtllm is a trtllm-serve worker. Any role serves any request type. A context leg
// computes the prompt and one token, and its answer has the address of its KV. Only the
// fetch or a timeout frees the KV. A generation leg fetches the KV under the id in the
// context's answer, and replays the first tokens itself.
type trtllm struct {
	trtDialect
	e      *Engine
	cfg    TRTLLMConfig
	events *trtEvents
	clock  steadyClock

	// localID counts the worker's own request ids.
	localID atomic.Int64

	mu sync.Mutex
	// contexts are the transfers of this worker's KV by id: ready ones, and
	// ones for which a generation already waits.
	contexts map[int64]*trtContext
}

// trtContext is one transfer on the context side. Its fields are guarded by
// trtllm.mu.
type trtContext struct {
	// wanted is closed when a generation has requested the transfer (its receive
	// session). ready is closed when the KV can be read.
	wanted, ready chan struct{}
	asked, filled bool
	rank          *rank
	tokens        int // of the prompt
	first         []token
	cached        int
}

func newTRTLLM(e *Engine) *trtllm {
	t := &trtllm{e: e, cfg: e.cfg.TRTLLM, events: newTRTEvents(e), clock: steadyClock{epoch: time.Now()}, contexts: make(map[int64]*trtContext)}
	e.logKV(t.events, trtNaming{}, false)
	return t
}

func (t *trtllm) start() error { return nil }

// opContext fetches a context's KV.
const opContext = "context"

func (t *trtllm) generate(ctx context.Context, s *sequence, emit func(token)) error {
	q := s.req.Ext.(*trtRequest)
	emit = t.timed(s, emit)
	ctx, stop := t.noticing(ctx)
	defer stop()
	s.rank = t.e.pickRank(s.req.Rank)
	defer s.rank.release(s)
	defer s.rank.storeTail(s)
	switch {
	case q.is(typeContext):
		return t.context(ctx, s, q.params, emit)
	case q.is(typeGeneration):
		return t.generation(ctx, s, q.params, emit)
	}
	err := s.rank.reserve(ctx, s, room(s), true)
	if err == nil {
		err = s.rank.prefill(ctx, s)
	}
	if err == nil {
		err = s.rank.decode(ctx, s, emit)
	}
	return err
}

// noticing returns ctx as the worker sees it. The worker notices a client that
// has left only at the next poll; the first poll is now. It notices the
// engine's own end at once.
func (t *trtllm) noticing(ctx context.Context) (context.Context, func()) {
	if ctx.Err() != nil {
		return ctx, func() {}
	}
	begin := time.Now()
	seen, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	unhook := context.AfterFunc(ctx, func() {
		wait := t.cfg.DisconnectPoll - time.Since(begin)%t.cfg.DisconnectPoll
		if err := sleep(t.e.ctx, wait); err != nil {
			cancel(err)
			return
		}
		cancel(context.Cause(ctx))
	})
	return seen, func() { unhook(); cancel(nil) }
}

// context runs a context leg: prefill and one token. Then the blocks stay until
// they are fetched or the transfer times out. If the first token ends the
// answer, nothing is left to fetch.
func (t *trtllm) context(ctx context.Context, s *sequence, p *trtParams, emit func(token)) error {
	var id int64
	if p.disaggID != nil {
		id = *p.disaggID
	} else {
		id = t.localID.Add(1)
	}
	if p.style == generationFirst {
		if err := t.awaitSession(ctx, s.rank, id); err != nil {
			return err
		}
	}
	s.limit = 1
	err := s.rank.reserve(ctx, s, len(s.prompt), true)
	if err == nil {
		err = s.rank.prefill(ctx, s)
	}
	if err == nil {
		err = s.rank.decode(ctx, s, emit)
	}
	if err != nil || s.req.fault == failNoParams {
		return err
	}
	done := s.finish != "length" && p.style == contextFirst
	s.ext = t.answerParams(s, p, id, done)
	if !done {
		t.publish(s, id)
	}
	return nil
}

// publish pins the blocks under the transfer's id.
func (t *trtllm) publish(s *sequence, id int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for old, c := range t.contexts {
		if c.filled && c.rank.pinned(contextKey(old)) == nil {
			delete(t.contexts, old) // timed out
		}
	}
	c := t.transfer(id)
	if c.filled {
		t.e.stats.duplicateIDs.Add(1)
	}
	s.rank.storeTail(s)
	s.rank.pin(s, contextKey(id), t.cfg.KVTransferTimeout)
	c.rank, c.tokens, c.first, c.cached = s.rank, len(s.prompt), s.output, s.cached
	if !c.filled {
		c.filled = true
		close(c.ready)
	}
}

func contextKey(id int64) string { return strconv.FormatInt(id, 10) }

// transfer returns the transfer of an id, and makes it if needed; mu is held.
func (t *trtllm) transfer(id int64) *trtContext {
	c := t.contexts[id]
	if c == nil {
		c = &trtContext{wanted: make(chan struct{}), ready: make(chan struct{})}
		t.contexts[id] = c
	}
	return c
}

// awaitSession blocks a context leg of a generation_first pair until the generation has
// requested the transfer.
func (t *trtllm) awaitSession(ctx context.Context, r *rank, id int64) error {
	t.mu.Lock()
	c := t.transfer(id)
	t.mu.Unlock()
	limit := time.NewTimer(t.cfg.KVTransferTimeout)
	defer limit.Stop()
	return r.waitLoading(func() error {
		select {
		case <-c.wanted:
			return nil
		case <-limit.C:
			t.forget(id, c)
			return trtTransferError("no generation has asked for request %d", id)
		case <-ctx.Done():
			t.forget(id, c)
			return context.Cause(ctx)
		}
	})
}

// forget removes a transfer that did not happen.
func (t *trtllm) forget(id int64, c *trtContext) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.contexts[id] == c && !c.filled {
		delete(t.contexts, id)
	}
}

func trtTransferError(format string, args ...any) *apiError {
	return &apiError{Status: http.StatusInternalServerError, Type: "InternalServerError", Message: "KV cache transfer failed: " + fmt.Sprintf(format, args...)}
}

// message answers a generation worker that fetches a context. It waits until
// the context is ready. For an unknown id it gives up after the timeout.
func (t *trtllm) message(ctx context.Context, _ *rank, m sideMessage) (sideMessage, error) {
	id, err := strconv.ParseInt(m.Key, 10, 64)
	if err != nil || m.Op != opContext {
		return sideMessage{}, errors.New("unknown message")
	}
	t.mu.Lock()
	c := t.transfer(id)
	if !c.asked {
		c.asked = true
		close(c.wanted)
	}
	t.mu.Unlock()
	limit := time.NewTimer(t.cfg.KVTransferTimeout)
	defer limit.Stop()
	select {
	case <-c.ready:
		return t.serve(id, c)
	case <-limit.C:
		err = errors.New("no such context")
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	t.forget(id, c)
	return sideMessage{}, err
}

// serve reads a ready context once and frees it.
func (t *trtllm) serve(id int64, c *trtContext) (sideMessage, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.contexts[id] == c {
		delete(t.contexts, id)
	}
	key := contextKey(id)
	blocks := c.rank.pinned(key)
	if blocks == nil {
		return sideMessage{}, errors.New("context timed out")
	}
	payload := c.rank.readPinned(key, blocks[:c.rank.cache.blocksFor(c.tokens)])
	c.rank.unpin(key)
	return sideMessage{Op: opContext, Payload: payload, Fields: map[string]string{
		"tokens": strconv.Itoa(c.tokens), "first": packIDs(c.first), "cached": strconv.Itoa(c.cached),
	}}, nil
}

// generation runs a generation leg: reserve, fetch the context's KV, replay its
// first tokens, continue decoding.
func (t *trtllm) generation(ctx context.Context, s *sequence, p *trtParams, emit func(token)) error {
	r := s.rank
	if err := r.reserve(ctx, s, room(s), false); err != nil {
		return err
	}
	r.awaitKV(s)
	var m sideMessage
	err := r.waitLoading(func() (err error) {
		m, err = t.fetch(ctx, r, p)
		return err
	})
	r.receivedKV(s)
	if err != nil {
		return err
	}
	first, refusal := t.load(s, p, m)
	if refusal != nil {
		return refusal
	}
	s.replay = first
	s.ext = t.answerParams(s, p, *p.key(), false)
	if err := r.acquireSlot(ctx, s); err != nil {
		return err
	}
	return r.decode(ctx, s, emit)
}

// fetchPause is the wait between two tries to reach a context worker.
const fetchPause = 50 * time.Millisecond

// fetch requests the KV from the context worker until the worker answers or the transfer
// times out. A restarted worker, a wrong id and an expired context have the same result:
// no answer.
func (t *trtllm) fetch(ctx context.Context, r *rank, p *trtParams) (sideMessage, error) {
	limit, cancel := context.WithTimeout(ctx, t.cfg.KVTransferTimeout)
	defer cancel()
	addr, engine := p.source()
	r.side.setUp(limit, addr, engine) // the check below notices a timeout
	for {
		m, err := r.side.call(limit, addr, sideMessage{Op: opContext, Engine: engine, Key: contextKey(*p.key())})
		if err == nil {
			return m, nil
		}
		if sleep(limit, fetchPause) == nil {
			continue
		}
		if ctx.Err() != nil {
			return m, context.Cause(ctx)
		}
		return m, trtTransferError("request %d timed out after %.1f s", *p.key(), t.cfg.KVTransferTimeout.Seconds())
	}
}

// load stores the fetched KV after the blocks of the local prefix cache, and
// returns the first tokens.
func (t *trtllm) load(s *sequence, p *trtParams, m sideMessage) ([]token, *apiError) {
	if s.req.fault == failLoad {
		return nil, trtTransferError("simulated")
	}
	r := s.rank
	blocks := s.blocks[:r.cache.blocksFor(len(s.prompt))]
	bytesPerBlock := r.cache.size * bytesPerKV
	if m.Fields["tokens"] != strconv.Itoa(len(s.prompt)) || len(m.Payload) != len(blocks)*bytesPerBlock {
		return nil, trtTransferError("request %d: the context has %s prompt tokens, the generation %d", *p.key(), m.Fields["tokens"], len(s.prompt))
	}
	held := s.computed / r.cache.size
	r.store(blocks[held:], m.Payload[held*bytesPerBlock:])
	r.loaded(s, len(s.prompt))
	t.e.stats.transfers.Add(1)
	if p.style == contextFirst {
		if p.usage != nil {
			s.cached = p.usage.cached
		}
		return p.first, nil
	}
	first, ferr := parsePackedIDs(fields{"first": fmt.Appendf(nil, "%q", m.Fields["first"])}, "first")
	cached, err := strconv.Atoi(m.Fields["cached"])
	if ferr != nil || err != nil || len(first) == 0 {
		return nil, trtTransferError("request %d: malformed auxiliary buffer", *p.key())
	}
	s.cached = cached
	return first, nil
}
