package conversation

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// TestBegun: of the latest conversations those count that begin with the same blocks, and none
// for a conversation whose beginning nobody holds.
func TestBegun(t *testing.T) {
	var b Begun
	for n := range uint64(abi.SharedOf) {
		b.Add(kvindex.Hash(800 + 8*n))
	}
	for n := range uint32(5) {
		if same := b.Add(kvindex.Hash(80)); same != n {
			t.Errorf("%d of the same beginning, want %d", same, n)
		}
		if same := b.Add(0); same != 0 {
			t.Errorf("%d conversations begin with nothing", same)
		}
	}
	for n := range uint64(abi.SharedOf - 1) {
		b.Add(kvindex.Hash(800 + 8*n))
	}
	if same := b.Add(kvindex.Hash(80)); same != 0 {
		t.Errorf("%d conversations are older than the window", same)
	}
}

// TestFirstBegun: the first conversations of a model stand for all later ones.
func TestFirstBegun(t *testing.T) {
	var b Begun
	for n, want := range []uint32{0, abi.SharedOf, abi.SharedOf} {
		if same := b.Add(80); same != want {
			t.Errorf("%d of the same beginning after %d conversations, want %d", same, n, want)
		}
	}
	b.Add(0)
	if same := b.Add(80); same != abi.SharedOf*3/4 {
		t.Errorf("%d after three of four conversations with this beginning", same)
	}
	for range 2 * abi.SharedOf {
		b.Add(80)
	}
	if same := b.Add(80); same != abi.SharedOf {
		t.Errorf("%d although all conversations have this beginning", same)
	}
}

// TestBegins: a request begins a conversation if it is a first turn, repeats no prompt and has no
// parent's home.
func TestBegins(t *testing.T) {
	table, text := New(10), "a system prompt of some blocks, and the question of one client"
	ask := func(q Query, want bool) {
		t.Helper()
		turn := table.Look(q)
		if turn.Begins() != want {
			t.Errorf("turn %d, begins %v", turn.Number, turn.Begins())
		}
		table.Record(turn, at(1), at(2), time.Now())
	}
	ask(exact(text, 0), true)
	ask(exact(text, 0), false) // repeated
	ask(exact(text+" and more", 0), false)
	ask(exact("another text "+text, 0), true)
	ask(Query{}, false)
	ask(Query{ID: "a"}, true)
	ask(Query{ID: "a"}, false)
	ask(Query{ID: "b", Parent: "a"}, false)
	ask(Query{ID: "c", Parent: "unknown"}, true)
}
