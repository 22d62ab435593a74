package enginesim

import (
	"context"
	"slices"
	"sync"
	"time"
)

// sequence is one prompt in work: a request has len(prompts) * n sequences. Its
// fields belong to the goroutine that runs generate, except where a comment
// says otherwise.
type sequence struct {
	req *request
	// choice is the index of the answer's choice; prompt p, sample j has
	// choice p*n+j. sample is j.
	choice, sample int
	prompt         []token
	// id is the engine's internal request id; protocols set it.
	id string
	// rank runs the sequence.
	rank *rank
	// adapter is its LoRA adapter; "": none.
	adapter string

	// blocks hold the KV; set by reserve, guarded by rank.mu.
	blocks []blockID
	// computed is the number of leading tokens whose KV is in blocks. A
	// protocol raises it after a transfer (see rank.loaded).
	computed int
	// cachedLocal is the prefix hit in tokens, external the tokens that
	// transfers brought (set by loaded), cached the cached_tokens of usage:
	// reserve sets it to the hit, and a protocol may change it.
	cachedLocal, external, cached int
	// limit is the number of output tokens after which decode stops with
	// "length"; from the request, lowered by a protocol for a prefill leg.
	limit int
	// replay are output tokens that decode emits first instead of sampling them
	// (first tokens that came from prefill).
	replay []token
	output []token
	// finish is the finish reason once generate has returned nil: "stop" or
	// "length". stopReason is the matched stop string or token id, or nil.
	finish     string
	stopReason any
	// ext is the protocol's own state of the sequence.
	ext any
	// ecParams are vLLM's ec_transfer_params of its answer.
	ecParams any

	eosAt     int  // output token number that is the end of sequence; 0: none
	published int  // number of blocks in the prefix cache
	parent    link // the last of them
	slot      bool // holds a running slot; guarded by rank.mu
	text      textBuffer
}

// tokens returns the prompt followed by the decoded tokens.
func (s *sequence) tokens() []token { return slices.Concat(s.prompt, s.output) }

// waiter is a sequence in a rank's queue.
type waiter struct {
	s       *sequence
	tokens  int  // room needed; 0 when only a slot is wanted
	slot    bool // also wants a slot
	granted chan struct{}
}

// rank is one data-parallel rank: a KV cache, running slots, a queue and a
// side channel. Safe for concurrent use.
type rank struct {
	e     *Engine
	index int
	side  *sideChannel

	mu       sync.Mutex
	cache    *kvCache
	queue    []*waiter // in order of arrival
	resume   []*waiter // already hold their blocks and need only a slot; served first
	running  int
	adapters map[string]int // running sequences by LoRA adapter
	loading  int            // sequences that wait for a transfer
}

// pump grants all possible waits, in order. The caller holds mu.
func (r *rank) pump() {
	r.grant()
	r.announce()
}

func (r *rank) grant() {
	if r.e.sleeper.paused.Load() {
		return
	}
	for i := 0; i < len(r.resume) && r.running < r.e.cfg.MaxRunning; {
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
		if w.slot && r.running >= r.e.cfg.MaxRunning {
			return
		}
		if w.slot && !r.fitsAdapter(w.s) {
			i++
			continue
		}
		want := r.cache.blocksFor(w.tokens)
		hit := r.cache.match(w.s.cacheKey(), w.s.prompt)
		if len(hit) > want {
			hit = hit[:want]
		}
		if !r.cache.fits(hit, want) {
			return
		}
		r.queue = slices.Delete(r.queue, i, i+1)
		s := w.s
		s.blocks = r.cache.take(hit, want)
		s.computed = len(hit) * r.cache.size
		s.cachedLocal, s.cached = s.computed, s.computed
		s.published, s.parent = r.cache.publish(s.blocks, s.prompt[:s.computed], 0, r.cache.root(s.cacheKey()))
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
func (r *rank) wait(ctx context.Context, list *[]*waiter, w *waiter) error {
	r.mu.Lock()
	*list = append(*list, w)
	r.pump()
	r.mu.Unlock()
	select {
	case <-w.granted:
		return ctx.Err()
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(*list, w); i >= 0 {
		*list = slices.Delete(*list, i, i+1)
		r.pump()
	}
	return context.Cause(ctx)
}

// reserve waits until blocks for tokens (prompt and answer) are free and gives
// them to the sequence; with slot it also takes a running slot. The caller must
// `defer r.release(s)` first, because the grant and the client's leaving may
// coincide. Leading blocks may be prefix hits: s.computed is their number of
// tokens. A sequence that never fits gets errTooLarge. reserve takes blocks for
// the whole answer at once, so that a running sequence is never preempted.
func (r *rank) reserve(ctx context.Context, s *sequence, tokens int, slot bool) error {
	if r.cache.blocksFor(tokens) > len(r.cache.blocks) {
		return errTooLarge
	}
	s.rank = r
	return r.wait(ctx, &r.queue, &waiter{s: s, tokens: tokens, slot: slot, granted: make(chan struct{})})
}

// acquireSlot waits for a running slot for a sequence that holds its blocks.
func (r *rank) acquireSlot(ctx context.Context, s *sequence) error {
	return r.wait(ctx, &r.resume, &waiter{s: s, slot: true, granted: make(chan struct{})})
}

// releaseSlot releases the running slot and keeps the blocks. Without a slot it
// does nothing.
func (r *rank) releaseSlot(s *sequence) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.slot {
		s.slot = false
		r.runAdapter(s, -1)
		r.running--
		r.pump()
	}
}

// release frees the slot and the blocks of a sequence. Its computed blocks stay
// in the prefix cache. It may be called again.
func (r *rank) release(s *sequence) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.slot {
		s.slot = false
		r.runAdapter(s, -1)
		r.running--
	}
	r.cache.drop(s.blocks)
	s.blocks = nil
	r.pump()
}

// waitLoading runs fn, which waits for a transfer, and counts the sequence as
// waiting during it.
func (r *rank) waitLoading(fn func() error) error {
	r.mu.Lock()
	r.loading++
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.loading--
		r.mu.Unlock()
	}()
	return fn()
}

// loaded records that a transfer has filled the KV of the prompt from s.computed
// to computed tokens.
func (r *rank) loaded(s *sequence, computed int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s.external += computed - s.computed
	s.computed = computed
	s.published, s.parent = r.cache.publish(s.blocks, s.prompt[:computed], s.published, s.parent)
	r.announce()
}

// prefill computes the KV of the prompt after the first computed tokens. Each
// token takes PrefillUsPerToken. A rank prefills any number of sequences in
// parallel.
func (r *rank) prefill(ctx context.Context, s *sequence) error {
	if err := r.e.faults.hang(ctx, hangPrefill); err != nil {
		return err
	}
	if err := sleep(ctx, time.Duration((len(s.prompt)-s.computed)*r.e.cfg.PrefillUsPerToken)*time.Microsecond); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	last := r.e.weights.root()
	if s.computed > 0 {
		last = *r.cache.at(s.blocks, s.computed-1)
	}
	for ; s.computed < len(s.prompt); s.computed++ {
		last = r.e.weights.next(last, s.prompt[s.computed])
		*r.cache.at(s.blocks, s.computed) = last
	}
	s.published, s.parent = r.cache.publish(s.blocks, s.prompt, s.published, s.parent)
	r.announce()
	return nil
}

// decode produces tokens until the sequence finishes and calls emit for each.
// The KV of the whole prompt must be in the blocks (s.computed ==
// len(s.prompt)).
func (r *rank) decode(ctx context.Context, s *sequence, emit func(token)) error {
	r.mu.Lock()
	var sight attention
	for i := range s.prompt {
		sight = sight.add(*r.cache.at(s.blocks, i))
	}
	last := *r.cache.at(s.blocks, len(s.prompt)-1)
	r.mu.Unlock()
	due := time.Now()
	for n := 1; ; n++ {
		if err := r.e.faults.hang(ctx, hangDecode); err != nil {
			return err
		}
		step := time.Duration(r.e.step.Load())
		if due = due.Add(step); step == 0 {
			due = time.Now() // earlier waits do not count
		}
		if err := sleep(ctx, time.Until(due)); err != nil {
			return err
		}
		var t token
		switch {
		case n <= len(s.replay):
			t = s.replay[n-1]
		case n == s.eosAt && !s.req.IgnoreEOS && n > s.req.MinTokens:
			t = tokenEOS
		default:
			t = sight.sample(s.req.Seed, s.sample)
		}
		s.output = append(s.output, t)
		s.finished(t)
		emit(t)
		if s.finish != "" {
			return nil
		}
		last = r.e.weights.next(last, t)
		sight = sight.add(last)
		r.extend(s, last)
	}
}

// extend stores the KV of the newest output token.
func (r *rank) extend(s *sequence, v kv) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*r.cache.at(s.blocks, s.computed) = v
	s.computed++
	if s.computed%r.cache.size == 0 {
		s.published, s.parent = r.cache.publish(s.blocks, s.tokens(), s.published, s.parent)
		r.announce()
	}
}

// sleep waits for d or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
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

// acquireUnheld waits for a running slot, unless the sequence already has one.
func (r *rank) acquireUnheld(ctx context.Context, s *sequence) error {
	r.mu.Lock()
	held := s.slot
	r.mu.Unlock()
	if held {
		return nil
	}
	return r.acquireSlot(ctx, s)
}
