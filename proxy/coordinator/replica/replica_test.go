package replica

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

var epoch = time.UnixMilli(1_800_000_000_000)

func at(instance uint32, rank int32) conversation.Target {
	return conversation.Target{Instance: instance, Rank: rank}
}

// turn serves one turn of a conversation.
func turn(t *conversation.Table, id string, prefill, decode conversation.Target) {
	t.Record(t.Look(conversation.Query{ID: id}), prefill, decode, epoch)
}

// fleet holds the instances of one coordinator by their numbers.
type fleet map[uint32]string

func (f fleet) name(n uint32) string { return f[n] }

func (f fleet) number(name string) uint32 {
	for n, have := range f {
		if have == name {
			return n
		}
	}
	return 0
}

// pull sends questions to the leader until it has no more changes.
func pull(t *testing.T, c *Copy, s *Source) {
	t.Helper()
	for {
		answer, rest, err := s.Answer(nil, c.Question(nil))
		if err != nil || len(answer) > MaxAnswer {
			t.Fatal(len(answer), err)
		}
		more, err := c.Take(answer)
		if err != nil || more != rest {
			t.Fatal(more, rest, err)
		}
		if !more {
			return
		}
	}
}

func TestHomesFollowNames(t *testing.T) {
	leader, standby := conversation.New(5000), conversation.New(5000)
	there := fleet{7: "p0", 8: "d0", 9: "d1", 11: strings.Repeat("x", maxName+1)}
	here := fleet{1: "d1", 2: "d0", 3: "p0", 4: "d2"}
	s, c := NewSource(leader, there.name), NewCopy(standby)
	turn(standby, "own", at(3, 0), at(4, 2))
	c.Follow(here.name)
	for i := range 2500 { // more than fit into one answer
		turn(leader, fmt.Sprint("c", i), at(7, int32(i%4)), at(8, 1))
	}
	turn(leader, "gone", at(7, 0), at(10, 0))
	turn(leader, "long", at(7, 0), at(11, 0))
	if c.InStep() {
		t.Error("InStep = true without a leader")
	}
	pull(t, c, s)
	if !c.InStep() {
		t.Error("InStep = false")
	}
	turn(leader, "c0", at(7, 3), at(9, 0)) // c0 moves
	pull(t, c, s)
	c.Lead(here.number)
	for id, want := range map[string]conversation.Turn{
		"own":   {Number: 2, Prefill: at(3, 0), Decode: at(4, 2)},
		"c0":    {Number: 3, Prefill: at(3, 3), Decode: at(1, 0)},
		"c2499": {Number: 2, Prefill: at(3, 3), Decode: at(2, 1)},
		"gone":  {Number: 2, Prefill: at(3, 0)},
		"long":  {Number: 2, Prefill: at(3, 0)},
	} {
		got := standby.Look(conversation.Query{ID: id})
		if got.Number != want.Number || got.Prefill != want.Prefill || got.Decode != want.Decode {
			t.Errorf("%s: standby.Look = %+v, want %+v", id, got, want)
		}
	}

	// The former leader, which has its own table, follows the new leader.
	back := NewCopy(leader)
	back.Follow(there.name)
	pull(t, back, NewSource(standby, here.name))
	back.Lead(fleet{7: "p0", 9: "d1"}.number)
	got := leader.Look(conversation.Query{ID: "c0"})
	if got.Number != 3 || got.Prefill != at(7, 3) || got.Decode != at(9, 0) {
		t.Errorf("back at the former leader %+v", got)
	}
	if got := leader.Look(conversation.Query{ID: "c1"}); got.Number != 2 || got.Decode != (conversation.Target{}) {
		t.Errorf("home on an instance that has left: %+v", got)
	}
}

// TestStrayHomes: a home that was recorded while the process was a standby is dropped
// when the process leads.
func TestStrayHomes(t *testing.T) {
	table := conversation.New(10)
	here := fleet{1: "p0", 2: "d0", 9: "d1"}
	c := NewCopy(table)
	turn(table, "own", at(1, 0), at(9, 0))
	c.Follow(here.name)
	turn(table, "stray", at(1<<32-1, 0), at(9, 0))
	c.Lead(here.number)
	for id, want := range map[string]conversation.Turn{"own": {Prefill: at(1, 0), Decode: at(9, 0)}, "stray": {}} {
		if got := table.Look(conversation.Query{ID: id}); got.Number != 2 || got.Prefill != want.Prefill || got.Decode != want.Decode {
			t.Errorf("%s: table.Look = %+v, want %+v", id, got, want)
		}
	}
}

// TestAnotherLeader: the position in one leader's changes has no meaning for the next
// leader.
func TestAnotherLeader(t *testing.T) {
	instances := fleet{1: "a"}
	first, second := conversation.New(10), conversation.New(10)
	for range 5 {
		turn(first, "x", at(1, 0), at(1, 0))
	}
	turn(second, "y", at(1, 1), at(1, 1))
	table := conversation.New(10)
	c := NewCopy(table)
	c.Follow(instances.name)
	pull(t, c, NewSource(first, instances.name))
	pull(t, c, NewSource(second, instances.name))
	c.Lead(instances.number)
	if x, y := table.Look(conversation.Query{ID: "x"}), table.Look(conversation.Query{ID: "y"}); x.Number != 6 || y.Number != 2 || y.Decode != at(1, 1) {
		t.Errorf("%+v, %+v", x, y)
	}
}

// TestRun: the leader first does not answer, then answers garbage, then answers. A later
// change of the leader arrives within a tenth of a second.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		instances := fleet{1: "a"}
		leader, table := conversation.New(10), conversation.New(10)
		s, c := NewSource(leader, instances.name), NewCopy(table)
		c.Follow(instances.name)
		turn(leader, "x", at(1, 0), at(1, 0))
		ctx, stop := context.WithCancel(t.Context())
		asked := 0
		var failures []error
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.Run(ctx, func(_ context.Context, question []byte) ([]byte, error) {
				switch asked++; asked {
				case 1, 2:
					return nil, errors.New("no route")
				case 3:
					return []byte("<html>"), nil
				}
				answer, _, err := s.Answer(nil, question)
				return answer, err
			}, func(err error) { failures = append(failures, err) })
		}()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if !c.InStep() || len(failures) != 1 || !strings.Contains(failures[0].Error(), "no route") {
			t.Errorf("in step %v, failures %v", c.InStep(), failures)
		}
		turn(leader, "y", at(1, 0), at(1, 2))
		time.Sleep(every)
		synctest.Wait()
		stop()
		<-done
		c.Lead(instances.number)
		if got := table.Look(conversation.Query{ID: "y"}); got.Number != 2 || got.Decode != at(1, 2) {
			t.Errorf("table.Look = %+v", got)
		}
	})
}

func TestMalformed(t *testing.T) {
	leader := conversation.New(10)
	turn(leader, "x", at(1, 0), at(2, 0))
	s := NewSource(leader, fleet{1: "a", 2: "b"}.name)
	whole, _, err := s.Answer(nil, NewCopy(leader).Question(nil))
	if err != nil {
		t.Fatal(err)
	}
	home := func(h *fleetpb.Home) []byte {
		return fleetpb.Append(nil, &fleetpb.Homes{Table: 1, Names: []string{"a"}, Homes: []*fleetpb.Home{h}})
	}
	for name, b := range map[string][]byte{
		"nothing": nil, "a part": whole[:len(whole)-1], "no turn": home(&fleetpb.Home{}),
		"unknown name": home(&fleetpb.Home{Turn: 1, Decode: 2}), "rank": home(&fleetpb.Home{Turn: 1, Decode: 1, DecodeRank: -1}),
		"too many": fleetpb.Append(nil, &fleetpb.Homes{Table: 1, Homes: slices.Repeat([]*fleetpb.Home{{Turn: 1}}, most+1)}),
	} {
		if _, err := NewCopy(conversation.New(10)).Take(b); err == nil {
			t.Errorf("%s is accepted as an answer", name)
		}
	}
	later := append(slices.Clone(whole), 0xf8, 0x3f, 1) // the field 1023
	if _, err := NewCopy(conversation.New(10)).Take(later); err != nil {
		t.Errorf("an answer with an unknown field: %v", err)
	}
	if _, _, err := s.Answer(nil, []byte("<html>")); err == nil {
		t.Error("a malformed question is accepted")
	}
}

// FuzzAnswer: any bytes that are accepted as an answer leave a usable table. The table
// has the entries of the answer and can answer in turn.
func FuzzAnswer(f *testing.F) {
	leader := conversation.New(10)
	s := NewSource(leader, fleet{1: "a", 2: "b"}.name)
	seed := func() {
		answer, _, err := s.Answer(nil, NewCopy(leader).Question(nil))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(answer)
	}
	seed()
	turn(leader, "x", at(1, 0), at(2, 3))
	seed()
	turn(leader, "y", at(2, 1), conversation.Target{})
	seed()
	f.Fuzz(func(t *testing.T, answer []byte) {
		table := conversation.New(3)
		turn(table, "own", at(5, 0), at(6, 0))
		own := fleet{5: "a", 6: "z"}
		c := NewCopy(table)
		c.Follow(own.name)
		if _, err := c.Take(answer); err != nil {
			return
		}
		if n := table.Len(); n > 3 {
			t.Fatalf("got %d conversations", n)
		}
		names := slices.Collect(maps.Keys(c.numbers))
		c.Lead(func(name string) uint32 { return uint32(slices.Index(names, name) + 1) })
		again := NewCopy(conversation.New(3))
		again.Follow(own.name)
		pull(t, again, NewSource(table, func(n uint32) string { return names[n-1] }))
		turn(table, "own", at(5, 0), at(6, 0))
	})
}
