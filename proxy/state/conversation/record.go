package conversation

import "time"

// BytesPerEntry is the largest memory of one conversation or one continued prompt: its
// entry, its links and its room in the two indexes.
const BytesPerEntry = 216

// entry is one conversation with an id, or one prompt.
type entry struct {
	hash            uint64
	block, mark     uint64 // 0 with an id
	key             Key
	last            int64  // Unix time in ms
	change          uint64 // number of the last change, as Changes counts them
	prefill, decode Target
	turn            int32
	branches        uint8 // number of prompts that continued it, up to MaxBranches
	list            uint8
	byID            bool
	first           bool // the entry is in the table's index of blocks
}

// The lists of entries, each in the order of use.
const (
	live  = iota // conversations with an id, and prompts that are not continued
	spent        // continued prompts
	lists
)

// Record records where a turn is served; it is called when a placement is committed. A
// phase without a target keeps its home. The target of an aggregated leg is the home of
// both phases, so callers name it twice. Another Record of the same Turn, for a leg that
// was retried elsewhere, moves the home and counts no turn.
func (t *Table) Record(turn Turn, prefill, decode Target, now time.Time) {
	if !turn.kept {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.find(turn.hash, turn.byID)
	if n == 0 {
		if turn.continues {
			t.branch(turn.parent)
		}
		n = t.insert(&turn)
	} else {
		t.touch(n)
	}
	e := &t.entries[n]
	e.turn = max(e.turn, turn.Number)
	e.last = now.UnixMilli()
	if prefill.Instance != 0 {
		e.prefill = prefill
	}
	if decode.Instance != 0 {
		e.decode = decode
	}
}

// branch notes that a prompt was continued. It is called before the continuation is
// inserted, which uses the place that the prompt leaves.
func (t *Table) branch(parent uint64) {
	n := t.find(parent, false)
	if n == 0 {
		return // the entry was dropped in the meantime
	}
	p := &t.entries[n]
	p.branches = min(p.branches+1, MaxBranches)
	if p.list == spent {
		t.touch(n)
		return
	}
	if t.count[spent] == t.capacity {
		t.evict(spent)
	}
	t.unlink(n)
	t.link(n, spent)
}

// insert adds an entry for a turn that is not known yet.
func (t *Table) insert(turn *Turn) uint32 {
	n := t.room(live)
	t.entries[n] = entry{
		hash: turn.hash, block: turn.block, mark: turn.mark, key: turn.Key, byID: turn.byID,
		prefill: turn.Prefill, decode: turn.Decode,
	}
	t.enter(n, live)
	return n
}

// room returns a free entry of a list. If the list is full, room drops another entry.
func (t *Table) room(list uint8) uint32 {
	if t.count[list] == t.capacity {
		t.evict(list)
	}
	var n uint32
	if last := len(t.free) - 1; last >= 0 {
		n, t.free = t.free[last], t.free[:last]
	} else {
		n = uint32(len(t.entries))
		t.entries = grow(t.entries, lists+2*t.capacity)
		t.lists.links = grow(t.lists.links, lists+2*t.capacity)
	}
	return n
}

// enter adds a new entry to the indexes.
func (t *Table) enter(n uint32, list uint8) {
	e := &t.entries[n]
	t.index.put(e.hash, n)
	if !e.byID {
		if !t.marks.has(blockMark(e.block)) {
			t.blocks.put(e.block, n)
			e.first = true
		}
		t.marks.add(blockMark(e.block))
		t.marks.add(e.mark)
	}
	t.link(n, list)
}

// evict removes the least recently used entry of a list.
func (t *Table) evict(list uint8) {
	n := t.lists.oldest(uint32(list))
	e := &t.entries[n]
	t.index.remove(e.hash, n)
	if !e.byID {
		if e.first {
			t.blocks.remove(e.block, n)
		}
		t.marks.sub(blockMark(e.block))
		t.marks.sub(e.mark)
	}
	t.unlink(n)
	t.free = append(t.free, n)
}

func (t *Table) link(n uint32, list uint8) {
	t.entries[n].list = list
	t.count[list]++
	t.lists.push(uint32(list), n)
	t.stamp(n)
}

func (t *Table) unlink(n uint32) {
	t.count[t.entries[n].list]--
	t.lists.drop(n)
}

// touch makes an entry the most recently used of its list.
func (t *Table) touch(n uint32) {
	t.lists.drop(n)
	t.lists.push(uint32(t.entries[n].list), n)
	t.stamp(n)
}

// stamp numbers a change. It is called when an entry becomes the newest of its list, so
// each list is in the order of these numbers.
func (t *Table) stamp(n uint32) {
	t.changes++
	t.entries[n].change = t.changes
}
