package plugins

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/policies/scorers"
)

// builtin returns a built-in scorer for a set.
func builtin(name string, weight float64, leg abi.Role) Scorer {
	return Scorer{Name: name, Builtin: scorers.ID(name, nil), Weight: weight, Leg: leg}
}

// scoring returns a world that places by these sets.
func scoring(t testing.TB, native bool, sets []ScoreSet, specs ...Spec) *world {
	t.Helper()
	w := newWorld(t, specs...)
	w.config.Native, w.config.Place, w.config.Scores = native, Scores, sets
	var ids []string
	for _, set := range sets {
		for _, s := range set.Scorers {
			if s.Builtin != "" && !slices.Contains(ids, s.Builtin) {
				ids = append(ids, s.Builtin)
			}
		}
	}
	w.config.Params = policies.ScorerText(ids)
	w.config.Natives.Score = func(id string) (NativeScorer, bool) {
		s, err := scorers.New(id)
		return NativeScorer{Score: s.Score, Needs: s.Needs, Headers: s.Headers}, err == nil
	}
	w.apply()
	return w
}

// loaded returns facts with two prefill and two decode rows. Row 0 and row 2 are busy, row 1 and 3
// have no free KV memory.
func loaded() *abi.PlaceFacts {
	f := &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1, Request: abi.RequestFacts{PromptTokens: 100}}
	for i := range uint32(4) {
		c := abi.Candidate{Instance: i + 1, Group: 1, Roles: abi.RolePrefill, Requests: 5}
		if i >= 2 {
			c.Roles = abi.RoleDecode
		}
		if i%2 == 1 {
			c.Requests, c.Usage = 0, 1
		}
		f.Candidates = append(f.Candidates, c)
	}
	return f
}

// TestScoreSets: a request is placed by the first set for its model and class, and each scorer counts
// with its weight on its leg, compiled in and in Wasm.
func TestScoreSets(t *testing.T) {
	sets := []ScoreSet{
		{Key: "scores[0]", Name: "both", Models: []string{"m"}, Classes: []uint32{7}, Scorers: []Scorer{
			builtin("kv_usage", 2, abi.RolePrefill), builtin("active_requests", 1, 0), builtin("kv_usage", 0.5, abi.RoleDecode),
		}},
		{Key: "scores[1]", Name: "model", Models: []string{"m", "n"}, Scorers: []Scorer{builtin("kv_usage", 1, 0)}},
		{Key: "scores[2]", Name: "usual", Scorers: []Scorer{builtin("active_requests", 1, 0)}},
	}
	for _, native := range []bool{true, false} {
		w := scoring(t, native, sets)
		if needs := w.Needs(); needs != abi.NeedIdentity {
			t.Errorf("needs %v", needs.Names())
		}
		for _, tt := range []struct {
			model string
			class uint32
			set   string
			want  abi.PlaceDecision
			sums  []float32
		}{
			// prefill: 2 x (1 - usage) + 1 x few requests; decode: 0.5 x (1 - usage) + few requests
			{"m", 7, "both", abi.PlaceDecision{Prefill: 0, Decode: 3}, []float32{2, 1, 0.5, 1}},
			{"m", 8, "model", abi.PlaceDecision{Prefill: 0, Decode: 2}, []float32{1, 0, 1, 0}},
			{"n", 7, "model", abi.PlaceDecision{Prefill: 0, Decode: 2}, []float32{1, 0, 1, 0}},
			{"o", 0, "usual", abi.PlaceDecision{Prefill: 1, Decode: 3}, []float32{0, 1, 0, 1}},
		} {
			f := loaded()
			f.Request.Model, f.Request.Class = tt.model, tt.class
			d, by, ok := w.Place(t.Context(), f)
			if d != tt.want || by != Scores || !ok {
				t.Errorf("native %v, %s of class %d: %+v, %q, %v", native, tt.model, tt.class, d, by, ok)
			}
			for i, want := range tt.sums {
				if f.Candidates[i].Score != want {
					t.Errorf("native %v, set %s: row %d has the sum %v, want %v", native, tt.set, i, f.Candidates[i].Score, want)
				}
			}
			if !f.Scored || f.Scale != abi.HighWins || len(f.Scores) != 2 || f.Scores[0].Set != tt.set || f.Scores[0].Phases != abi.RolePrefill || f.Scores[1].Phases != abi.RoleDecode {
				t.Errorf("scores %+v", f.Scores)
			}
		}
		f := loaded()
		f.Request.Model, f.Request.Class = "m", 7
		w.Place(t.Context(), f)
		leg := f.Scores[0]
		if want := []abi.NamedScorer{{Name: "kv_usage", Weight: 2}, {Name: "active_requests", Weight: 1}}; !slices.Equal(leg.Scorers, want) || !slices.Equal(leg.Units, []abi.Scale{abi.UnitShare, abi.UnitRequests}) {
			t.Errorf("scorers of prefill %v with %v", leg.Scorers, leg.Units)
		}
		closed := abi.RowScore{Score: abi.Closed}
		if want := []abi.RowScore{{Score: 1, Value: 0}, {Score: 0, Value: 1}, closed, closed}; !slices.Equal(leg.Of(0), want) {
			t.Errorf("scores of kv_usage %v, want %v", leg.Of(0), want)
		}
		runtime := map[bool]string{true: "native", false: "wasm"}[native]
		if r := w.row("scores", "score"); r.Runtime != runtime || r.Calls == 0 || r.Failures != 0 {
			t.Errorf("row %+v", r)
		}
	}
}

// TestScorerOfPlugin: a scorer of a plugin counts beside the built-in ones. If it fails, the request
// has no decision, as for a place policy; if it removes all rows, it removes none.
func TestScorerOfPlugin(t *testing.T) {
	for name, tt := range map[string]struct {
		do     string
		want   abi.PlaceDecision
		reason string
		notes  []string
	}{
		"last rows":         {"", abi.PlaceDecision{Prefill: 1, Decode: 3}, "", nil},
		"first rows":        {"first", abi.PlaceDecision{Prefill: 0, Decode: 2}, "", nil},
		"removes rows":      {"odd", abi.PlaceDecision{Prefill: 0, Decode: 2}, "", nil},
		"removes all rows":  {"all", abi.PlaceDecision{Prefill: 0, Decode: 2}, "", []string{"p would remove all candidates, and removes none", "p would remove all candidates, and removes none"}},
		"traps":             {"trap", abi.PlaceDecision{}, policy.Trap, nil},
		"answers nonsense":  {"nonsense", abi.PlaceDecision{}, policy.Nonsense, nil},
		"writes notes, too": {"note", abi.PlaceDecision{Prefill: 1, Decode: 3}, "", []string{"p: first", "p: second", "p: first", "p: second"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := scoring(t, false, []ScoreSet{{Key: "scores[0]", Name: "set", Scorers: []Scorer{
				builtin("kv_usage", 0.1, 0), {Name: "p", Weight: 5}, builtin("active_requests", 0.01, 0),
			}}}, guest(t, ""))
			f := loaded()
			f.Request.Model = "do:" + tt.do
			d, by, ok := w.Place(t.Context(), f)
			if d != tt.want || ok != (tt.reason == "") || !ok && by != tt.reason || !slices.Equal(f.Notes, tt.notes) {
				t.Fatalf("%+v, %q, %v with the notes %q", d, by, ok, f.Notes)
			}
			if failed := w.failed("p score " + tt.reason); failed != map[bool]int{true: 0, false: 1}[ok] {
				t.Errorf("%d failures are counted", failed)
			}
			if ok && (len(f.Scores) != 2 || f.Scores[0].Units[1] != abi.UnitBlocks || f.Scores[0].Scorers[1].Name != "p") {
				t.Errorf("scores %+v", f.Scores)
			}
			if !ok && len(f.Scores) != 0 {
				t.Errorf("scores without a decision: %+v", f.Scores)
			}
		})
	}
}

// TestScoresReload: other weights need no new module, and the next decision has them.
func TestScoresReload(t *testing.T) {
	set := func(weight float64) []ScoreSet {
		return []ScoreSet{{Key: "scores[0]", Name: "set", Scorers: []Scorer{builtin("kv_usage", weight, 0), builtin("active_requests", 1, 0)}}}
	}
	w := scoring(t, false, set(2))
	old := w.table.Load().builtin
	if d, _, _ := w.Place(t.Context(), loaded()); d.Prefill != 0 {
		t.Errorf("prefill %d", d.Prefill)
	}
	w.config.Scores = set(0.5)
	w.apply()
	if d, _, _ := w.Place(t.Context(), loaded()); d.Prefill != 1 {
		t.Errorf("with another weight, prefill %d", d.Prefill)
	}
	if w.table.Load().builtin != old {
		t.Error("other weights load the module of built-in policies anew")
	}
	if err := w.Reload(t.Context(), Scores); err != nil || w.table.Load().builtin == old {
		t.Errorf("Reload = %v", err)
	}
	if d, _, ok := w.Place(t.Context(), loaded()); d.Prefill != 1 || !ok {
		t.Errorf("after a reload of the module, prefill %d, %v", d.Prefill, ok)
	}
	w.config.Place, w.config.Scores = "least_load", nil
	w.apply()
	if _, by, ok := w.Place(t.Context(), loaded()); by != "least_load" || !ok {
		t.Errorf("%q, %v", by, ok)
	}
}

// TestScorerCanary: a new version of a plugin with scorers takes a share of the decisions.
func TestScorerCanary(t *testing.T) {
	spec := guest(t, "")
	spec.Canary = 0.5
	w := scoring(t, true, []ScoreSet{{Key: "scores[0]", Name: "set", Scorers: []Scorer{{Name: "p", Weight: 1}}}}, spec)
	w.table.Load().plugins[0].spec.Config = "score=first"
	if err := w.Reload(t.Context(), "p"); err != nil {
		t.Fatal(err)
	}
	decided := map[int32]int{}
	for range 300 {
		d, _, ok := w.Place(t.Context(), loaded())
		if !ok {
			t.Fatal("no decision")
		}
		decided[d.Prefill]++
	}
	if decided[0] < 75 || decided[1] < 75 {
		t.Errorf("decisions %v", decided)
	}
	w.endTrials(time.Now().Add(2 * time.Hour))
	if d, _, _ := w.Place(t.Context(), loaded()); d.Prefill != 0 {
		t.Errorf("the old version decides: %+v", d)
	}
}

// TestUnknownScorers: the error has the key of the scorer.
func TestUnknownScorers(t *testing.T) {
	for name, tt := range map[string]struct {
		scorer Scorer
		want   string
	}{
		"no such scorer":        {Scorer{Name: "magic"}, `scores[0].scorer[0].name: "magic" is neither a plugin nor a built-in scorer`},
		"not in the plugin":     {Scorer{Name: "p/magic"}, `scores[0].scorer[0].name: plugin "p" has no scorer "magic", but p`},
		"not built in, in Wasm": {Scorer{Name: "magic", Builtin: "magic"}, `scores[0].scorer[0].name: "magic" is neither`},
	} {
		w := newWorld(t, guest(t, ""))
		w.config.Place, w.config.Scores = Scores, []ScoreSet{{Key: "scores[0]", Name: "set", Scorers: []Scorer{tt.scorer}}}
		w.config.Natives.Score = func(string) (NativeScorer, bool) { return NativeScorer{}, false }
		w.config.Native = name != "not built in, in Wasm"
		err := w.Apply(t.Context(), w.config)
		var wrong Errors
		if !errors.As(err, &wrong) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestScoresDoNotAllocate: a decision with scorers of two modules does not allocate.
func TestScoresDoNotAllocate(t *testing.T) {
	for _, native := range []bool{true, false} {
		w := scoring(t, native, []ScoreSet{{Key: "scores[0]", Name: "set", Scorers: []Scorer{builtin("kv_usage", 1, 0), builtin("active_requests", 1, 0)}}})
		f, ctx := loaded(), t.Context()
		w.Place(ctx, f)
		if n := testing.AllocsPerRun(200, func() { w.Place(ctx, f) }); n != 0 && !raceEnabled {
			t.Errorf("native %v: %v allocations", native, n)
		}
	}
}
