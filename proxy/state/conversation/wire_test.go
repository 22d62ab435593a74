package conversation

import (
	"bytes"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/wire"
)

// turnsThatTravel returns requests with and without an id that begin and continue
// conversations.
func turnsThatTravel() []Query {
	first := system + "What is the capital of France?"
	return []Query{
		{}, {ID: "x"}, {ID: "x"}, prompt(first), prompt(first + " Paris. And of Spain?"), prompt(first), {Chain: chain(system), First: true},
	}
}

// TestTurnsTravel: a turn that was encoded and decoded is recorded like the original
// turn.
func TestTurnsTravel(t *testing.T) {
	here, there := New(10), New(10)
	for i, q := range turnsThatTravel() {
		turn := here.Look(q)
		b := turn.Append([]byte("before"))
		r := wire.Read(append(b, "after"...)[len("before"):])
		got := ReadTurn(&r)
		turn.repeats = false // does not travel, because only a conversation's first placement uses it
		if rest := r.Rest(); r.Failed() || got != turn || string(rest) != "after" {
			t.Fatalf("turn %d: %+v, want %+v; rest %q", i, got, turn, rest)
		}
		here.Record(turn, at(1), at(2), epoch)
		there.Record(got, at(1), at(2), epoch)
		if a, b := here.Look(q), there.Look(q); a != b {
			t.Errorf("turn %d is remembered as %+v and %+v", i, a, b)
		}
		for n := len("before"); n < len(b); n++ {
			if r := wire.Read(b[len("before"):n]); ReadTurn(&r) != (Turn{}) || !r.Failed() {
				t.Errorf("a part of a turn decodes as a turn")
			}
		}
	}
}

func FuzzReadTurn(f *testing.F) {
	turn := Turn{Key: 3, Number: 2, Prefill: at(1), hash: 7, kept: true, continues: true}
	f.Add(turn.Append(nil))
	unknown := turn.Append(nil)
	unknown[turnSize-1] = 0xff // flags that no turn has
	f.Add(unknown)
	f.Add(turn.Append(nil)[:turnSize-1])
	f.Add([]byte("x"))
	seen := New(10)
	for _, q := range turnsThatTravel() {
		turn := seen.Look(q)
		f.Add(turn.Append([]byte(nil)))
		f.Add(turn.Append(turn.Append(nil))) // a message with further bytes after the turn
		seen.Record(turn, at(1), at(2), epoch)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := wire.Read(b)
		turn := ReadTurn(&r)
		if !r.Failed() && !bytes.Equal(append(turn.Append(nil), r.Rest()...), b) {
			t.Errorf("%x reads as %+v", b, turn)
		}
	})
}
