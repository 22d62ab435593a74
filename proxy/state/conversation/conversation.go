// Package conversation finds the requests that belong to one conversation. It stores the
// number of turns of a conversation and the engines that served the last turn. So the
// next turn can go to the engines that hold the KV blocks of the earlier turns, even if
// an index has forgotten those blocks.
//
// # How a conversation is identified
//
// If the client sent an id, only the id identifies the conversation.
//
// Without an id, the prompt identifies the conversation. A client that continues a
// conversation sends the earlier prompt, the answer and its new message. So a request is
// a later turn if the whole prompt of an earlier request, without its partial last block,
// is a prefix of the request's prompt. If there are several such prompts, the longest one
// counts. A caller that has the prompt's text also gives the positions at which an
// earlier prompt may have ended ([Query.Ends]). Then the table knows the exact end of
// each prompt, and recognizes the next turn even if the turn adds only a few characters.
//
// Ids and prompts are separate. A request with an id does not continue a
// conversation that was identified by its prompts. A request without the id does
// not continue a conversation with an id.
//
// A request with an id may name a parent: the conversation of the agent that started this
// agent. The first turn then has the home of the parent, which probably holds the
// beginning of the prompt. It remains turn 1 of a conversation of its own. A parent that
// the table does not know has no effect. Parents take no memory.
//
// These rules have consequences, and some need a correction:
//
//   - Two requests share their first blocks, and neither prompt is a prefix of the
//     other. They are two conversations: a shared system prompt identifies no
//     conversation.
//   - A prompt that is little more than a shared system prompt is a prefix of the
//     first turns of many clients. So the table does not store a prompt of fewer
//     than [LeastBlocks] blocks that comes without ends. A caller that sees that a
//     request contains no answer yet sets [Query.First]; then the request inherits
//     nothing. A prompt that was continued in [MaxBranches] ways identifies no
//     further conversations.
//   - A repeated prompt is not the next turn. It has the number of the turn that it
//     repeats. A repeated first turn has no home either, because many clients may
//     send it and their conversations must be spread.
//   - A prompt may have several continuations: a regenerated answer, an edited
//     question, sub-agents. Each is the next turn of the same conversation and has
//     the conversation's key. Before its placement a continuation has the home of
//     the conversation. After its placement each branch has its own home.
//
// # Bounds
//
// A table of capacity n keeps the n conversations that were used last. Each
// branch counts as one. The table also keeps the n prompts that were continued
// last, so that it finds the prompt from which a branch starts. A table takes at
// most [BytesPerEntry] bytes for each of these 2n entries, and at most
// [BytesPerValue] bytes for each of n values of policies. The table never scans
// its entries: a look-up, a record and a removal take the same time in a full
// table as in an empty table.
//
// A Table is safe for concurrent use, does no I/O and has no clock of its own.
//
// The decisions behind this package are in docs/design/placement.md.
package conversation

import (
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

const (
	// DefaultCapacity is the default number of conversations in a table.
	DefaultCapacity = 100_000
	// LeastBlocks is the number of complete blocks that a prompt must have to be
	// remembered.
	LeastBlocks = 2
	// MaxBranches bounds the continuations of one prompt that count as its conversation.
	// In Mooncake's trace of a chat service, one of 2,888 continued prompts has more.
	MaxBranches = 4
)

// Key identifies a conversation; 0: none. It is the hash of the client's id (odd) or of
// the first known prompt (even), and equal in all processes.
type Key uint64

// AppendText appends the key in the form for policies: 16 hex digits, or nothing for 0.
func (k Key) AppendText(dst []byte) []byte {
	if k == 0 {
		return dst
	}
	const digits = "0123456789abcdef"
	for shift := 60; shift >= 0; shift -= 4 {
		dst = append(dst, digits[k>>shift&15])
	}
	return dst
}

// Target is the target of a leg: the number of the instance, which is never reused, and
// the rank. Instance 0 is no target.
type Target struct {
	Instance uint32
	Rank     int32
}

// Query identifies the conversation of one request.
type Query struct {
	// Scope, the seed of the model's chains, separates equal ids of different models. It
	// is used for ids only, because a chain contains it.
	Scope kvindex.Hash
	// ID is the client's name of the conversation; "": none.
	ID string
	// Parent is the client's name of the conversation that started this one; "": none. It
	// is used for a first turn with an ID only.
	Parent string
	// Chain is the complete blocks of the prompt. All requests of a model must be cut in
	// the same way. It is ignored if there is an ID.
	Chain []kvindex.Hash
	// Ends has the positions, in ascending order, at which an earlier prompt of the
	// conversation may have ended: after each message of a chat, after each token id or
	// word of a completion. The last position is the end of this prompt. Without Ends a
	// prompt ends with its last whole block. See AppendEnds.
	Ends []End
	// EndsFrom is the number of whole blocks before the part of the prompt whose
	// ends are complete. Earlier prompts that ended before that part are found by
	// their last whole block, if only one of them is known.
	EndsFrom int
	// First: the request is a first turn, because its messages contain no answer.
	First bool
}

// Turn has the known facts about a request's conversation, and the data of the request
// that Record needs. It is a value without pointers.
type Turn struct {
	Key Key
	// Number is the number of the turn, 1 for the first; 0: unknown, because the request
	// has no id and no whole block.
	Number int32
	// Prefill and Decode are the conversation's home: the targets that served its last
	// turn. A target may have left; then it is not among the caller's candidates. On
	// the first turn they are the home of the parent, or zero.
	Prefill, Decode Target
	// LastUse is when a turn was recorded last, Unix time in ms; 0: never.
	LastUse int64

	repeats   bool   // the same prompt was recorded before
	hash      uint64 // of the entry: of the id, or of the prompt's end
	block     uint64 // hash of the last whole block before the prompt's end
	mark      uint64 // of the window in which the prompt ends
	parent    uint64 // hash of the entry that is continued, if continues
	kept      bool   // there is an entry to be written
	byID      bool
	continues bool
}

// Table is the conversations of one deployment.
type Table struct {
	mu       sync.RWMutex
	capacity int
	entries  []entry    // the first two are the heads of the lists; guarded by mu
	lists    lru        // guarded by mu
	index    index      // entries by hash; guarded by mu
	marks    index      // windows and blocks that prompts end in, counted; guarded by mu
	blocks   index      // first entry of those that end after one block; guarded by mu
	free     []uint32   // entries that are in no list; guarded by mu
	count    [lists]int // entries of each list; guarded by mu
	changes  uint64     // how many there have been; guarded by mu

	values values
}

// New returns an empty table of capacity conversations; below 1 it is the
// default. Most of its memory is taken as it fills.
func New(capacity int) *Table {
	if capacity < 1 {
		capacity = DefaultCapacity
	}
	return &Table{
		capacity: capacity,
		entries:  make([]entry, lists),
		lists:    newLRU(lists),
		index:    newIndex(2 * capacity),
		marks:    newIndex(4 * capacity),
		blocks:   newIndex(2 * capacity),
		values:   newValues(capacity),
	}
}

// Len is the number of conversations that are known, branches counted apart.
func (t *Table) Len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.count[live]
}

// Look determines the conversation and the turn of a request. It changes nothing,
// allocates nothing, and retains nothing of q. Call it once for an exchange, not again
// for a retry: for a request with an id, a second Look after Record would return the next
// turn.
func (t *Table) Look(q Query) Turn {
	if q.ID != "" {
		return t.lookID(q)
	}
	if len(q.Ends) == 0 && len(q.Chain) < LeastBlocks {
		if len(q.Chain) > 0 || q.First {
			return Turn{Number: 1}
		}
		return Turn{}
	}
	return t.lookPrompt(q)
}

func (t *Table) lookID(q Query) Turn {
	hash := xxh3.HashStringSeed(q.ID, uint64(q.Scope))
	turn := Turn{Key: Key(hash | 1), Number: 1, hash: hash, kept: true, byID: true}
	t.mu.RLock()
	defer t.mu.RUnlock()
	if n := t.find(hash, true); n != 0 {
		e := &t.entries[n]
		turn.Number = e.turn + 1
		turn.inherit(e)
		return turn
	}
	if q.Parent == "" || q.Parent == q.ID {
		return turn
	}
	if n := t.find(xxh3.HashStringSeed(q.Parent, uint64(q.Scope)), true); n != 0 {
		e := &t.entries[n]
		turn.Prefill, turn.Decode = e.prefill, e.decode
	}
	return turn
}

func (t *Table) lookPrompt(q Query) Turn {
	turn := q.turn()
	t.mu.RLock()
	defer t.mu.RUnlock()
	if n := t.find(turn.hash, false); n != 0 {
		e := &t.entries[n]
		turn.Key, turn.repeats = e.key, true
		if e.turn > 1 && !q.First {
			turn.Number = e.turn
			turn.inherit(e)
		}
		return turn
	}
	if q.First {
		return turn
	}
	n := t.longest(q)
	if n == 0 {
		return turn
	}
	e := &t.entries[n]
	turn.parent, turn.continues = e.hash, true
	if e.branches < MaxBranches {
		turn.Key, turn.Number = e.key, e.turn+1
		turn.inherit(e)
	}
	return turn
}

// turn is the first turn of a conversation that begins with the prompt.
func (q *Query) turn() Turn {
	blocks := len(q.Chain)
	end := q.blockBefore(blocks)
	if n := len(q.Ends); n > 0 {
		blocks, end = int(q.Ends[n-1].Blocks), uint64(q.Ends[n-1].Hash)
	}
	return Turn{
		Key: promptKey(end), Number: 1, hash: end,
		block: q.blockBefore(blocks), mark: q.markOf(max(blocks-1, 0) / window), kept: true,
	}
}

// blockBefore returns the hash of block n: of all of the prompt up to there. No blocks
// have the hash of the scope.
func (q *Query) blockBefore(blocks int) uint64 {
	if blocks == 0 {
		return uint64(q.Scope)
	}
	return uint64(q.Chain[blocks-1])
}

// promptKey is the key of a conversation that begins with a prompt: never 0, and
// never that of an id.
func promptKey(end uint64) Key { return Key(end&^1 | 2) }

// Begins reports whether the request begins a conversation that has no home: it is a first turn,
// no parent is known, and it does not repeat the prompt of an earlier request. It is false after
// ReadTurn.
func (turn *Turn) Begins() bool {
	return turn.Number == 1 && turn.kept && !turn.repeats && turn.Prefill.Instance == 0
}

func (turn *Turn) inherit(e *entry) {
	turn.Prefill, turn.Decode, turn.LastUse = e.prefill, e.decode, e.last
}

// window is the number of blocks for which one mark stands. To find the prompts that end
// on a chain, Look searches the mark of each window. It searches block by block only in
// windows that have a mark. This takes about 2 * 64 steps for a chain of 4,096 blocks.
const window = 64

// markOf returns the mark of a window of the prompt's blocks: the hash of the block
// before the window, which identifies the prompt up to that block. The first window has
// the hash of the first block. A prompt without a whole block has the hash of the scope.
func (q *Query) markOf(n int) uint64 {
	if n == 0 {
		return q.blockBefore(min(1, len(q.Chain)))
	}
	return uint64(q.Chain[n*window-1])
}

// longest finds the longest remembered prompt that this one continues; 0 if there
// is none.
func (t *Table) longest(q Query) uint32 {
	ends := q.Ends
	if len(ends) > 0 {
		ends = ends[:len(ends)-1] // the last is this prompt's own end
	}
	for w := max(len(q.Chain)-1, 0) / window; w >= 0; w-- {
		if !t.marks.has(q.markOf(w)) {
			continue
		}
		for blocks := min(len(q.Chain), (w+1)*window); blocks > w*window; blocks-- {
			n, rest := t.endAfter(&q, blocks, ends)
			if n != 0 {
				return n
			}
			ends = rest
		}
	}
	if !t.marks.has(uint64(q.Scope)) {
		return 0
	}
	n, _ := t.endAfter(&q, 0, ends)
	return n
}

// endAfter finds the longest remembered prompt that ends after the given number of the
// prompt's blocks and before the next block ends. It returns the ends before that block.
func (t *Table) endAfter(q *Query, blocks int, ends []End) (n uint32, rest []End) {
	for len(ends) > 0 && int(ends[len(ends)-1].Blocks) > blocks {
		ends = ends[:len(ends)-1]
	}
	block := q.blockBefore(blocks)
	if !t.marks.has(blockMark(block)) {
		return 0, ends
	}
	for ; len(ends) > 0 && int(ends[len(ends)-1].Blocks) == blocks; ends = ends[:len(ends)-1] {
		if n := t.find(uint64(ends[len(ends)-1].Hash), false); n != 0 {
			return n, ends
		}
	}
	complete := len(q.Ends) > 0 && blocks >= q.EndsFrom
	own := len(q.Ends) == 0 && blocks == len(q.Chain)
	if complete || own || blocks < LeastBlocks {
		return 0, ends
	}
	return t.only(block), ends
}

// only finds the remembered prompt that ends after a block, if there is one and no
// other.
func (t *Table) only(block uint64) uint32 {
	if t.marks.times(blockMark(block)) != 1 {
		return t.find(block, false)
	}
	h := spread(block)
	x := &t.blocks
	for i := h >> x.shift; x.cells[i] != 0; i = x.step(i) {
		if n := uint32(x.cells[i]); x.cells[i]>>32 == h>>32 && t.entries[n].block == block {
			return n
		}
	}
	return 0
}

// blockMark returns the key under which the table counts the prompts that end after a
// block.
func blockMark(block uint64) uint64 { return block ^ 0xA0761D6478BD642F }
