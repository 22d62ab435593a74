package conversation

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// model is a slow definition of a Table: lists in the order of use, which are searched
// completely.
type model struct {
	capacity    int
	live, spent []*known // oldest first
}

type known struct {
	id              string
	blocks          []kvindex.Hash
	key             Key
	turn            int32
	branches        int
	prefill, decode Target
}

func (m *model) find(id string, blocks []kvindex.Hash) *known {
	for _, k := range append(slices.Clone(m.live), m.spent...) {
		if k.id == id && slices.Equal(k.blocks, blocks) {
			return k
		}
	}
	return nil
}

// longest returns the known prompt with the most blocks that is a prefix of blocks.
func (m *model) longest(blocks []kvindex.Hash) (best *known) {
	for _, k := range append(slices.Clone(m.live), m.spent...) {
		if n := len(k.blocks); k.id == "" && n < len(blocks) && slices.Equal(k.blocks, blocks[:n]) && (best == nil || n > len(best.blocks)) {
			best = k
		}
	}
	return best
}

// serve is Look and Record. It returns the expected result of Look.
func (m *model) serve(q Query, prefill, decode Target, turn Turn) (want Turn) {
	blocks := q.Chain
	if q.ID != "" {
		blocks = nil
	} else if len(blocks) < LeastBlocks {
		return Turn{Number: min(1, int32(len(blocks)))}
	}
	want = Turn{Key: turn.Key, Number: 1}
	same, parent := m.find(q.ID, blocks), (*known)(nil)
	switch {
	case q.ID != "" && same != nil:
		want = Turn{Key: same.key, Number: same.turn + 1, Prefill: same.prefill, Decode: same.decode}
	case same != nil && same.turn > 1 && !q.First:
		want = Turn{Key: same.key, Number: same.turn, Prefill: same.prefill, Decode: same.decode}
	case same != nil:
		want.Key = same.key
	case q.ID == "" && !q.First:
		parent = m.longest(blocks)
		if parent != nil && parent.branches < MaxBranches {
			want = Turn{Key: parent.key, Number: parent.turn + 1, Prefill: parent.prefill, Decode: parent.decode}
		}
	}
	if same == nil {
		if parent != nil {
			parent.branches = min(parent.branches+1, MaxBranches)
			m.live, m.spent = without(m.live, parent), append(without(m.spent, parent), parent)
			m.spent = m.spent[max(0, len(m.spent)-m.capacity):]
		}
		same = &known{id: q.ID, blocks: slices.Clone(blocks), key: want.Key, prefill: want.Prefill, decode: want.Decode}
		m.live = append(m.live, same)
		m.live = m.live[max(0, len(m.live)-m.capacity):]
	} else if slices.Contains(m.live, same) {
		m.live = append(without(m.live, same), same)
	} else {
		m.spent = append(without(m.spent, same), same)
	}
	same.turn = max(same.turn, want.Number)
	if prefill.Instance != 0 {
		same.prefill = prefill
	}
	if decode.Instance != 0 {
		same.decode = decode
	}
	return want
}

func without(list []*known, k *known) []*known {
	return slices.DeleteFunc(slices.Clone(list), func(o *known) bool { return o == k })
}

// TestAgainstModel sends random requests that begin, continue, branch, repeat or have
// ids, and compares every result with the model.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 1))
		capacity := []int{1, 2, 7, 60}[seed%4]
		table, m := New(capacity), &model{capacity: capacity}
		var sent [][]kvindex.Hash
		later := 0
		for step := range 1500 {
			var q Query
			switch kind := r.IntN(10); {
			case kind == 0:
				q.ID = string(rune('a' + r.IntN(2*capacity)))
			case kind < 3 || len(sent) == 0: // a common beginning
				q.Chain = extend(r, nil, r.IntN(3))
			case kind < 4:
				q.Chain = sent[r.IntN(len(sent))]
			default: // mostly a recent request
				from := sent[max(0, len(sent)-1-r.IntN(2*capacity))]
				q.Chain = extend(r, from, 1+r.IntN(3))
				if r.IntN(20) == 0 {
					q.Chain = extend(r, from, 50+r.IntN(150))
				}
			}
			if len(q.Chain) > 700 {
				q.Chain = q.Chain[:600]
			}
			q.First = r.IntN(20) == 0
			if q.ID == "" && len(q.Chain) > 0 {
				sent = append(sent, q.Chain)
			}
			prefill := Target{Instance: uint32(r.IntN(4)), Rank: r.Int32N(4)}
			decode := Target{Instance: uint32(r.IntN(4)), Rank: r.Int32N(4)}
			got := table.Look(q)
			want := m.serve(q, prefill, decode, got)
			if q.First && len(q.Chain) == 0 && q.ID == "" {
				want.Number = 1
			}
			if got.Key != want.Key || got.Number != want.Number || got.Prefill != want.Prefill || got.Decode != want.Decode {
				t.Fatalf("seed %d, step %d: %+v, want %+v", seed, step, got, want)
			}
			if got.Number > 1 {
				later++
			}
			table.Record(got, prefill, decode, epoch)
			table.Record(got, prefill, decode, epoch)
			if table.Len() != len(m.live) || table.count[spent] != len(m.spent) {
				t.Fatalf("seed %d, step %d: %d and %d entries, want %d and %d", seed, step, table.Len(), table.count[spent], len(m.live), len(m.spent))
			}
		}
		if capacity > 2 && later < 300 {
			t.Errorf("capacity %d: only %d later turns; the test tests nothing", capacity, later)
		}
		checkIndexes(t, table)
	}
}

// extend continues a chain by n blocks from a small set.
func extend(r *rand.Rand, from []kvindex.Hash, n int) []kvindex.Hash {
	chain := slices.Clone(from)
	for range n {
		parent := kvindex.Hash(0)
		if len(chain) > 0 {
			parent = chain[len(chain)-1]
		}
		chain = append(chain, (parent+kvindex.Hash(r.IntN(3))+1)*0x9FB21C651E98DF25)
	}
	return chain
}

// checkIndexes checks that every entry is in the index, that every mark is counted, and
// that the index contains nothing else.
func checkIndexes(t *testing.T, table *Table) {
	t.Helper()
	marks, entries, blocks := 0, 0, 0
	for _, cell := range table.blocks.cells {
		if cell != 0 {
			blocks++
		}
	}
	for _, cell := range table.marks.cells {
		marks += int(uint32(cell))
	}
	for _, cell := range table.index.cells {
		if cell == 0 {
			continue
		}
		entries++
		n := uint32(cell)
		e := &table.entries[n]
		if table.find(e.hash, e.byID) != n {
			t.Errorf("entry %d is not found", n)
		}
		if !e.byID {
			if marks -= 2; !table.marks.has(e.mark) || !table.marks.has(blockMark(e.block)) {
				t.Errorf("entry %d has no mark", n)
			}
			if e.first {
				blocks--
			}
		}
	}
	if blocks != 0 {
		t.Errorf("the count of blocks is %d too high", blocks)
	}
	if marks != 0 || entries != table.count[live]+table.count[spent] {
		t.Errorf("the count of marks is %d too high; %d entries in the index, %d and %d in the lists", marks, entries, table.count[live], table.count[spent])
	}
}
