package kvindex

// Stored says that an engine stored blocks, as its event has it.
type Stored struct {
	// Hashes are the engine's own, one for each block in order.
	Hashes []uint64
	// Parent is the engine's hash of the block before the first, if
	// HasParent; else the first is the first of a prompt.
	Parent    uint64
	HasParent bool
	// Tokens are those of all blocks. None: the blocks are known already, and
	// are now in Tier too.
	Tokens []uint32
	// BlockTokens is the length of a block.
	BlockTokens int
	// Lora and Salt are of the prompt; they matter for its first block alone.
	Lora, Salt string
	Tier       Tier
}

// Feed takes in the exact events of one target: it maps the engine's own block
// hashes to ours by the tokens of the events. One goroutine calls it.
type Feed struct {
	x *Index
	t Target
}

// NewFeed returns the feed of a target that serves the model.
func NewFeed(x *Index, t Target, model string) *Feed { return &Feed{x: x, t: t} }

// Stored takes in a store event. It may be repeated.
func (f *Feed) Stored(e *Stored) {}

// Removed takes in that the engine removed blocks from a tier.
func (f *Feed) Removed(tier Tier, hashes []uint64) {}

// Moved takes in that the engine moved blocks from one tier to another.
func (f *Feed) Moved(from, to Tier, hashes []uint64) {}

// Cleared takes in that the engine has no blocks left, or that nothing is
// known of it any more: it restarted, or events were lost.
func (f *Feed) Cleared() { f.x.Clear(f.t) }

// BlockTokens is the length of the engine's blocks as learned from its events,
// 0 before the first.
func (f *Feed) BlockTokens() int { return 0 }
