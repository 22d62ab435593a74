package policies

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/plugins/scores"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/policies/scorers"
)

// allScorers are the IDs of all built-in scorers and filters. Those that need parameters have them.
func allScorers(t testing.TB) []string {
	t.Helper()
	params := map[string]map[string]string{
		"label": {"label": "rack", "values": "r1 r2"}, "label_filter": {"label": "zone", "values": "z0", "not": "1"},
		"header_label": {"header": "X-Tier", "label": "rack"}, "utilization_filter": {"max_running_requests": "3", "max_kv_usage": "0.9"},
		"prefix": {"match_length_weight": "0.25"}, "latency": {"most_headroom": "1"},
	}
	var ids []string
	for _, name := range scorers.Names() {
		ids = append(ids, scorers.ID(name, params[name]))
	}
	return append(ids, scorers.ID("latency", nil))
}

// scoreWorld is a world whose module has these scorers.
func scoreWorld(t testing.TB, ids []string) *world {
	return &world{log: func(m string) { t.Errorf("log line of the guest: %s", m) }, config: policies.ScorerText(ids)}
}

// scoreHeader is the header of frames for the built-in scorers.
func scoreHeader() *abi.Header {
	return &abi.Header{Layout: abi.Layout{Traits: true, Headers: []string{"x-tier"}}}
}

// score asks the scorers with these indices.
func (g *guest) score(h *abi.Header, f *abi.ScoreFacts, asked []uint32, rows []abi.RowScore, units []abi.Scale) {
	view, ptr := g.scratch()
	frame := abi.AppendScore(view, h, f, asked)
	if answer := g.call(abi.HookScore, ptr, frame); answer != abi.ScoreDone {
		g.t.Fatalf("answer %d", answer)
	}
	view, _ = g.scratch()
	abi.ReadRowScores(view[:len(frame)], f, rows, units)
}

// random returns facts in which every fact of a scorer is drawn.
func randomLeg(rnd *rand.Rand) *abi.ScoreFacts {
	place := busy(2 + rnd.IntN(12))
	place.Random = rnd.Uint64()
	place.Request.Remaining = int64(rnd.IntN(3)) * 500
	place.Request.Headers = []abi.RequestHeader{{Name: "x-tier", Value: fmt.Sprintf("r%d", rnd.IntN(4)), Present: true}}
	f := &abi.ScoreFacts{PlaceFacts: place, Phases: []abi.Role{abi.RolePrefill, abi.RoleDecode, abi.RoleBoth}[rnd.IntN(3)], Prefill: -1}
	if f.Phases == abi.RoleDecode {
		f.Prefill = int32(rnd.IntN(len(place.Candidates)))
	}
	for i := range place.Candidates {
		c := &place.Candidates[i]
		c.Home, c.Adapter, c.Usage = abi.Role(rnd.IntN(4)), abi.AdapterState(rnd.IntN(5)), rnd.Float32()
		d := abi.Detail{Weight: 1, Running: int32(rnd.IntN(6)) - 1, Waiting: int32(rnd.IntN(4)) - 1}
		labels := map[string]string{"zone": fmt.Sprintf("z%d", rnd.IntN(2)), "rack": fmt.Sprintf("r%d", rnd.IntN(4)), "host": fmt.Sprintf("h%d", rnd.IntN(8))}
		if rnd.IntN(2) == 0 {
			labels["context_length"] = fmt.Sprintf("0-%d", rnd.IntN(30_000))
		}
		_ = d.SetLabels(labels)
		place.Details = append(place.Details, d)
		f.Open = append(f.Open, rnd.IntN(4) > 0)
	}
	return f
}

// TestScorersNativeAndWasm: all scorers give the same scores in the module and compiled in, in
// modules that are trusted and in others.
func TestScorersNativeAndWasm(t *testing.T) {
	ids := allScorers(t)
	var native []scorers.Scorer
	var asked []uint32
	for i, id := range ids {
		s, err := scorers.New(id)
		if err != nil {
			t.Fatal(err)
		}
		native, asked = append(native, s), append(asked, uint32(i))
	}
	frames := 3000
	if testing.Short() || raceEnabled {
		frames = 300
	}
	for _, opts := range []host.LoadOptions{{}, {Guarded: true}} {
		g, rnd := startWith(t, policies.Wasm(), scoreWorld(t, ids), opts), rand.New(rand.NewPCG(1, 2))
		if !slices.Equal(g.names[abi.HookScore], ids) {
			t.Fatalf("scorers of the module %v, want %v", g.names[abi.HookScore], ids)
		}
		for n := range frames {
			f := randomLeg(rnd)
			rows, units := make([]abi.RowScore, len(ids)*len(f.Candidates)), make([]abi.Scale, len(ids))
			g.score(scoreHeader(), f, asked, rows, units)
			for i, s := range native {
				want := abi.Scores{Rows: make([]abi.RowScore, len(f.Candidates))}
				s.Score(f, &want)
				got := rows[i*len(f.Candidates):][:len(f.Candidates)]
				for row, open := range f.Open {
					if w := want.Rows[row]; open && (got[row] != w || units[i] != want.Unit) || w.Score > 1 || w.Score < abi.Removed {
						t.Fatalf("frame %d, %s, row %d: %+v in %#x, natively %+v in %#x", n, ids[i], row, got[row], units[i], w, want.Unit)
					}
				}
				abi.CloseRemoved(f.Open, want.Rows)
			}
		}
	}
}

// scoreSet returns a set of the first n scorers, which the guest evaluates.
func (g *guest) scoreSet(n int) *scores.Set {
	h := scoreHeader()
	var leg scores.Leg
	var asked []uint32
	for i := range n {
		leg.Scorers = append(leg.Scorers, abi.NamedScorer{Name: g.names[abi.HookScore][i], Weight: 1})
		asked = append(asked, uint32(i))
	}
	leg.Parts = []scores.Part{{Scorers: n, Ask: func(f *abi.ScoreFacts, rows []abi.RowScore, units []abi.Scale) string {
		g.score(h, f, asked, rows, units)
		return ""
	}}}
	return &scores.Set{Name: "set", Prefill: leg, Decode: leg}
}

// usualScorers are those of the usual set, and then further ones that many sets have.
var usualScorers = []string{"prefix", "queue", "kv_usage", "running_requests", "active_requests", "token_load", "session", "lora"}

// TestScoresDoNotAllocate: in steady state neither the host nor the guest allocates.
func TestScoresDoNotAllocate(t *testing.T) {
	g := start(t, policies.Wasm(), scoreWorld(t, usualScorers))
	set, f := g.scoreSet(len(usualScorers)), busy(64)
	f.Details = slices.Repeat([]abi.Detail{{Weight: 1, Running: 3, Waiting: 1}}, 64)
	decide := func() {
		if d, reason := set.Place(f); reason != "" || !f.Allows(d) {
			t.Fatalf("decision %+v, %s", d, reason)
		}
	}
	decide()
	size := g.vm.MemorySize()
	if n := testing.AllocsPerRun(2000, decide); n != 0 && !raceEnabled {
		t.Errorf("%v allocations in the host", n)
	}
	if grown := g.vm.MemorySize(); grown != size {
		t.Errorf("guest memory changed from %d to %d bytes", size, grown)
	}
}

// BenchmarkScores measures a decision for two legs with 3 and 8 scorers, beside kv_aware.
func BenchmarkScores(b *testing.B) {
	g := start(b, policies.Wasm(), scoreWorld(b, usualScorers))
	kvAware := uint32(slices.Index(policies.PlaceNames(), "kv_aware"))
	for _, rows := range []int{8, 64} {
		b.Run(fmt.Sprintf("kv_aware/%d", rows), func(b *testing.B) { g.measurePlace(b, kvAware, rows) })
		for _, n := range []int{3, 8} {
			set, f := g.scoreSet(n), busy(rows)
			f.Details = slices.Repeat([]abi.Detail{{Weight: 1, Running: 3, Waiting: 1}}, rows)
			f.Predictions = nil
			b.Run(fmt.Sprintf("scores_%d/%d", n, rows), func(b *testing.B) {
				measure(b, func(n uint64) {
					f.Random = n * 0x9e3779b97f4a7c15
					if d, reason := set.Place(f); reason != "" || d.Decode < 0 {
						b.Fatalf("decision %+v, %s", d, reason)
					}
				})
			})
		}
	}
}

// TestScoreFuel compares the work of one leg with its number, as TestFuel does.
func TestScoreFuel(t *testing.T) {
	checks, g := startMetered(t, scoreWorld(t, usualScorers))
	f := busy(64)
	f.Details = slices.Repeat([]abi.Detail{{Weight: 1, Running: 3, Waiting: 1}}, 64)
	leg := &abi.ScoreFacts{PlaceFacts: f, Phases: abi.RolePrefill, Prefill: -1}
	for i := range f.Candidates {
		leg.Open = append(leg.Open, f.Candidates[i].Roles&abi.RolePrefill != 0)
	}
	for _, n := range []int{3, 8} {
		var asked []uint32
		for i := range n {
			asked = append(asked, uint32(i))
		}
		rows, units := make([]abi.RowScore, n*64), make([]abi.Scale, n)
		before := *checks
		const decisions = 100
		for range decisions {
			g.score(scoreHeader(), leg, asked, rows, units)
		}
		testbed.Cost(t, fmt.Sprintf("score a leg of 64 with %d scorers: fuel", n), float64(*checks-before)/decisions)
	}
}
