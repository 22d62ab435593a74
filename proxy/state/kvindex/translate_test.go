package kvindex

import (
	"slices"
	"testing"
)

// TestTranslate: engine hashes are translated to index hashes if events of any target
// have shown them, up to the first hash that no event has shown.
func TestTranslate(t *testing.T) {
	x := New(Options{})
	tokens := make([]uint32, 8*4)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	engine := []uint64{11, 12, 13, 14, 15, 16, 17, 18}
	store := func(from, to int) Target {
		target := x.Add()
		e := Stored{Hashes: engine[:to], Tokens: tokens[:to*4], BlockTokens: 4}
		f := NewFeed(x, target, "m")
		f.Stored(&e)
		f.Removed(GPU, engine[:from])
		return target
	}
	a, b, empty := store(0, 3), store(2, 6), x.Add()
	ours := AppendTokens(nil, Seed("m", "", ""), tokens, 4)
	for _, tt := range []struct {
		name    string
		targets []Target
		engine  []uint64
		want    []Hash
	}{
		{"one", []Target{a}, engine, ours[:3]},
		{"one continues where the other ends", []Target{empty, b, a}, engine, ours[:6]},
		{"the beginning is not known", []Target{b}, engine, nil},
		{"a gap", []Target{a}, []uint64{11, 99, 12}, ours[:1]},
		{"no hashes", []Target{a}, nil, nil},
		{"nobody", nil, engine, nil},
		{"a target that left", []Target{99}, engine, nil},
	} {
		if got := x.Translate(nil, tt.engine, tt.targets); !slices.Equal(got, tt.want) {
			t.Errorf("%s: x.Translate(nil, tt.engine, tt.targets) = %v, want %v", tt.name, got, tt.want)
		}
	}
	if got := x.Translate(ours[:1:1], engine, []Target{a}); !slices.Equal(got, append(ours[:1:1], ours[:3]...)) {
		t.Errorf("appended: %v", got)
	}
}
