package kvindex

// Stored is an engine's event that blocks were stored.
type Stored struct {
	// Hashes are the engine's own hashes, one for each block, in order.
	Hashes []uint64
	// Parent is the engine's hash of the block before the first one, if HasParent is
	// true. Otherwise the first block begins a prompt.
	Parent    uint64
	HasParent bool
	// Tokens are the tokens of all blocks. Empty: the blocks are known already and are
	// now also in Tier (vLLM's offloading reports it so).
	Tokens []uint32
	// BlockTokens is the length of a block in tokens.
	BlockTokens int
	// Lora and Salt belong to the prompt. They matter only for its first block, because
	// later blocks continue from their parent.
	Lora, Salt string
	Tier       Tier
}

// Feed applies the exact events of one target. It maps the engine's block hashes to the
// index's hashes by the events' tokens. It is not safe for concurrent use, and a target
// may have only one feed at a time. The learned data belongs to the target. Clear and
// Drop remove it.
type Feed struct {
	x     *Index
	tg    *target
	model string
	root  root
	chain []Hash // of the current event
}

// root is the seed of the last event's prompt.
type root struct {
	lora, salt string
	seed       Hash
}

// NewFeed returns the feed of a target that serves the model. model must be the text
// that requests pass to Seed.
func NewFeed(x *Index, t Target, model string) *Feed {
	tg := x.at(t)
	if tg == nil {
		tg = &target{gone: true}
	}
	x.mu.Lock()
	tg.fed = true
	x.divide()
	x.mu.Unlock()
	return &Feed{x: x, tg: tg, model: model, root: root{seed: Seed(model, "", "")}}
}

// Stored applies a store event, which may repeat known blocks. Blocks that cannot be
// placed are counted and skipped: blocks with an unknown parent, blocks of an event
// with fewer hashes than blocks (vLLM's sliding windows, where it is unknown which
// block a hash belongs to), a partial last block, and blocks shorter than the engine's
// other blocks. Stored returns the number of blocks that the index has now, and the number of
// those for which there was no room.
func (f *Feed) Stored(e *Stored) (applied, refused int) {
	tg := f.tg
	tg.mu.Lock()
	defer tg.mu.Unlock()
	if tg.gone || e.Tier >= tiers || len(e.Hashes) == 0 {
		return 0, 0
	}
	if len(e.Tokens) == 0 {
		return f.known(e)
	}
	if !f.cut(e) {
		tg.count(countIgnored, len(e.Hashes))
		return 0, 0
	}
	seed := f.seed(e.Lora, e.Salt)
	if e.HasParent {
		if seed = Hash(tg.engine.get(e.Parent) & hashMask); seed == 0 {
			tg.count(countOrphans, len(e.Hashes))
			return 0, 0
		}
	}
	tg.guesses.heard = tg.guesses.now
	f.chain = AppendTokens(f.chain[:0], seed, e.Tokens, e.BlockTokens)
	if n := len(e.Hashes) - len(f.chain); n > 0 {
		tg.count(countIgnored, n)
	}
	b := f.x.batch(tg)
	for at := 0; at < len(f.chain); at += chunk {
		hashes := f.chain[at:min(at+chunk, len(f.chain))]
		f.x.fetch(hashes)
		tg.engine.fetch(e.Hashes[at : at+len(hashes)])
		for i, h := range hashes {
			if !f.place(&b, e.Hashes[at+i], h, e.Tier) {
				// The following blocks would have no parent.
				refused = len(f.chain) - at - i
				tg.count(countRefused, refused-1)
				b.end()
				return at + i, refused
			}
		}
	}
	b.end()
	return len(f.chain), 0
}

// cut reports whether an event has a hash for each block, with or without a partial
// last block, and blocks of the engine's length. It learns that length: no block is
// longer than the engine's length, so the longest one seen is correct, and blocks of a
// shorter length were partial.
func (f *Feed) cut(e *Stored) bool {
	if e.BlockTokens <= 0 {
		return false
	}
	whole := len(e.Tokens) / e.BlockTokens
	if n := len(e.Hashes); n < whole || n > (len(e.Tokens)-1)/e.BlockTokens+1 {
		return false
	}
	known := f.BlockTokens()
	if whole == 0 || e.BlockTokens < known {
		return false
	}
	if e.BlockTokens > known {
		if known > 0 {
			f.x.clear(f.tg)
		}
		f.tg.tokens.Store(int64(e.BlockTokens))
	}
	return true
}

// seed returns the hash before the first block of a prompt.
func (f *Feed) seed(lora, salt string) Hash {
	if lora != f.root.lora || salt != f.root.salt {
		f.root = root{lora, salt, Seed(f.model, lora, salt)}
	}
	return f.root.seed
}

// place stores one block under the engine's hash and the index's hash. It returns false
// if there was no room.
func (f *Feed) place(b *batch, engine uint64, h Hash, tier Tier) bool {
	flag := uint64(1) << tier
	old := f.tg.engine.get(engine)
	if old&hashMask != uint64(h) && old != 0 {
		f.tg.count(countReplaced, 1)
		f.drop(b, engine, old, old&^hashMask)
		old = 0
	}
	if old&flag != 0 {
		return true
	}
	before, ok := b.store(h, flag)
	if !ok {
		return false
	}
	if before&flag != 0 {
		// Two engine hashes may have the same tokens, for example because of images.
		if f.tg.further >= f.x.part(f.tg) || f.x.twins.Load() >= f.x.maxEntries {
			f.tg.count(countRefused, 1)
			return false
		}
		if f.tg.twins == nil {
			f.tg.twins = make(map[uint64]uint32)
		}
		f.x.twins.Add(1)
		f.tg.further++
		f.tg.twins[uint64(h)|uint64(tier)]++
	}
	f.tg.engine.set(engine, uint64(h)|old|flag)
	return true
}

// drop removes those tiers of a block in flags that the engine's hash has in value.
func (f *Feed) drop(b *batch, engine, value, flags uint64) {
	for tier := range Tier(tiers) {
		flag := uint64(1) << tier
		if value&flags&flag == 0 {
			continue
		}
		twin := value&hashMask | uint64(tier)
		switch n := f.tg.twins[twin]; {
		case n > 1:
			f.tg.twins[twin] = n - 1
			f.tg.further--
			f.x.twins.Add(-1)
		case n == 1:
			delete(f.tg.twins, twin)
			f.tg.further--
			f.x.twins.Add(-1)
		default:
			b.remove(Hash(value&hashMask), flag)
		}
	}
	if value &^= flags; value&^hashMask != 0 {
		f.tg.engine.set(engine, value)
	} else {
		f.tg.engine.remove(engine)
	}
}

// known adds blocks of the feed to another tier. It returns what Stored returns.
func (f *Feed) known(e *Stored) (applied, refused int) {
	if e.BlockTokens > 0 && e.BlockTokens != f.BlockTokens() {
		f.tg.count(countIgnored, len(e.Hashes))
		return 0, 0
	}
	b := f.x.batch(f.tg)
	for _, engine := range e.Hashes {
		if old := f.tg.engine.get(engine); old != 0 {
			if f.place(&b, engine, Hash(old&hashMask), e.Tier) {
				applied++
			} else {
				refused++
			}
		} else {
			f.tg.count(countOrphans, 1)
		}
	}
	b.end()
	return applied, refused
}

// Removed applies the engine's removal of blocks from a tier.
func (f *Feed) Removed(tier Tier, hashes []uint64) { f.leave(tier, tiers, hashes) }

// Moved applies the engine's move of blocks from one tier to another (TensorRT-LLM's
// updated events). It returns the number of blocks for which there was no room.
func (f *Feed) Moved(from, to Tier, hashes []uint64) (refused int) {
	if to < tiers && from != to {
		return f.leave(from, to, hashes)
	}
	return 0
}

// leave removes blocks from a tier. If to is a tier, it first adds the blocks that were
// in from to it, and returns the number of those for which there was no room.
func (f *Feed) leave(from, to Tier, hashes []uint64) (refused int) {
	tg := f.tg
	tg.mu.Lock()
	defer tg.mu.Unlock()
	if tg.gone || from >= tiers {
		return 0
	}
	b := f.x.batch(tg)
	for len(hashes) > 0 {
		part := hashes[:min(chunk, len(hashes))]
		hashes = hashes[len(part):]
		f.fetch(part)
		for _, engine := range part {
			value := tg.engine.get(engine)
			if value>>from&1 == 0 {
				tg.count(countStrays, 1)
				continue
			}
			if to < tiers {
				if !f.place(&b, engine, Hash(value&hashMask), to) {
					refused++
				}
				value = tg.engine.get(engine)
			}
			f.drop(&b, engine, value, 1<<from)
		}
	}
	b.end()
	return refused
}

// fetch prefetches the memory of at most chunk known blocks.
func (f *Feed) fetch(engine []uint64) {
	f.tg.engine.fetch(engine)
	f.chain = f.chain[:0]
	for _, e := range engine {
		if v := f.tg.engine.get(e); v != 0 {
			f.chain = append(f.chain, Hash(v&hashMask))
		}
	}
	f.x.fetch(f.chain)
}

// Cleared removes all blocks, because the engine has none left or because its state is
// unknown: it restarted, or events were lost.
func (f *Feed) Cleared() {
	f.tg.mu.Lock()
	f.x.clear(f.tg)
	f.tg.mu.Unlock()
}

// BlockTokens returns the length of the engine's blocks in tokens, as learned from its
// events; 0 before the first event. It is safe for concurrent use.
func (f *Feed) BlockTokens() int { return int(f.tg.tokens.Load()) }
