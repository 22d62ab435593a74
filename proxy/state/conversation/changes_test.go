package conversation

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// TestChangesMakeTheSameTable changes one table at random. Another table gets the changes
// in batches of any size, beginning at any time. In the end both tables must be equal,
// including the order of use.
func TestChangesMakeTheSameTable(t *testing.T) {
	for seed := range uint64(16) {
		r := rand.New(rand.NewPCG(seed, 5))
		capacity := []int{1, 2, 9, 80}[seed%4]
		from, to := New(capacity), New(capacity)
		var sent [][]kvindex.Hash
		var since uint64
		var batch []Entry
		begin := r.IntN(600)
		for step := range 1200 {
			q := Query{ID: string(rune('a' + r.IntN(3*capacity)))}
			if r.IntN(3) > 0 {
				q = Query{Chain: extend(r, nil, 2+r.IntN(3))}
				if len(sent) > 0 && r.IntN(3) > 0 {
					q.Chain = extend(r, sent[max(0, len(sent)-1-r.IntN(2*capacity))], 1+r.IntN(3))
				}
				sent = append(sent, q.Chain)
			}
			serve(from, q, at(uint32(1+r.IntN(4))), at(uint32(1+r.IntN(4))))
			if step < begin || r.IntN(4) > 0 {
				continue
			}
			batch, since = from.Changes(batch[:0], since, 1+r.IntN(12))
			to.Take(batch)
		}
		for {
			if batch, since = from.Changes(batch[:0], since, 7); len(batch) == 0 {
				break
			}
			to.Take(batch)
		}
		want, _ := from.Changes(nil, 0, 1000)
		got, _ := to.Changes(nil, 0, 1000)
		if len(want) < capacity || !slices.Equal(got, want) {
			t.Errorf("seed %d: %d entries, want %d; not the same", seed, len(got), len(want))
		}
		checkIndexes(t, to)
		for range 50 {
			q := Query{Chain: extend(r, sent[max(0, len(sent)-1-r.IntN(2*capacity))], r.IntN(3))}
			if got, want := to.Look(q), from.Look(q); got != want {
				t.Errorf("seed %d: %+v, want %+v", seed, got, want)
			}
		}
	}
}

// TestTakeOverOwn: a table with its own entries gets the entries of another table. Some
// of these are in the other list there.
func TestTakeOverOwn(t *testing.T) {
	from, to := New(3), New(3)
	first := prompt(system + "What is the capital of France?")
	second := prompt(system + "What is the capital of France? Paris. And of Spain?")
	serve(from, first, at(1), at(2))
	serve(to, first, at(3), at(4))
	serve(to, second, at(3), at(4)) // first is spent from here on
	all, _ := from.Changes(nil, 0, 10)
	all[0].Branches = 200
	to.Take(all)
	if turn := to.Look(second); turn.Number != 2 || turn.Prefill != at(3) {
		t.Errorf("an entry that the other table does not know was lost: %+v", turn)
	}
	if n := to.find(uint64(first.Chain[len(first.Chain)-1]), false); to.entries[n].list != live || to.entries[n].prefill != at(1) || to.entries[n].branches != MaxBranches {
		t.Errorf("got %+v, want the entry of the other table", to.entries[n])
	}
	checkIndexes(t, to)
}

func TestRenumber(t *testing.T) {
	table := New(4)
	for _, id := range []string{"a", "b", "c"} {
		serve(table, Query{ID: id}, at(1+uint32(id[0]-'a')), Target{})
	}
	table.Renumber(func(n uint32) uint32 {
		if n == 0 {
			t.Error("the name of an empty home was requested")
		}
		return map[uint32]uint32{1: 70, 3: 90}[n]
	})
	for id, want := range map[string]Target{"a": {70, 0}, "b": {}, "c": {90, 2}} {
		if turn := table.Look(Query{ID: id}); turn.Number != 2 || turn.Prefill != want || turn.Decode != (Target{}) {
			t.Errorf("%s: table.Look = %+v", id, turn)
		}
	}
}

// BenchmarkChanges requests a batch from a full table: from its middle, and the recent
// changes.
func BenchmarkChanges(b *testing.B) {
	table, _ := fullTable(256)
	for name, back := range map[string]uint64{"late": 1000, "middle": DefaultCapacity / 2} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			batch := make([]Entry, 0, 1024)
			for b.Loop() {
				if batch, _ = table.Changes(batch[:0], table.changes-back, 1000); len(batch) != 1000 {
					b.Fatal(len(batch))
				}
			}
		})
	}
}
