package models

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// table returns the table of [[model]] tables in TOML, which must be valid.
func table(t *testing.T, text string) *Table {
	t.Helper()
	cfg, err := config.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return NewTable(&cfg, nil)
}

// names has an alias of an alias, an alias of a split, a split with itself, and a split
// with two names of one model.
const names = `
[[model]]
name = "a"
alias_of = "b"
[[model]]
name = "b"
alias_of = "served"
[[model]]
name = "s"
split = { s = 90, s2 = 10, unused = 0 }
[[model]]
name = "as"
alias_of = "s"
[[model]]
name = "twice"
split = { a = 1, b = 1, other = 2 }
`

func TestRoutes(t *testing.T) {
	table := table(t, names)
	for _, tt := range []struct {
		name string
		want []string // nil: no route
	}{
		{"a", []string{"served"}}, {"b", []string{"served"}}, {"s", []string{"s", "s2"}}, {"as", []string{"s", "s2"}},
		{"twice", []string{"served", "other"}}, {"served", nil}, {"s2", nil}, {"", nil},
	} {
		r := table.Route(tt.name)
		if r == nil {
			if tt.want != nil {
				t.Errorf("%q: no route, want %q", tt.name, tt.want)
			}
			continue
		}
		if got := r.Models(); !slices.Equal(got, tt.want) || r.Name() != tt.name || r.Split() != (len(tt.want) > 1) {
			t.Errorf("%q: got %q of %q, want %q", tt.name, got, r.Name(), tt.want)
		}
	}
}

// TestNoTable: without [[model]] no name has a route.
func TestNoTable(t *testing.T) {
	cfg := config.Default()
	none := NewTable(&cfg, nil)
	served := []string{"m"}
	if none != nil || none.Route("m") != nil || &none.Merge(served)[0] != &served[0] {
		t.Errorf("got %v, want no table, and the same list", none)
	}
}

func TestMerge(t *testing.T) {
	table := table(t, names)
	for _, tt := range []struct{ served, want []string }{
		{nil, []string{}},
		{[]string{"other"}, []string{"other", "twice"}},
		{[]string{"s", "served", "z"}, []string{"a", "as", "b", "s", "served", "twice", "z"}},
	} {
		if got := table.Merge(tt.served); !slices.Equal(got, tt.want) {
			t.Errorf("%q: got %q, want %q", tt.served, got, tt.want)
		}
	}
}

// TestShares: the shares of the keys are those of the weights, and two names of one model
// have the share of both.
func TestShares(t *testing.T) {
	table := table(t, names)
	const keys = 200_000
	for _, tt := range []struct {
		name, model string
		share       float64
	}{{"s", "s2", .1}, {"as", "s2", .1}, {"twice", "served", .5}, {"a", "served", 1}} {
		random, route, n := rand.New(rand.NewPCG(1, 2)), table.Route(tt.name), 0
		for range keys {
			if route.Choose(random.Uint64())[0] == tt.model {
				n++
			}
		}
		if got := float64(n) / keys; math.Abs(got-tt.share) > .005 {
			t.Errorf("%s: %s has a share of %.3f, want %.3f", tt.name, tt.model, got, tt.share)
		}
	}
}

// TestStays: more weight of a model takes keys of the others, and moves no other key. The
// order of other models has no effect.
func TestStays(t *testing.T) {
	before := table(t, "[[model]]\nname='s'\nsplit={ a = 80, b = 15, c = 5 }\n").Route("s")
	after := table(t, "[[model]]\nname='s'\nsplit={ a = 80, b = 15, c = 25 }\n").Route("s")
	removed := table(t, "[[model]]\nname='s'\nsplit={ a = 80, c = 5 }\n").Route("s")
	random, moved := rand.New(rand.NewPCG(3, 4)), 0
	for range 10_000 {
		key := random.Uint64()
		old, now := before.Choose(key)[0], after.Choose(key)[0]
		if old != now {
			if moved++; now != "c" {
				t.Fatalf("key %x moved from %s to %s", key, old, now)
			}
		}
		if left := removed.Choose(key)[0]; old != "b" && left != old {
			t.Fatalf("key %x moved from %s to %s, but b was removed", key, old, left)
		}
	}
	if moved == 0 {
		t.Error("no key moved")
	}
}

// TestUnit: the number of every key is inside of the open interval.
func TestUnit(t *testing.T) {
	for _, x := range []uint64{0, 1, math.MaxUint64, 1 << 63} {
		if u := unit(x); u <= 0 || u >= 1 {
			t.Errorf("unit(%x) = %v", x, u)
		}
	}
}

// TestFallbacks: a choice has the model, the fallbacks of the name behind an alias or in a
// split, and those of the requested name, each model once and by its name on the engines.
func TestFallbacks(t *testing.T) {
	table := table(t, `
[[model]]
name = "a"
fallback = ["b", "short"]
[[model]]
name = "short"
alias_of = "c"
fallback = ["unused"]
[[model]]
name = "alias"
alias_of = "a"
fallback = ["c", "d", "a"]
[[model]]
name = "split"
split = { a = 1 }
fallback = ["e"]
[[model]]
name = "b"
fallback = ["a"]
`)
	for name, want := range map[string][]string{
		"a": {"a", "b", "c"}, "b": {"b", "a"}, "short": {"c", "unused"}, "alias": {"a", "b", "c", "d"}, "split": {"a", "b", "c", "e"},
	} {
		if got := table.Route(name).Choose(7); !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
	if got := table.Merge([]string{"e"}); !slices.Equal(got, []string{"e", "split"}) {
		t.Errorf("served as a fallback: got %q", got)
	}
}

func BenchmarkChoose(b *testing.B) {
	cfg, err := config.Parse([]byte(names))
	if err != nil {
		b.Fatal(err)
	}
	route := NewTable(&cfg, nil).Route("s")
	for i := range b.N {
		route.Choose(uint64(i))
	}
}

// TestRewrites: [[model]] comes before a rewrite, an exact name before every name, and the first rule
// before later ones. A target that is a name of [[model]] leads to its models.
func TestRewrites(t *testing.T) {
	cfg, err := config.Parse([]byte(names))
	if err != nil {
		t.Fatal(err)
	}
	to := func(list ...string) (targets []RewriteTarget) {
		for i, model := range list {
			targets = append(targets, RewriteTarget{Model: model, Weight: float64(i + 1)})
		}
		return targets
	}
	table := NewTable(&cfg, []Rewrite{
		{Name: "a", Targets: to("never")}, {Any: true, Targets: to("rest")}, {Any: true, Targets: to("never")},
		{Name: "x", Targets: to("z", "y")}, {Name: "x", Targets: to("never")}, {Name: "split", Targets: to("as", "new")}, {Name: "self", Targets: to("self")},
		{Name: "double", Targets: to("a", "b")},
	})
	for name, want := range map[string][]string{
		"a": {"served"}, "x": {"y", "z"}, "split": {"new", "s", "s2"}, "self": {"self"}, "double": {"served"}, "other": {"rest"}, "": {"rest"}, "as": {"s", "s2"},
	} {
		if got := table.Route(name).Models(); !slices.Equal(got, want) {
			t.Errorf("%q: got %q, want %q", name, got, want)
		}
	}
	if got := table.Route("other").Name(); got != AnyName {
		t.Errorf("the route of every name is called %q", got)
	}
	if got, want := table.Merge([]string{"rest", "y"}), []string{"rest", "x", "y"}; !slices.Equal(got, want) {
		t.Errorf("names of clients: got %q, want %q", got, want)
	}
	counts := map[string]int{}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 30_000 {
		counts[table.Route("split").Choose(rng.Uint64())[0]]++
	}
	for model, want := range map[string]float64{"s": 9_000, "s2": 1_000, "new": 20_000} {
		if got := float64(counts[model]); math.Abs(got-want) > 400 {
			t.Errorf("%s got %v of 30000, want %v", model, got, want)
		}
	}
}
