package conversation

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"
)

var shelfNow = time.Unix(1_000_000, 0)

// put stores a value for a minute, and returns the values that leave.
func put(s *Shelf[string], scope, name, value string, ids ...uint32) []string {
	return putFor(s, time.Minute, 1000, scope, name, value, ids...)
}

// putFor stores a value for a time with a likelihood. The entry expires after two minutes.
func putFor(s *Shelf[string], keep time.Duration, likelihood uint16, scope, name, value string, ids ...uint32) (out []string) {
	replaced, evicted, _ := s.Put(OnShelf[string]{
		Scope: scope, Name: name, IDs: ids, Ended: shelfNow, Until: shelfNow.Add(keep), Expires: shelfNow.Add(2 * time.Minute), Likelihood: likelihood, Value: value,
	}, shelfNow)
	return append(valuesOf(replaced), valuesOf(evicted)...)
}

func valuesOf(all []OnShelf[string]) (values []string) {
	for _, o := range all {
		values = append(values, o.Value)
	}
	return values
}

// A list gets a value only if it begins with all ids of the value.
func TestShelfWantsTheWholePrefix(t *testing.T) {
	for _, tt := range []struct {
		name  string
		scope string
		ids   []uint32
		want  string
	}{
		{"longer", "m", []uint32{1, 2, 3, 4}, "v"},
		{"equal", "m", []uint32{1, 2, 3}, "v"},
		{"shorter", "m", []uint32{1, 2}, ""},
		{"another last", "m", []uint32{1, 2, 4, 4}, ""},
		{"another first", "m", []uint32{2, 2, 3, 4}, ""},
		{"of another model", "n", []uint32{1, 2, 3, 4}, ""},
		{"none", "m", nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := NewShelf[string](4, 100)
			put(s, "m", "", "v", 1, 2, 3)
			got, hasValue, ok := s.Take(tt.scope, tt.ids, shelfNow)
			if got.Value != tt.want || ok != (tt.want != "") || hasValue != ok {
				t.Errorf("got %q, %t, %t", got.Value, hasValue, ok)
			}
			if ok != s.Empty() {
				t.Error("a value is to be handed out once")
			}
			if again, _, ok := s.Take(tt.scope, tt.ids, shelfNow); ok {
				t.Errorf("handed out again: %q", again.Value)
			}
		})
	}
}

func TestShelfGivesTheLongest(t *testing.T) {
	s := NewShelf[string](9, 100)
	put(s, "m", "", "short", 1, 2)
	put(s, "m", "", "long", 1, 2, 3, 4)
	put(s, "m", "", "other", 1, 2, 3, 5)
	for _, want := range []string{"long", "short"} {
		if got, _, _ := s.Take("m", []uint32{1, 2, 3, 4, 5}, shelfNow); got.Value != want {
			t.Errorf("got %q, want %q", got.Value, want)
		}
	}
}

func TestShelfMakesRoom(t *testing.T) {
	s := NewShelf[string](2, 6)
	if out := put(s, "m", "a", "1", 1, 2); out != nil {
		t.Errorf("out: %v", out)
	}
	if out := put(s, "m", "a", "2", 1, 2, 3); !slices.Equal(out, []string{"1"}) {
		t.Errorf("value of the same conversation: dropped %v", out)
	}
	if out := put(s, "n", "a", "3", 1, 2, 3); out != nil {
		t.Errorf("value of another scope: dropped %v", out)
	}
	if out := put(s, "m", "", "4", 1, 2); !slices.Equal(out, []string{"2"}) {
		t.Errorf("a third: out %v", out)
	}
	if out := put(s, "m", "", "5", 1, 2, 3, 4, 5, 6); !slices.Equal(out, []string{"3", "4"}) {
		t.Errorf("many ids: out %v", out)
	}
	if out := put(s, "m", "", "6", 1, 2, 3, 4, 5, 6, 7); !slices.Equal(out, []string{"5", "6"}) {
		t.Errorf("list above the limit of ids: dropped %v", out)
	}
	put(s, "m", "b", "7", 8, 9)
	if n := s.full.Len() + s.empty.Len(); n != 2 {
		t.Errorf("%d entries", n)
	}
	if all := valuesOf(s.TakeAll()); !slices.Equal(all, []string{"7"}) || !s.Empty() || len(s.byHash)+len(s.byName)+len(s.lengths)+s.ids != 0 {
		t.Errorf("all: %v", all)
	}
}

// TestShelfEvictsTheLeastLikely: the value whose next turn is the least likely leaves first. The
// likelihood decreases while the turn does not come.
func TestShelfEvictsTheLeastLikely(t *testing.T) {
	s := NewShelf[string](3, 100)
	putFor(s, time.Minute, 900, "m", "", "likely", 1)
	putFor(s, time.Minute, 100, "m", "", "unlikely", 2)
	putFor(s, 20*time.Second, 500, "m", "", "brief", 3)
	if out := putFor(s, time.Minute, 50, "m", "", "least", 4); !slices.Equal(out, []string{"least"}) {
		t.Errorf("a less likely value: %v left", out)
	}
	if out := putFor(s, time.Minute, 300, "m", "", "new", 5); !slices.Equal(out, []string{"unlikely"}) {
		t.Errorf("a more likely value: %v left", out)
	}
	every := func(*OnShelf[string]) bool { return true }
	late := shelfNow.Add(15 * time.Second) // brief has a quarter of its likelihood, the others three quarters
	if out := valuesOf(s.Evict(every, 2, late)); !slices.Equal(out, []string{"brief", "new"}) {
		t.Errorf("%v left", out)
	}
	if out := s.Evict(func(o *OnShelf[string]) bool { return o.Value == "another" }, 1, late); out != nil {
		t.Errorf("%v left", valuesOf(out))
	}
	if got, hasValue, ok := s.Take("m", []uint32{1, 7}, late); !hasValue || !ok || got.Value != "likely" {
		t.Errorf("got %q", got.Value)
	}
}

// TestShelfSweep: a value leaves at the end of its time, and its entry when it expires. Between the
// two, a turn that comes finds the entry by its ids or by its name.
func TestShelfSweep(t *testing.T) {
	begin := func() *Shelf[string] {
		s := NewShelf[string](9, 100)
		putFor(s, 10*time.Second, 1, "m", "a", "v", 1, 2)
		putFor(s, 0, 1, "m", "b", "w", 3)
		if ended, lost, next := s.Sweep(shelfNow.Add(9 * time.Second)); ended != nil || lost != nil || !next.Equal(shelfNow.Add(10*time.Second)) {
			t.Errorf("ended %v, lost %v, next %v", ended, lost, next)
		}
		if _, hasValue, ok := s.Named("m", "a"); !hasValue || ok {
			t.Error("the value has left too early")
		}
		ended, lost, next := s.Sweep(shelfNow.Add(10 * time.Second))
		if got := valuesOf(ended); !slices.Equal(got, []string{"v"}) || lost != nil || !next.Equal(shelfNow.Add(2*time.Minute)) {
			t.Errorf("ended %v, lost %v, next %v", got, lost, next)
		}
		if s.ids != 0 {
			t.Errorf("%d ids", s.ids)
		}
		return s
	}
	s := begin()
	if o, hasValue, ok := s.Take("m", []uint32{1, 2, 5}, shelfNow); hasValue || !ok || o.Name != "a" || o.Value != "" {
		t.Errorf("by ids: %+v, %v, %v", o, hasValue, ok)
	}
	if _, _, ok := s.Take("m", []uint32{1, 2, 5}, shelfNow); ok {
		t.Error("found twice")
	}
	if o, hasValue, ok := s.TakeNamed("m", "b"); hasValue || !ok || o.Value != "" {
		t.Errorf("by name: %+v, %v, %v", o, hasValue, ok)
	}
	s = begin()
	if o, hasValue, ok := s.Named("m", "a"); hasValue || !ok || o.Name != "a" {
		t.Errorf("by name: %+v, %v, %v", o, hasValue, ok)
	}
	put(s, "m", "", "x", 1)
	if o, hasValue, ok := s.Take("m", []uint32{1, 2, 5}, shelfNow); !hasValue || !ok || o.Value != "x" {
		t.Errorf("a shorter list with a value: %+v, %v, %v", o, hasValue, ok)
	}
	if _, lost, next := s.Sweep(shelfNow.Add(2 * time.Minute)); len(lost) != 1 || lost[0].Name != "b" || !next.IsZero() || !s.Empty() {
		t.Errorf("lost %+v, next %v", lost, next)
	}
}

// TestShelfForgetsWhatHasExpired: an expired entry is not found by its ids.
func TestShelfForgetsWhatHasExpired(t *testing.T) {
	s := NewShelf[string](2, 100)
	put(s, "m", "a", "v", 1)
	if _, _, ok := s.Take("m", []uint32{1}, shelfNow.Add(2*time.Minute)); ok {
		t.Error("Take returned an expired value")
	}
	if o, hasValue, ok := s.TakeNamed("m", "a"); !hasValue || !ok || o.Value != "v" || !s.Empty() {
		t.Error("the value is lost without being freed")
	}
}

// Many goroutines store, take and evict values. No value is returned twice, and none is returned
// for another list.
func TestShelfHammer(t *testing.T) {
	s := NewShelf[[]uint32](64, 1<<20)
	var gone sync.Map
	leave := func(o *OnShelf[[]uint32]) {
		if _, again := gone.LoadOrStore(&o.Value[0], true); again {
			t.Error("handed out twice")
		}
	}
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for n := range 500 {
				ids := make([]uint32, 1+r.IntN(40))
				for i := range ids {
					ids[i] = r.Uint32N(2)
				}
				ids = append(ids, uint32(g), uint32(n)) // every list is different
				replaced, evicted, _ := s.Put(OnShelf[[]uint32]{
					Scope: "m", Name: fmt.Sprint(r.IntN(20)), IDs: ids, Until: shelfNow.Add(time.Duration(1 + r.IntN(9))), Expires: shelfNow.Add(20), Likelihood: uint16(n), Value: ids,
				}, shelfNow)
				ended, _, _ := s.Sweep(shelfNow.Add(time.Duration(r.IntN(3))))
				for _, list := range [][]OnShelf[[]uint32]{replaced, evicted, ended} {
					for i := range list {
						leave(&list[i])
					}
				}
				got, hasValue, _ := s.Take("m", append(slices.Clone(ids), 7), shelfNow)
				if !hasValue {
					continue
				}
				if leave(&got); !slices.Equal(got.Value, ids[:len(got.Value)]) {
					t.Errorf("got %v for %v", got.Value, ids)
				}
			}
		})
	}
	all.Wait()
}
