package conversation

// Entry transfers one conversation with an id, or one prompt, from one table to another.
// Its instances have the numbers of the first table.
type Entry struct {
	Hash, Mark      uint64
	Block           uint64
	Key             Key
	LastUse         int64 // Unix time in ms
	Prefill, Decode Target
	Turn            int32
	Branches        uint8
	Spent           bool // a prompt that was continued
	ByID            bool
}

// Changes appends the entries that changed after the change with number since (0: all),
// in the order of the changes, and at most most entries. It returns the number for the
// next call. Changes does not report dropped entries: another table of the same capacity
// drops the same entries. Record waits while Changes copies the entries; this time does
// not depend on the size of the table.
func (t *Table) Changes(dst []Entry, since uint64, most int) (entries []Entry, until uint64) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	next := [lists]uint32{live: t.after(live, since), spent: t.after(spent, since)}
	for ; most > 0; most-- {
		list := live
		if next[live] < lists || next[spent] >= lists && t.entries[next[spent]].change < t.entries[next[live]].change {
			list = spent
		}
		n := next[list]
		if n < lists { // both are at their ends
			break
		}
		e := &t.entries[n]
		dst = append(dst, Entry{
			Hash: e.hash, Mark: e.mark, Block: e.block, Key: e.key, LastUse: e.last, Prefill: e.prefill, Decode: e.decode,
			Turn: e.turn, Branches: e.branches, Spent: list == spent, ByID: e.byID,
		})
		since, next[list] = e.change, t.lists.links[n].newer
	}
	return dst, since
}

// after finds the first entry of a list that changed after a change, or the list's head.
// It searches from both ends, because callers usually need recent changes, and a new
// table needs the oldest changes.
func (t *Table) after(list uint32, since uint64) uint32 {
	old, young := t.lists.oldest(list), t.lists.links[list].older
	for old >= lists {
		if t.entries[old].change > since {
			return old
		}
		if t.entries[young].change <= since {
			return t.lists.links[young].newer
		}
		old, young = t.lists.links[old].newer, t.lists.links[young].older
	}
	return list
}

// Take adds the entries of another table's Changes, in their order.
func (t *Table) Take(entries []Entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range entries {
		t.take(&entries[i])
	}
}

func (t *Table) take(from *Entry) {
	list := uint8(live)
	if from.Spent {
		list = spent
	}
	n := t.find(from.Hash, from.ByID)
	switch {
	case n == 0:
		n = t.room(list)
		t.entries[n] = entry{hash: from.Hash, block: from.Block, mark: from.Mark, byID: from.ByID}
		t.enter(n, list)
	case t.entries[n].list == list:
		t.touch(n)
	default:
		if t.count[list] == t.capacity {
			t.evict(list)
		}
		t.unlink(n)
		t.link(n, list)
	}
	e := &t.entries[n]
	e.key, e.last, e.prefill, e.decode = from.Key, from.LastUse, from.Prefill, from.Decode
	e.turn, e.branches = from.Turn, min(from.Branches, MaxBranches)
}

// Renumber replaces the numbers of all homes' instances; 0 removes a home.
func (t *Table) Renumber(number func(instance uint32) uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for n := lists; n < len(t.entries); n++ {
		e := &t.entries[n]
		e.prefill, e.decode = e.prefill.renumber(number), e.decode.renumber(number)
	}
}

func (home Target) renumber(number func(uint32) uint32) Target {
	if home.Instance == 0 {
		return Target{}
	}
	if home.Instance = number(home.Instance); home.Instance == 0 {
		return Target{}
	}
	return home
}
