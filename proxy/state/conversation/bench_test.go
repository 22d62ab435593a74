package conversation

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// fullTable returns a full table of prompts with a common beginning of 128 blocks. It
// also returns some of their chains, extended by 100 blocks.
func fullTable(blocks int) (table *Table, chains [][]kvindex.Hash) {
	const shared = 128
	table = New(DefaultCapacity)
	r := rand.New(rand.NewPCG(1, 1))
	system := make([]kvindex.Hash, shared)
	for i := range system {
		system[i] = kvindex.Hash(r.Uint64())
	}
	for n := range DefaultCapacity {
		chain := append(make([]kvindex.Hash, 0, blocks), system...)
		for len(chain) < blocks {
			chain = append(chain, kvindex.Hash(r.Uint64()))
		}
		serve(table, Query{Chain: chain[:blocks-100]}, at(1), at(2))
		if n%500 == 0 {
			chains = append(chains, chain)
		}
	}
	return table, chains
}

func BenchmarkLook(b *testing.B) {
	for _, blocks := range []int{256, 2048} {
		table, chains := fullTable(blocks)
		b.Run(fmt.Sprintf("next-turn-%d", blocks), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if turn := table.Look(Query{Chain: chains[i%len(chains)]}); turn.Number != 2 {
					b.Fatal(turn)
				}
			}
		})
		b.Run(fmt.Sprintf("first-turn-%d", blocks), func(b *testing.B) {
			r := rand.New(rand.NewPCG(3, 3))
			for i := range chains {
				for n := 130; n < blocks; n++ {
					chains[i][n] = kvindex.Hash(r.Uint64())
				}
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if turn := table.Look(Query{Chain: chains[i%len(chains)]}); turn.Number != 1 {
					b.Fatal(turn)
				}
			}
		})
	}
	b.Run("id", func(b *testing.B) {
		table := New(DefaultCapacity)
		ids := make([]string, DefaultCapacity)
		for i := range ids {
			ids[i] = fmt.Sprintf("6f1c2a34-0000-4000-8000-%012d", i)
			serve(table, Query{ID: ids[i]}, at(1), at(2))
		}
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			if turn := table.Look(Query{ID: ids[i*7919%len(ids)]}); turn.Number != 2 {
				b.Fatal(turn)
			}
		}
	})
}

// BenchmarkRecord records a new conversation each time, in a full table.
func BenchmarkRecord(b *testing.B) {
	table, _ := fullTable(256)
	chain := make([]kvindex.Hash, 256)
	r := rand.New(rand.NewPCG(2, 2))
	b.ReportAllocs()
	for b.Loop() {
		chain[0], chain[255] = kvindex.Hash(r.Uint64()), kvindex.Hash(r.Uint64())
		serve(table, Query{Chain: chain}, at(1), at(2))
	}
}

// BenchmarkScaleConversations measures full tables of up to a million conversations: bytes per
// conversation, and the time of a next turn, which is one look-up and one record. The prompts have
// 64 blocks.
func BenchmarkScaleConversations(b *testing.B) {
	for _, n := range []int{1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			before := usage.Heap()
			table, chains := New(n), make([][64]kvindex.Hash, 512)
			for i := range n {
				serve(table, Query{Chain: chainOf(&chains[0], i)[:56]}, at(1), at(2))
			}
			b.ReportMetric(float64(usage.Heap()-before)/float64(n), "B/conversation")
			r, turns, used := rand.New(rand.NewPCG(1, 2)), 0, time.Duration(0)
			for used < time.Second/4 {
				for i := range chains {
					chainOf(&chains[i], r.IntN(n))
				}
				start := usage.ProcessTime()
				for i := range chains {
					serve(table, Query{Chain: chains[i][:]}, at(3), at(4))
				}
				used += usage.ProcessTime() - start
				turns += len(chains)
			}
			b.ReportMetric(float64(used.Nanoseconds())/float64(turns), "cpu-ns/turn")
			b.ReportMetric(0, "ns/op") // the work has a fixed length
			runtime.KeepAlive(table)
		})
	}
}

// chainOf fills chain with the blocks of a conversation. All chains begin with the same 16 blocks.
func chainOf(chain *[64]kvindex.Hash, conversation int) []kvindex.Hash {
	r := rand.New(rand.NewPCG(uint64(conversation), 1))
	for i := range chain {
		if chain[i] = kvindex.Hash(i + 1); i >= 16 {
			chain[i] = kvindex.Hash(r.Uint64())
		}
	}
	return chain[:]
}
