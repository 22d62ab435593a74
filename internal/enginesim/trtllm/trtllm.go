package trtllm

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TRTLLM is a trtllm-serve worker. Any role serves any request type. A context leg
// computes the prompt and one token, and its answer has the address of its KV. Only the
// fetch or a timeout frees the KV. A generation leg fetches the KV under the id in the
// context's answer, and replays the first tokens itself.
type TRTLLM struct {
	trtDialect
	e      *core.Engine
	cfg    core.TRTLLMConfig
	Events *trtEvents
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
	rank          *core.Rank
	tokens        int // of the prompt
	first         []core.Token
	cached        int
}

func New(e *core.Engine) *TRTLLM {
	t := &TRTLLM{e: e, cfg: e.Cfg.TRTLLM, Events: newTRTEvents(e), clock: steadyClock{epoch: time.Now()}, contexts: make(map[int64]*trtContext)}
	e.LogKV(t.Events, TRTNaming{}, false)
	return t
}

func (t *TRTLLM) Start() error { return nil }

// opContext fetches a context's KV.
const opContext = "context"

func (t *TRTLLM) Generate(ctx context.Context, s *core.Sequence, emit func(core.Token)) error {
	q := s.Req.Ext.(*TRTRequest)
	emit = t.timed(s, emit)
	ctx, stop := t.noticing(ctx)
	defer stop()
	s.Rank = t.e.PickRank(s.Req.Rank)
	defer s.Rank.Release(s)
	defer s.Rank.StoreTail(s)
	switch {
	case q.Is(typeContext):
		return t.context(ctx, s, q.Params, emit)
	case q.Is(TypeGeneration):
		return t.generation(ctx, s, q.Params, emit)
	}
	err := s.Rank.Reserve(ctx, s, core.Room(s), true)
	if err == nil {
		err = s.Rank.Prefill(ctx, s)
	}
	if err == nil {
		err = s.Rank.Decode(ctx, s, emit)
	}
	return err
}

// noticing returns ctx as the worker sees it. The worker notices a client that
// has left only at the next poll; the first poll is now. It notices the
// engine's own end at once.
func (t *TRTLLM) noticing(ctx context.Context) (context.Context, func()) {
	if ctx.Err() != nil {
		return ctx, func() {}
	}
	begin := time.Now()
	seen, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	unhook := context.AfterFunc(ctx, func() {
		wait := t.cfg.DisconnectPoll - time.Since(begin)%t.cfg.DisconnectPoll
		if err := core.Sleep(t.e.Ctx, wait); err != nil {
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
func (t *TRTLLM) context(ctx context.Context, s *core.Sequence, p *TRTParams, emit func(core.Token)) error {
	var id int64
	if p.disaggID != nil {
		id = *p.disaggID
	} else {
		id = t.localID.Add(1)
	}
	if p.style == generationFirst {
		if err := t.awaitSession(ctx, s.Rank, id); err != nil {
			return err
		}
	}
	s.Limit = 1
	err := s.Rank.Reserve(ctx, s, len(s.Prompt), true)
	if err == nil {
		err = s.Rank.Prefill(ctx, s)
	}
	if err == nil {
		err = s.Rank.Decode(ctx, s, emit)
	}
	if err != nil || s.Req.Fault == core.FailNoParams {
		return err
	}
	done := s.Finish != "length" && p.style == contextFirst
	s.Ext = t.answerParams(s, p, id, done)
	if !done {
		t.Publish(s, id)
	}
	return nil
}

// Publish pins the blocks under the transfer's id.
func (t *TRTLLM) Publish(s *core.Sequence, id int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for old, c := range t.contexts {
		if c.filled && c.rank.Pinned(contextKey(old)) == nil {
			delete(t.contexts, old) // timed out
		}
	}
	c := t.transfer(id)
	if c.filled {
		t.e.Stats.DuplicateIDs.Add(1)
	}
	s.Rank.StoreTail(s)
	s.Rank.Pin(s, contextKey(id), t.cfg.KVTransferTimeout)
	c.rank, c.tokens, c.first, c.cached = s.Rank, len(s.Prompt), s.Output, s.Cached
	if !c.filled {
		c.filled = true
		close(c.ready)
	}
}

func contextKey(id int64) string { return strconv.FormatInt(id, 10) }

// transfer returns the transfer of an id, and makes it if needed; mu is held.
func (t *TRTLLM) transfer(id int64) *trtContext {
	c := t.contexts[id]
	if c == nil {
		c = &trtContext{wanted: make(chan struct{}), ready: make(chan struct{})}
		t.contexts[id] = c
	}
	return c
}

// awaitSession blocks a context leg of a generation_first pair until the generation has
// requested the transfer.
func (t *TRTLLM) awaitSession(ctx context.Context, r *core.Rank, id int64) error {
	t.mu.Lock()
	c := t.transfer(id)
	t.mu.Unlock()
	limit := time.NewTimer(t.cfg.KVTransferTimeout)
	defer limit.Stop()
	return r.WaitLoading(func() error {
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
func (t *TRTLLM) forget(id int64, c *trtContext) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.contexts[id] == c && !c.filled {
		delete(t.contexts, id)
	}
}

func trtTransferError(format string, args ...any) *core.APIError {
	return &core.APIError{Status: http.StatusInternalServerError, Type: "InternalServerError", Message: "KV cache transfer failed: " + fmt.Sprintf(format, args...)}
}

// Message answers a generation worker that fetches a context. It waits until
// the context is ready. For an unknown id it gives up after the timeout.
func (t *TRTLLM) Message(ctx context.Context, _ *core.Rank, m core.SideMessage) (core.SideMessage, error) {
	id, err := strconv.ParseInt(m.Key, 10, 64)
	if err != nil || m.Op != opContext {
		return core.SideMessage{}, errors.New("unknown message")
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
	return core.SideMessage{}, err
}

// serve reads a ready context once and frees it.
func (t *TRTLLM) serve(id int64, c *trtContext) (core.SideMessage, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.contexts[id] == c {
		delete(t.contexts, id)
	}
	key := contextKey(id)
	blocks := c.rank.Pinned(key)
	if blocks == nil {
		return core.SideMessage{}, errors.New("context timed out")
	}
	payload := c.rank.ReadPinned(key, blocks[:c.rank.Cache.BlocksFor(c.tokens)])
	c.rank.Unpin(key)
	return core.SideMessage{Op: opContext, Payload: payload, Fields: map[string]string{
		"tokens": strconv.Itoa(c.tokens), "first": PackIDs(c.first), "cached": strconv.Itoa(c.cached),
	}}, nil
}

// generation runs a generation leg: reserve, fetch the context's KV, replay its
// first tokens, continue decoding.
func (t *TRTLLM) generation(ctx context.Context, s *core.Sequence, p *TRTParams, emit func(core.Token)) error {
	r := s.Rank
	if err := r.Reserve(ctx, s, core.Room(s), false); err != nil {
		return err
	}
	r.AwaitKV(s)
	var m core.SideMessage
	err := r.WaitLoading(func() (err error) {
		m, err = t.fetch(ctx, r, p)
		return err
	})
	r.ReceivedKV(s)
	if err != nil {
		return err
	}
	first, refusal := t.load(s, p, m)
	if refusal != nil {
		return refusal
	}
	s.Replay = first
	s.Ext = t.answerParams(s, p, *p.Key(), false)
	if err := r.AcquireSlot(ctx, s); err != nil {
		return err
	}
	return r.Decode(ctx, s, emit)
}

// fetchPause is the wait between two tries to reach a context worker.
const fetchPause = 50 * time.Millisecond

// fetch requests the KV from the context worker until the worker answers or the transfer
// times out. A restarted worker, a wrong id and an expired context have the same result:
// no answer.
func (t *TRTLLM) fetch(ctx context.Context, r *core.Rank, p *TRTParams) (core.SideMessage, error) {
	limit, cancel := context.WithTimeout(ctx, t.cfg.KVTransferTimeout)
	defer cancel()
	addr, engine := p.source()
	r.Side.SetUp(limit, addr, engine) // the check below notices a timeout
	for {
		m, err := r.Side.Call(limit, addr, core.SideMessage{Op: opContext, Engine: engine, Key: contextKey(*p.Key())})
		if err == nil {
			return m, nil
		}
		if core.Sleep(limit, fetchPause) == nil {
			continue
		}
		if ctx.Err() != nil {
			return m, context.Cause(ctx)
		}
		return m, trtTransferError("request %d timed out after %.1f s", *p.Key(), t.cfg.KVTransferTimeout.Seconds())
	}
}

// load stores the fetched KV after the blocks of the local prefix cache, and
// returns the first tokens.
func (t *TRTLLM) load(s *core.Sequence, p *TRTParams, m core.SideMessage) ([]core.Token, *core.APIError) {
	if s.Req.Fault == core.FailLoad {
		return nil, trtTransferError("simulated")
	}
	r := s.Rank
	blocks := s.Blocks[:r.Cache.BlocksFor(len(s.Prompt))]
	bytesPerBlock := r.Cache.Size * core.BytesPerKV
	if m.Fields["tokens"] != strconv.Itoa(len(s.Prompt)) || len(m.Payload) != len(blocks)*bytesPerBlock {
		return nil, trtTransferError("request %d: the context has %s prompt tokens, the generation %d", *p.Key(), m.Fields["tokens"], len(s.Prompt))
	}
	held := s.Computed / r.Cache.Size
	r.Store(blocks[held:], m.Payload[held*bytesPerBlock:])
	r.Loaded(s, len(s.Prompt))
	t.e.Stats.Transfers.Add(1)
	if p.style == contextFirst {
		if p.usage != nil {
			s.Cached = p.usage.cached
		}
		return p.first, nil
	}
	first, ferr := ParsePackedIDs(core.Fields{"first": fmt.Appendf(nil, "%q", m.Fields["first"])}, "first")
	cached, err := strconv.Atoi(m.Fields["cached"])
	if ferr != nil || err != nil || len(first) == 0 {
		return nil, trtTransferError("request %d: malformed auxiliary buffer", *p.Key())
	}
	s.Cached = cached
	return first, nil
}
