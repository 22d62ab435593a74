package core

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Sequence is one prompt in work: a request has len(prompts) * n sequences. Its
// fields belong to the goroutine that runs generate, except where a comment
// says otherwise.
type Sequence struct {
	Req *Request
	// Choice is the index of the answer's choice; prompt p, sample j has
	// choice p*n+j. sample is j.
	Choice, Sample int
	Prompt         []Token
	// ID is the engine's internal request id; protocols set it.
	ID string
	// Rank runs the sequence.
	Rank *Rank
	// adapter is its LoRA adapter; "": none.
	adapter string

	// Blocks hold the KV; set by reserve, guarded by rank.mu.
	Blocks []BlockID
	// Computed is the number of leading tokens whose KV is in blocks. A
	// protocol raises it after a transfer (see rank.loaded).
	Computed int
	// CachedLocal is the prefix hit in tokens, external the tokens that
	// transfers brought (set by loaded), cached the cached_tokens of usage:
	// reserve sets it to the hit, and a protocol may change it.
	CachedLocal, external, Cached int
	// Limit is the number of output tokens after which decode stops with
	// "length"; from the request, lowered by a protocol for a prefill leg.
	Limit int
	// Replay are output tokens that decode emits first instead of sampling them
	// (first tokens that came from prefill).
	Replay []Token
	Output []Token
	// Finish is the finish reason once generate has returned nil: "stop" or
	// "length". StopReason is the matched stop string or token id, or nil.
	Finish     string
	StopReason any
	// Ext is the protocol's own state of the sequence.
	Ext any
	// EcParams are vLLM's ec_transfer_params of its answer.
	EcParams any

	eosAt     int  // output token number that is the end of sequence; 0: none
	split     bool // see splitMark
	Script    Script
	published int  // number of blocks in the prefix cache
	parent    Link // the last of them
	slot      bool // holds a running slot; guarded by rank.mu
	Text      textBuffer
}

// tokens returns the prompt followed by the decoded tokens.
func (s *Sequence) tokens() []Token { return slices.Concat(s.Prompt, s.Output) }

// waiter is a sequence in a rank's queue.
type waiter struct {
	s       *Sequence
	tokens  int  // room needed; 0 when only a slot is wanted
	slot    bool // also wants a slot
	granted chan struct{}
}

// Rank is one data-parallel rank: a KV cache, running slots, a queue and a
// side channel. Safe for concurrent use.
type Rank struct {
	Engine *Engine
	Index  int
	Side   *sideChannel

	Mu       sync.Mutex
	Cache    *KVCache
	queue    []*waiter // in order of arrival
	resume   []*waiter // already hold their blocks and need only a slot; served first
	running  int
	adapters map[string]int // running sequences by LoRA adapter
	loading  int            // sequences that wait for a transfer
}

// pump grants all possible waits, in order. The caller holds mu.
func (r *Rank) pump() {
	r.grant()
	r.announce()
}

func (r *Rank) grant() {
	if r.Engine.Sleeper.paused.Load() {
		return
	}
	for i := 0; i < len(r.resume) && r.running < r.Engine.Cfg.MaxRunning; {
		w := r.resume[i]
		if !r.fitsAdapter(w.s) {
			i++
			continue
		}
		r.resume = slices.Delete(r.resume, i, i+1)
		r.running++
		w.s.slot = true
		r.runAdapter(w.s, 1)
		close(w.granted)
	}
	for i := 0; i < len(r.queue); {
		w := r.queue[i]
		if w.slot && r.running >= r.Engine.Cfg.MaxRunning {
			return
		}
		if w.slot && !r.fitsAdapter(w.s) {
			i++
			continue
		}
		want := r.Cache.BlocksFor(w.tokens)
		hit := r.Cache.Match(w.s.CacheKey(), w.s.Prompt)
		if len(hit) > want {
			hit = hit[:want]
		}
		if !r.Cache.Fits(hit, want) {
			return
		}
		r.queue = slices.Delete(r.queue, i, i+1)
		s := w.s
		s.Blocks = r.Cache.Take(hit, want)
		s.Computed = len(hit) * r.Cache.Size
		s.CachedLocal, s.Cached = s.Computed, s.Computed
		s.published, s.parent = r.Cache.Publish(s.Blocks, s.Prompt[:s.Computed], 0, r.Cache.Root(s.CacheKey()))
		if w.slot {
			r.running++
			s.slot = true
			r.runAdapter(s, 1)
		}
		close(w.granted)
	}
}

// wait queues w and blocks until it is granted or ctx ends. When ctx ends the
// sequence leaves the queue; release frees a grant of the meantime.
func (r *Rank) wait(ctx context.Context, list *[]*waiter, w *waiter) error {
	r.Mu.Lock()
	*list = append(*list, w)
	r.pump()
	r.Mu.Unlock()
	select {
	case <-w.granted:
		return ctx.Err()
	case <-ctx.Done():
	}
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if i := slices.Index(*list, w); i >= 0 {
		*list = slices.Delete(*list, i, i+1)
		r.pump()
	}
	return context.Cause(ctx)
}

// Reserve waits until blocks for tokens (prompt and answer) are free and gives
// them to the sequence; with slot it also takes a running slot. The caller must
// `defer r.release(s)` first, because the grant and the client's leaving may
// coincide. Leading blocks may be prefix hits: s.computed is their number of
// tokens. A sequence that never fits gets ErrTooLarge. reserve takes blocks for
// the whole answer at once, so that a running sequence is never preempted.
func (r *Rank) Reserve(ctx context.Context, s *Sequence, tokens int, slot bool) error {
	if r.Cache.BlocksFor(tokens) > len(r.Cache.Blocks) {
		return ErrTooLarge
	}
	s.Rank = r
	return r.wait(ctx, &r.queue, &waiter{s: s, tokens: tokens, slot: slot, granted: make(chan struct{})})
}

// AcquireSlot waits for a running slot for a sequence that holds its blocks.
func (r *Rank) AcquireSlot(ctx context.Context, s *Sequence) error {
	return r.wait(ctx, &r.resume, &waiter{s: s, slot: true, granted: make(chan struct{})})
}

// ReleaseSlot releases the running slot and keeps the blocks. Without a slot it
// does nothing.
func (r *Rank) ReleaseSlot(s *Sequence) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if s.slot {
		s.slot = false
		r.runAdapter(s, -1)
		r.running--
		r.pump()
	}
}

// Release frees the slot and the blocks of a sequence. Its computed blocks stay
// in the prefix cache. It may be called again.
func (r *Rank) Release(s *Sequence) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if s.slot {
		s.slot = false
		r.runAdapter(s, -1)
		r.running--
	}
	r.Cache.Drop(s.Blocks)
	s.Blocks = nil
	r.pump()
}

// WaitLoading runs fn, which waits for a transfer, and counts the sequence as
// waiting during it.
func (r *Rank) WaitLoading(fn func() error) error {
	r.Mu.Lock()
	r.loading++
	r.Mu.Unlock()
	defer func() {
		r.Mu.Lock()
		r.loading--
		r.Mu.Unlock()
	}()
	return fn()
}

// Loaded records that a transfer has filled the KV of the prompt from s.computed
// to computed tokens.
func (r *Rank) Loaded(s *Sequence, computed int) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	s.external += computed - s.Computed
	s.Computed = computed
	s.published, s.parent = r.Cache.Publish(s.Blocks, s.Prompt[:computed], s.published, s.parent)
	r.announce()
}

// Prefill computes the KV of the prompt after the first computed tokens. Each
// token takes PrefillUsPerToken. A rank prefills any number of sequences in
// parallel.
func (r *Rank) Prefill(ctx context.Context, s *Sequence) error {
	if err := r.Engine.Faults.hang(ctx, HangPrefill); err != nil {
		return err
	}
	if err := Sleep(ctx, time.Duration((len(s.Prompt)-s.Computed)*r.Engine.Cfg.PrefillUsPerToken)*time.Microsecond); err != nil {
		return err
	}
	r.Mu.Lock()
	defer r.Mu.Unlock()
	last := r.Engine.Weights.Root()
	if s.Computed > 0 {
		last = *r.Cache.At(s.Blocks, s.Computed-1)
	}
	for ; s.Computed < len(s.Prompt); s.Computed++ {
		last = r.Engine.Weights.Next(last, s.Prompt[s.Computed])
		*r.Cache.At(s.Blocks, s.Computed) = last
	}
	s.published, s.parent = r.Cache.Publish(s.Blocks, s.Prompt, s.published, s.parent)
	r.announce()
	return nil
}

// Decode produces tokens until the sequence finishes and calls emit for each.
// The KV of the whole prompt must be in the blocks (s.computed ==
// len(s.prompt)).
func (r *Rank) Decode(ctx context.Context, s *Sequence, emit func(Token)) error {
	r.Mu.Lock()
	var sight attention
	for i := range s.Prompt {
		sight = sight.add(*r.Cache.At(s.Blocks, i))
	}
	last := *r.Cache.At(s.Blocks, len(s.Prompt)-1)
	r.Mu.Unlock()
	due := time.Now()
	for n := 1; ; n++ {
		if err := r.Engine.Faults.hang(ctx, HangDecode); err != nil {
			return err
		}
		step := time.Duration(r.Engine.step.Load())
		if due = due.Add(step); step == 0 {
			due = time.Now() // earlier waits do not count
		}
		if err := Sleep(ctx, time.Until(due)); err != nil {
			return err
		}
		var t Token
		switch {
		case n <= len(s.Replay):
			t = s.Replay[n-1]
		case n == s.eosAt && !s.Req.IgnoreEOS && n > s.Req.MinTokens:
			t = TokenEOS
		default:
			t = s.pick(sight, n)
		}
		s.Output = append(s.Output, t)
		s.finished(t)
		emit(t)
		if s.Finish != "" {
			return nil
		}
		last = r.Engine.Weights.Next(last, t)
		sight = sight.add(last)
		r.extend(s, last)
	}
}

// pick returns output token n, which is the next token. It depends on all tokens so far, whether
// they came in the prompt or were generated. With OwnOutput it depends on n as well.
func (s *Sequence) pick(sight attention, n int) Token {
	seed := s.Req.Seed
	if s.Req.OwnOutput {
		seed += uint64(n-1) << 32
	}
	if t, ok := s.Script.next(len(s.Prompt) + len(s.Output)); ok {
		return t
	}
	h := sight.sample(seed, s.Sample)
	if s.split {
		return splitToken(h, openLetter(s.Prompt, s.Output))
	}
	return word(h)
}

// extend stores the KV of the newest output token.
func (r *Rank) extend(s *Sequence, v Kv) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	*r.Cache.At(s.Blocks, s.Computed) = v
	s.Computed++
	if s.Computed%r.Cache.Size == 0 {
		s.published, s.parent = r.Cache.Publish(s.Blocks, s.tokens(), s.published, s.parent)
		r.announce()
	}
}

// Sleep waits for d or until ctx ends.
func Sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// AcquireUnheld waits for a running slot, unless the sequence already has one.
func (r *Rank) AcquireUnheld(ctx context.Context, s *Sequence) error {
	r.Mu.Lock()
	held := s.slot
	r.Mu.Unlock()
	if held {
		return nil
	}
	return r.AcquireSlot(ctx, s)
}
