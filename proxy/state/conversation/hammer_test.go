package conversation

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// TestHammer: many goroutines call Look and Record and set values in one small table. All
// goroutines write the same data about a conversation, so every read must return this
// data.
func TestHammer(t *testing.T) {
	table := New(50)
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(g, 2))
			var text []byte
			for range 3000 {
				c := r.IntN(100)
				q := Query{ID: string(rune('a' + c))}
				if c >= 50 {
					q = Query{Chain: make([]kvindex.Hash, 2+r.IntN(150))}
					for i := range q.Chain {
						q.Chain[i] = kvindex.Hash(c<<32 + i)
					}
				}
				turn := table.Look(q)
				home := at(uint32(c + 1))
				if turn.Number < 1 || turn.Number > 1 && (turn.Prefill != home || turn.Decode != home) {
					t.Errorf("conversation %d: %+v", c, turn)
				}
				table.Record(turn, home, home, epoch)
				text = turn.Key.AppendText(text[:0])
				if v, ok := table.Value(nil, string(text)); ok && string(v) != string(text) {
					t.Errorf("value %q of %q", v, text)
				}
				if err := table.SetValue(string(text), text); err != nil {
					t.Error(err)
				}
				if n := table.Len(); n > 50 {
					t.Errorf("got %d conversations", n)
				}
			}
		})
	}
	wg.Wait()
	checkIndexes(t, table)
}
