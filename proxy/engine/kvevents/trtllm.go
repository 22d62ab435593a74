package kvevents

import (
	"errors"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

var errEvents = errors.New("read events: not a list of TensorRT-LLM's KV cache events")

// drained decodes TensorRT-LLM's answer to POST /kv_cache_events: a list of events of
// all its ranks. It reuses all its memory. Source: TensorRT-LLM tensorrt_llm/_utils.py
// KVCacheEventSerializer.
type drained struct {
	ranks  []drainedRank
	resync func(rank int, reason string) // called after a feed was cleared

	blocks       int // blocks stored, removed or moved so far
	refused      int // stored or moved blocks for which the index had no room
	malformed    int // events that could not be read so far
	unknownRanks int // events of ranks that are not followed

	s    kvindex.Stored
	salt string
}

// drainedRank is the state of one rank. Each rank numbers its own events.
type drainedRank struct {
	to     feed
	filter eventFilter
	next   uint64 // the number of its next event, if known
	known  bool
	lower  bool // it has held blocks in other tiers than the GPU
}

// envelope holds the members of an event around its data.
type envelope struct {
	id, rank, window, layers uint64
	data                     []byte
}

// decode applies the events of one answer and returns their number. An unreadable event
// may have removed unknown blocks. An error means that the list ended too early.
func (d *drained) decode(body []byte) (n int, err error) {
	c := cursor{openai.Cursor{Text: body}}
	for c.Open('['); c.Next(']'); n++ {
		raw := c.Skip()
		if c.Bad {
			break
		}
		if !d.event(raw) {
			d.malformed++
		}
	}
	if c.Bad {
		return n, errEvents
	}
	return n, nil
}

func (d *drained) event(raw []byte) bool {
	c := cursor{openai.Cursor{Text: raw}}
	var e envelope
	for c.Open('{'); c.Next('}'); {
		switch string(c.Key) {
		case "event_id":
			e.id = c.integer()
		case "attention_dp_rank":
			if !c.null() {
				e.rank = c.integer()
			}
		case "window_size":
			if !c.null() {
				e.window = c.integer()
			}
		case "layer_group_id":
			if !c.null() {
				e.layers = c.integer()
			}
		case "data":
			e.data = c.Skip()
		default:
			c.Skip()
		}
	}
	if c.Bad || e.data == nil {
		return false
	}
	if e.rank >= uint64(len(d.ranks)) {
		d.unknownRanks++
		return true
	}
	d.number(int(e.rank), e.id)
	r := &d.ranks[e.rank]
	if !d.data(r, &e) {
		r.to.Cleared()
		d.resync(int(e.rank), ResyncUnreadable)
		return false
	}
	return true
}

// number checks the numbers of a rank's events. They start at 0 with the engine and
// have no gaps: a missing event was dropped by a full queue, or drained by another
// client.
func (d *drained) number(rank int, id uint64) {
	r := &d.ranks[rank]
	switch {
	case r.known && id > r.next:
		r.to.Cleared()
		d.resync(rank, ResyncGap)
	case r.known && id < r.next:
		r.to.Cleared()
		d.resync(rank, ResyncRestart)
	}
	r.next, r.known = id+1, true
}

// members holds the members of an event's data, of any type.
type members struct {
	kind                           string
	parent, blocks, hashes, id, to []byte
}

func (d *drained) data(r *drainedRank, e *envelope) bool {
	c := cursor{openai.Cursor{Text: e.data}}
	var m members
	for c.Open('{'); c.Next('}'); {
		switch string(c.Key) {
		case "type":
			m.kind = typeOf(c.Quoted())
		case "parent_hash":
			m.parent = c.Skip()
		case "blocks":
			m.blocks = c.Skip()
		case "block_hashes":
			m.hashes = c.Skip()
		case "block_hash":
			m.id = c.Skip()
		case "cache_level":
			m.to = c.Skip()
		default:
			c.Skip()
		}
	}
	if c.Bad {
		return false
	}
	// If there are several windows, the largest one counts, because its layers need the
	// largest part of a prefix.
	g := group{id: e.window<<16 | e.layers&0xffff, merit: uint32(min(e.window, 1<<32-1))}
	switch m.kind {
	case "created":
		if _, turned := r.filter.choose(g); turned {
			r.to.Cleared()
		}
	case "stored":
		return d.stored(r, g, &m)
	case "removed":
		return d.removed(r, g, m.hashes)
	case "updated":
		return d.updated(r, g, &m)
	}
	return true
}

// typeOf returns a type's name without an allocation, "" if it is unknown.
func typeOf(text []byte) string {
	for _, kind := range [...]string{"created", "stored", "removed", "updated"} {
		if string(text) == kind {
			return kind
		}
	}
	return ""
}

// stored decodes the blocks of a store event. The blocks follow each other, but may be in
// several tiers, and the last block may be partial. stored passes each run of blocks with
// the same tier and length to the feed separately.
func (d *drained) stored(r *drainedRank, g group, m *members) bool {
	d.s = kvindex.Stored{Hashes: d.s.Hashes[:0], Tokens: d.s.Tokens[:0]}
	if c := (cursor{openai.Cursor{Text: m.parent}}); m.parent != nil && !c.null() {
		d.s.HasParent = true
		if d.s.Parent = c.hash(); c.Bad {
			return false
		}
	}
	c := cursor{openai.Cursor{Text: m.blocks}}
	for c.Open('['); c.Next(']'); {
		b := block{salt: d.s.Salt}
		had := len(d.s.Tokens)
		if d.block(&c, &b); c.Bad {
			return false
		}
		n := len(d.s.Tokens) - had
		if len(d.s.Hashes) > 0 && (b.opaque || b.tier != d.s.Tier || n != d.s.BlockTokens) {
			d.flush(r, g, had)
		}
		if b.opaque {
			return true
		}
		d.s.Hashes = append(d.s.Hashes, b.hash)
		d.s.Tier, d.s.BlockTokens, d.s.Salt = b.tier, n, b.salt
	}
	d.flush(r, g, len(d.s.Tokens))
	return !c.Bad
}

// flush passes the run of blocks, which has n tokens, to the feed, and starts the next
// run. TensorRT-LLM's full blocks have a power of two of tokens; another length is the
// partial end of a prompt.
func (d *drained) flush(r *drainedRank, g group, n int) {
	if len(d.s.Hashes) == 0 {
		return
	}
	all := d.s.Tokens
	d.s.Tokens = all[:n]
	if d.s.BlockTokens&(d.s.BlockTokens-1) == 0 && n > 0 && r.filter.admit(g, &d.s, r.to) {
		applied, refused := r.to.Stored(&d.s)
		d.blocks += applied
		d.refused += refused
		r.lower = r.lower || d.s.Tier != kvindex.GPU
	}
	d.s.Parent, d.s.HasParent = d.s.Hashes[len(d.s.Hashes)-1], true
	d.s.Hashes = d.s.Hashes[:0]
	d.s.Tokens = all[:copy(all, all[n:])]
}

// block is one decoded block.
type block struct {
	hash   uint64
	tier   kvindex.Tier
	salt   string
	opaque bool // it depends on more than its tokens: an image, a prompt table, a LoRA
}

// block decodes one block and appends its tokens to those of the run.
func (d *drained) block(c *cursor, b *block) {
	hashed := false
	for c.Open('{'); c.Next('}'); {
		switch string(c.Key) {
		case "block_hash":
			b.hash, hashed = c.hash(), true
		case "cache_level":
			if !c.null() {
				b.tier = levelTier(c.integer())
			}
		case "cache_salt":
			if !c.null() {
				b.salt = c.str(&d.salt)
			}
		case "mm_keys":
			if !c.null() {
				c.Open('[')
				for c.Next(']') {
					b.opaque = true
					c.Skip()
				}
			}
		case "lora_id":
			if !c.null() {
				b.opaque = true
				c.Skip()
			}
		case "tokens":
			for c.Open('['); c.Next(']'); {
				d.token(c, b)
			}
		default:
			c.Skip()
		}
	}
	c.Bad = c.Bad || !hashed
}

func (d *drained) token(c *cursor, b *block) {
	var id uint64
	for c.Open('{'); c.Next('}'); {
		switch string(c.Key) {
		case "token_id":
			if c.Peek() == '"' { // the digest of an input that is not text
				b.opaque = true
				c.Skip()
				continue
			}
			id = c.integer()
		case "token_extra_id":
			if c.integer() != 0 {
				b.opaque = true
			}
		default:
			c.Skip()
		}
	}
	d.s.Tokens = append(d.s.Tokens, uint32(id))
}

// removed decodes the blocks that the engine has removed from all of its tiers.
func (d *drained) removed(r *drainedRank, g group, hashes []byte) bool {
	d.s.Hashes = d.s.Hashes[:0]
	c := cursor{openai.Cursor{Text: hashes}}
	for c.Open('['); c.Next(']'); {
		d.s.Hashes = append(d.s.Hashes, c.hash())
	}
	if c.Bad || len(d.s.Hashes) == 0 || !r.filter.counts(g.id) {
		return !c.Bad
	}
	r.to.Removed(kvindex.GPU, d.s.Hashes)
	if r.lower {
		r.to.Removed(kvindex.CPU, d.s.Hashes)
		r.to.Removed(kvindex.Disk, d.s.Hashes)
	}
	d.blocks += len(d.s.Hashes)
	return true
}

// updated decodes the move of a block from one tier to another. A changed priority is
// ignored.
func (d *drained) updated(r *drainedRank, g group, m *members) bool {
	c := cursor{openai.Cursor{Text: m.to}}
	if m.to == nil || c.null() {
		return true
	}
	var from, to uint64
	for c.Open('{'); c.Next('}'); {
		switch string(c.Key) {
		case "old_value":
			from = c.integer()
		case "new_value":
			to = c.integer()
		default:
			c.Skip()
		}
	}
	id := cursor{openai.Cursor{Text: m.id}}
	d.s.Hashes = append(d.s.Hashes[:0], id.hash())
	if c.Bad || id.Bad || !r.filter.counts(g.id) {
		return !c.Bad && !id.Bad
	}
	r.lower = true
	refused := r.to.Moved(levelTier(from), levelTier(to), d.s.Hashes)
	d.blocks += 1 - refused
	d.refused += refused
	return true
}

// levelTier returns the tier of a cache level: 0 is the GPU, 1 the host's memory,
// higher levels are below it.
func levelTier(level uint64) kvindex.Tier {
	return kvindex.Tier(min(level, uint64(kvindex.Disk)))
}
