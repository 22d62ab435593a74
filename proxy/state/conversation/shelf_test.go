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

func put(s *Shelf[string], scope, name, value string, ids ...uint32) []string {
	return s.Put(OnShelf[string]{Scope: scope, Name: name, IDs: ids, Expires: shelfNow.Add(time.Minute), Value: value}, shelfNow)
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
			got, ok := s.Take(tt.scope, tt.ids, shelfNow)
			if got != tt.want || ok != (tt.want != "") {
				t.Errorf("got %q, %t", got, ok)
			}
			if ok != s.Empty() {
				t.Error("a value is to be handed out once")
			}
			if again, ok := s.Take(tt.scope, tt.ids, shelfNow); ok {
				t.Errorf("handed out again: %q", again)
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
		if got, _ := s.Take("m", []uint32{1, 2, 3, 4, 5}, shelfNow); got != want {
			t.Errorf("got %q, want %q", got, want)
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
	if out := put(s, "m", "", "6", 1, 2, 3, 4, 5, 6, 7); !slices.Equal(out, []string{"6"}) {
		t.Errorf("list above the limit of ids: dropped %v", out)
	}
	if all := s.TakeAll(shelfNow); !slices.Equal(all, []string{"5"}) || !s.Empty() || len(s.byHash)+len(s.byName)+len(s.lengths)+s.ids != 0 {
		t.Errorf("all: %v", all)
	}
}

func TestShelfForgetsWhatHasExpired(t *testing.T) {
	s := NewShelf[string](2, 100)
	put(s, "m", "a", "v", 1)
	late := shelfNow.Add(time.Minute)
	if _, ok := s.Take("m", []uint32{1}, late); ok || !s.Named("m", "a") {
		t.Error("Take returned an expired value")
	}
	if _, ok := s.TakeNamed("m", "a", late); ok || s.Named("m", "a") {
		t.Error("TakeNamed returned an expired value")
	}
	put(s, "m", "a", "v", 1)
	if out := s.Put(OnShelf[string]{Scope: "m", IDs: []uint32{2}, Expires: late.Add(1), Value: "w"}, late); out != nil {
		t.Errorf("out: %v", out)
	}
	if all := s.TakeAll(late); !slices.Equal(all, []string{"w"}) {
		t.Errorf("all: %v", all)
	}
}

// Many goroutines store and take values. No value is returned twice, and none is returned
// for another list.
func TestShelfHammer(t *testing.T) {
	s := NewShelf[[]uint32](64, 1<<20)
	var taken sync.Map
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
				s.Put(OnShelf[[]uint32]{Scope: "m", Name: fmt.Sprint(r.IntN(20)), IDs: ids, Expires: shelfNow.Add(1), Value: ids}, shelfNow)
				got, ok := s.Take("m", append(slices.Clone(ids), 7), shelfNow)
				if !ok {
					continue
				}
				if !slices.Equal(got, ids[:len(got)]) {
					t.Errorf("got %v for %v", got, ids)
				}
				if _, again := taken.LoadOrStore(&got[0], true); again {
					t.Error("handed out twice")
				}
			}
		})
	}
	all.Wait()
}
