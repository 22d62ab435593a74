package conversation

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// exact returns a query with the end of each word from block from on, as the proxy
// computes the ends.
func exact(text string, from int) Query {
	var positions []int32
	for i := max(1, from*blockBytes); i <= len(text); i++ {
		if i == len(text) || text[i] == ' ' || text[i-1] == ' ' {
			positions = append(positions, int32(i))
		}
	}
	blocks := chain(text)
	seed := kvindex.Seed("m", "", "")
	return Query{Scope: seed, Chain: blocks, EndsFrom: from, Ends: AppendEnds(nil, seed, blocks, blockBytes, []byte(text), positions)}
}

// TestTurnsThatAddLittle: with ends, a turn is recognized even if it adds only a few
// characters. Two prompts that differ only after their last whole block are different.
func TestTurnsThatAddLittle(t *testing.T) {
	for _, shared := range []string{"", "ab", system, strings.Repeat(system, 40)} {
		table := New(1000)
		const conversations = 60
		texts, keys := make([]string, conversations), make(map[Key]bool)
		for turn := range 6 {
			for i := range texts {
				texts[i] += fmt.Sprintf("%s%c%c ", map[bool]string{true: shared}[turn == 0], 'A'+i/26, 'a'+i%26)
				q := exact(texts[i], 0)
				q.First = turn == 0
				got := serve(table, q, at(uint32(i+1)), at(uint32(i+100)))
				if turn == 0 {
					keys[got.Key] = true
					if got.Number != 1 || got.Prefill != (Target{}) {
						t.Fatalf("%d bytes shared: first turn of %d: %+v", len(shared), i, got)
					}
				} else if got.Number != int32(turn+1) || got.Prefill != at(uint32(i+1)) || got.Decode != at(uint32(i+100)) || !keys[got.Key] {
					t.Fatalf("%d bytes shared: turn %d of %d: %+v", len(shared), turn+1, i, got)
				}
			}
		}
		if len(keys) != conversations || table.Len() != conversations {
			t.Errorf("%d keys: got %d conversations in the table, want %d", len(keys), table.Len(), conversations)
		}
		checkIndexes(t, table)
	}
}

// TestEndsThatNameNothing: a text that is not a whole earlier prompt identifies no
// conversation.
func TestEndsThatNameNothing(t *testing.T) {
	first := system + "What is the capital of France?"
	for name, text := range map[string]string{
		"another last word":        system + "What is the capital of Spain?",
		"its last word is longer":  first + "! And of Spain?",
		"less than it":             system + "What is the capital of",
		"another beginning":        "x" + first + " Paris.",
		"the same blocks, shorter": system + "What is the capital of Fran",
	} {
		table := New(10)
		serve(table, exact(first, 0), at(1), at(2))
		if got := table.Look(exact(text, 0)); got.Number != 1 || got.Prefill != (Target{}) {
			t.Errorf("%s: table.Look(exact(text, 0)) = %+v", name, got)
		}
	}
}

// TestEndsOfAPart: an earlier prompt may have ended before the part whose ends are known.
// It is found by its last whole block, if no other prompt has the same last block.
func TestEndsOfAPart(t *testing.T) {
	first := system + "What is the capital of France?"
	later := first + strings.Repeat(" And so on and on.", 20)
	for others, want := range []int32{2, 1, 1} {
		table := New(10)
		serve(table, exact(first, 0), at(1), at(2))
		for i := range others {
			serve(table, exact(first[:len(first)-1]+string(rune('a'+i)), 0), at(3), at(4))
		}
		if got := table.Look(exact(later, len(chain(later))-4)); got.Number != want {
			t.Errorf("got %d others: %+v, want turn %d", others, got, want)
		}
		if got := table.Look(exact(later, 0)); got.Number != 2 || got.Prefill != at(1) {
			t.Errorf("%d others, all ends: %+v", others, got)
		}
	}
}

// TestEndsAgainstText compares a table with a search through all earlier texts.
func TestEndsAgainstText(t *testing.T) {
	for seed := range uint64(6) {
		r := rand.New(rand.NewPCG(seed, 7))
		table := New(5000)
		type known struct {
			text     string
			number   int32
			branches int
		}
		earlier := map[string]*known{}
		for step := range 800 {
			text := ""
			if len(earlier) > 0 && r.IntN(4) > 0 {
				for text = range earlier {
					break
				}
			}
			for range 1 + r.IntN(4) {
				text += strings.Repeat(string(rune('a'+r.IntN(2))), 1+r.IntN(9)) + " "
			}
			text = strings.TrimSuffix(text, " ")
			got := serve(table, exact(text, 0), at(1), at(2))
			want, parent := int32(1), (*known)(nil)
			if same := earlier[text]; same != nil {
				want = same.number
			} else {
				for end := len(text) - 1; end > 0 && parent == nil; end-- {
					if text[end] == ' ' {
						parent = earlier[text[:end]]
					}
				}
				if parent != nil && parent.branches < MaxBranches {
					want = parent.number + 1
				}
				if parent != nil {
					parent.branches++
				}
				earlier[text] = &known{text: text, number: want}
			}
			if got.Number != want {
				t.Fatalf("seed %d, step %d: turn %d of %q, want %d", seed, step, got.Number, text, want)
			}
		}
		checkIndexes(t, table)
	}
}

func BenchmarkLookEnds(b *testing.B) {
	text := strings.Repeat("several words of a prompt ", 320) // 8 KB
	table := New(DefaultCapacity)
	for i := range 1000 {
		serve(table, exact(fmt.Sprintf("%sand question %d of many", text[:4096], i), 0), at(1), at(2))
	}
	q := exact(text, 0)
	b.ReportAllocs()
	for b.Loop() {
		table.Look(q)
	}
}
