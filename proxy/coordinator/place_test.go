package coordinator_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/policies/snowflake"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

func TestPlacePair(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	p := w.Must(t, placetest.NewPlacementRequest())
	if p.Flow != abi.FlowConcurrent || p.Prefill != w.Target(t, "p", 0) || p.Decode != w.Target(t, "d", 0) {
		t.Errorf("placed %v on %q and %q", p.Flow, p.Prefill.Name(), p.Decode.Name())
	}
	if !disaggid.InRange(p.ID) || w.LiveIDs() != 1 || w.Open() != 1 {
		t.Errorf("id %d, %d in flight, %d leases", p.ID, w.LiveIDs(), w.Open())
	}
	if p.Policy != "native" || len(p.Fallbacks) != 0 {
		t.Errorf("policy %q, fallbacks %q", p.Policy, placetest.Show(p.Fallbacks))
	}
	if len(p.Targets) != 2 || len(p.Facts.Candidates) != 2 || p.Facts.Candidates[1].Instance != p.Targets[1].ID || p.Facts.Flow != p.Flow {
		t.Errorf("table %+v", p.Facts)
	}
	prefill, decode := &p.Prefill.Load[0], &p.Decode.Load[0]
	if prefill.Requests() != 1 || prefill.Tokens() != 100 || decode.Requests() != 1 || decode.Tokens() != 110 {
		t.Errorf("loads %d/%d and %d/%d", prefill.Requests(), prefill.Tokens(), decode.Requests(), decode.Tokens())
	}
	p.Lease.PrefillDone()
	p.Lease.PrefillDone()
	w.Arrived()
	if prefill.Requests() != 0 || decode.Requests() != 1 {
		t.Error("PrefillDone drops prefill's load alone")
	}
	p.Lease.Release()
	p.Lease.Release()
	p.Lease.PrefillDone()
	w.Idle(t)
	p.Recycle()
	p.Recycle()
	if p.Targets != nil || p.Facts.Candidates != nil {
		t.Error("a recycled table is still there")
	}
}

func TestPlaceAggregated(t *testing.T) {
	for _, tt := range []struct {
		name   string
		specs  []string
		plan   string
		change func(*coordinator.PlacementRequest)
		want   string // engine, or the error
	}{
		{"both only", []string{"b both one"}, "auto", nil, "b"},
		{"a both engine alone is no pair", []string{"b both"}, "auto", nil, "b"},
		{"never", []string{"p prefill", "d decode", "b both"}, "never", nil, "b"},
		{"never without both", []string{"p prefill", "d decode"}, "never", nil, `no engine is ready to serve model "m"`},
		{"unpairable", []string{"p prefill", "d decode", "b both"}, "always", func(a *coordinator.PlacementRequest) { a.Request.PairBroken = true }, "b"},
		{"unpairable, no both", []string{"p prefill", "d decode"}, "auto", func(a *coordinator.PlacementRequest) { a.Request.PairBroken = true }, `no engine is ready to serve model "m"`},
		{"on decode too", []string{"p prefill", "d decode"}, "auto", func(a *coordinator.PlacementRequest) { a.Aggregate = abi.RoleDecode }, "d"},
		{"on prefill too", []string{"p prefill", "d decode"}, "always", func(a *coordinator.PlacementRequest) { a.Aggregate = abi.RolePrefill }, "p"},
		{"both whatever the set", []string{"p prefill", "b both"}, "always", func(a *coordinator.PlacementRequest) { a.Aggregate = abi.RoleDecode }, "b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, tt.specs...)
			w.SetDecider(placetest.Builtin(t, tt.plan, "least_load"))
			a := placetest.NewPlacementRequest()
			if tt.change != nil {
				tt.change(a)
			}
			p, err := w.Place(t.Context(), a)
			if err != nil {
				var nt *coordinator.NoTargetError
				if err.Error() != tt.want || !errors.Is(err, coordinator.ErrNoTarget) || !errors.As(err, &nt) || nt.Phase != abi.PhaseNone {
					t.Errorf("got error %v", err)
				}
				return
			}
			if p.Decode.Name() != tt.want || !p.Prefill.IsZero() || p.Flow != abi.FlowAggregated || p.ID != 0 {
				t.Errorf("placed %v on %q and %q, id %d", p.Flow, p.Prefill.Name(), p.Decode.Name(), p.ID)
			}
			if l := &p.Decode.Load[0]; l.Requests() != 1 || l.Tokens() != 110 {
				t.Errorf("load %d/%d", l.Requests(), l.Tokens())
			}
			if w.LiveIDs() != 0 {
				t.Error("an aggregated request has no id")
			}
			p.Lease.Release()
			w.Idle(t)
		})
	}
}

func TestPlaceErrors(t *testing.T) {
	gone, cancel := context.WithCancelCause(t.Context())
	left := errors.New("client left")
	cancel(left)
	for _, tt := range []struct {
		name  string
		specs []string
		model string
		plan  string
		ctx   context.Context
		is    error
		phase abi.Phase
	}{
		{"nothing at all", nil, "m", "auto", nil, coordinator.ErrNoTarget, abi.PhaseNone},
		{"nothing at all, no model", nil, "", "auto", nil, coordinator.ErrNoTarget, abi.PhaseNone},
		{"unknown model", []string{"b both"}, "x", "auto", nil, coordinator.ErrUnknownModel, 0},
		{"perhaps of an engine that is down", []string{"b both", "down both"}, "x", "auto", nil, coordinator.ErrNoTarget, abi.PhaseNone},
		{"model needed", []string{"a=one both", "b=two both"}, "", "auto", nil, coordinator.ErrModelNeeded, 0},
		{"known but down", []string{"down=m both"}, "m", "auto", nil, coordinator.ErrNoTarget, abi.Prefill},
		{"known but down, and no pair", []string{"down=m both one"}, "m", "auto", nil, coordinator.ErrNoTarget, abi.PhaseNone},
		{"no prefill", []string{"d decode"}, "m", "auto", nil, coordinator.ErrNoTarget, abi.Prefill},
		{"no decode", []string{"p prefill"}, "m", "auto", nil, coordinator.ErrNoTarget, abi.Decode},
		{"no decode for always", []string{"p prefill"}, "m", "always", nil, coordinator.ErrNoTarget, abi.Decode},
		{"they do not go together", []string{"p1 prefill", "d2 decode"}, "m", "auto", nil, coordinator.ErrNoTarget, abi.Prefill},
		{"client gone", []string{"b both"}, "m", "auto", gone, left, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, tt.specs...)
			w.SetDecider(placetest.Builtin(t, tt.plan, "least_load"))
			ctx := tt.ctx
			if ctx == nil {
				ctx = t.Context()
			}
			a := placetest.NewPlacementRequest()
			a.Model = tt.model
			p, err := w.Place(ctx, a)
			if p != nil || !errors.Is(err, tt.is) {
				t.Fatalf("got %v, %v", p, err)
			}
			var nt *coordinator.NoTargetError
			if errors.As(err, &nt) && nt.Phase != tt.phase {
				t.Errorf("phase %v, want %v", nt.Phase, tt.phase)
			}
			w.Idle(t)
		})
	}
}

func TestPlaceOnlyModel(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode", "downer both")
	a := placetest.NewPlacementRequest()
	a.Model = ""
	w.Must(t, a).Lease.Release()
	for changed := w.Reg.Changed(); !w.Reg.Settled(); changed = w.Reg.Changed() { // until "downer" has been probed
		<-changed
	}
	if !w.Ready() || newWorld(t, "p prefill").Ready() {
		t.Error("Ready is wrong")
	}
}

func TestNoTargetErrorText(t *testing.T) {
	for _, tt := range []struct {
		err  coordinator.NoTargetError
		want string
	}{
		{coordinator.NoTargetError{}, "no engine is ready to serve the request"},
		{coordinator.NoTargetError{Phase: abi.Decode}, "no engine is ready for the decode of the request"},
		{coordinator.NoTargetError{Phase: abi.Prefill, Model: "m"}, `no engine is ready for the prefill of model "m"`},
	} {
		if got := tt.err.Error(); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
}

// A plan answer may also set a status and a time limit.
func TestPlanAnswer(t *testing.T) {
	limited := func(d abi.PlanDecision, status uint16) abi.PlanAnswer {
		return abi.PlanAnswer{Decision: d, Status: status, LimitMillis: 1500}
	}
	for _, tt := range []struct {
		name      string
		answer    abi.PlanAnswer
		flow      abi.Flow
		limit     time.Duration
		status    int
		fallbacks string
	}{
		{"limit", limited(abi.PlanAggregate, 0), abi.FlowAggregated, 1500 * time.Millisecond, 0, ""},
		{"limit alone", limited(abi.PlanPass, 0), abi.FlowConcurrent, 1500 * time.Millisecond, 0, ""},
		{"reject", limited(abi.PlanReject, 0), 0, 0, 0, ""},
		{"reject with a status", limited(abi.PlanReject, 429), 0, 0, 429, ""},
		{"status that is no error's", limited(abi.PlanReject, 200), abi.FlowConcurrent, 0, 0, "plan/nonsense"},
		{"status without a reject", limited(abi.PlanAggregate, 429), abi.FlowConcurrent, 0, 0, "plan/nonsense"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, "p prefill", "d decode", "b both")
			w.SetDecider(placetest.Stub{OnPlan: func(*abi.PlanFacts) (abi.PlanAnswer, string, bool) { return tt.answer, "x", true }})
			p, err := w.Place(t.Context(), placetest.NewPlacementRequest())
			if err != nil {
				var re *coordinator.RejectedError
				if tt.flow != 0 || !errors.As(err, &re) || !errors.Is(err, coordinator.ErrRejected) || re.Status != tt.status {
					t.Errorf("error %#v", err)
				}
				return
			}
			if p.Flow != tt.flow || p.FirstByte != tt.limit || placetest.Show(p.Fallbacks) != tt.fallbacks {
				t.Errorf("got flow %v, limit %v, fallbacks %q", p.Flow, p.FirstByte, placetest.Show(p.Fallbacks))
			}
			p.Lease.Release()
		})
	}
}

// A placement uses the targets of an earlier one again while they are candidates.
func TestPlaceSame(t *testing.T) {
	for _, tt := range []struct {
		name            string
		specs           []string
		prefill, decode string // of Same
		change          func(*world, *coordinator.PlacementRequest)
		same            bool
	}{
		{"pair", []string{"p prefill", "q prefill", "d decode", "e decode"}, "q", "e", nil, true},
		{"pair of role both", []string{"a both", "b both", "c both"}, "c", "b", nil, true},
		{"one", []string{"a both one", "b both one"}, "", "b", nil, true},
		{"circuit open", []string{"p prefill", "q prefill", "d decode", "e decode"}, "q", "e", func(w *world, _ *coordinator.PlacementRequest) {
			for range 3 {
				w.Reg.Snapshot().Instance("q").Breaker.Failure()
			}
		}, false},
		{"excluded", []string{"a both one", "b both one"}, "", "b", func(_ *world, a *coordinator.PlacementRequest) {
			a.Excluded = append(a.Excluded, a.Same.Decode)
		}, false},
		{"another number of legs", []string{"p prefill", "d decode", "b both"}, "", "b", nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, tt.specs...)
			a := placetest.NewPlacementRequest()
			a.Same.Decode = engine.Target{Instance: w.Reg.Snapshot().Instance(tt.decode)}
			if tt.prefill != "" {
				a.Same.Prefill = engine.Target{Instance: w.Reg.Snapshot().Instance(tt.prefill)}
			}
			if tt.change != nil {
				tt.change(w, a)
			}
			seen := make(map[uint64]bool)
			for range 5 {
				p, err := w.Place(t.Context(), a)
				if err != nil {
					t.Fatal(err)
				}
				if got := p.Prefill == a.Same.Prefill && p.Decode == a.Same.Decode; got != tt.same {
					t.Errorf("placed on %q and %q", p.Prefill.Name(), p.Decode.Name())
				}
				if p.ID != 0 && seen[p.ID] {
					t.Errorf("id %d again", p.ID)
				}
				seen[p.ID] = true
				p.Lease.Release()
			}
			w.Idle(t)
		})
	}
}

// The scores of a placement come from the policy that decided.
func TestPlaceScores(t *testing.T) {
	for _, row := range []int32{0, 9} {
		w := newWorld(t, "a both one", "b both one")
		w.SetDecider(placetest.Stub{OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			f.Scored, f.Candidates[0].Score = true, 0.5
			return abi.PlaceDecision{Prefill: -1, Decode: row}, "x", true
		}})
		p, err := w.Place(t.Context(), placetest.NewPlacementRequest())
		if err != nil {
			t.Fatal(err)
		}
		if p.Facts.Scored != (row == 0) || p.Facts.Scored && p.Facts.Candidates[0].Score != 0.5 {
			t.Errorf("row %d: scored %v, %v", row, p.Facts.Scored, p.Facts.Candidates)
		}
		p.Lease.Release()
	}
}

func TestPlan(t *testing.T) {
	plan := func(d abi.PlanDecision, policy string, ok bool) placetest.Stub {
		return placetest.Stub{OnPlan: func(*abi.PlanFacts) (abi.PlanAnswer, string, bool) {
			return abi.PlanAnswer{Decision: d}, policy, ok
		}}
	}
	pair := []string{"p prefill", "d decode", "b both"}
	for _, tt := range []struct {
		name      string
		specs     []string
		d         coordinator.Decider
		flow      abi.Flow
		err       error
		fallbacks string
	}{
		{"disaggregate", pair, plan(abi.PlanDisaggregate, "x", true), abi.FlowConcurrent, nil, ""},
		{"aggregate", pair, plan(abi.PlanAggregate, "x", true), abi.FlowAggregated, nil, ""},
		{"reject", pair, plan(abi.PlanReject, "x", true), 0, coordinator.ErrRejected, ""},
		{"reject, as nothing could serve", []string{"p prefill"}, plan(abi.PlanReject, "x", true), 0, coordinator.ErrNoTarget, ""},
		{"pass", pair, plan(abi.PlanPass, "x", true), abi.FlowConcurrent, nil, ""},
		{"absent", pair, plan(0, coordinator.ReasonAbsent, false), abi.FlowConcurrent, nil, ""},
		{"late", pair, plan(0, coordinator.ReasonLate, false), abi.FlowConcurrent, nil, "plan/late"},
		{"failed for no known reason", pair, plan(0, "", false), abi.FlowConcurrent, nil, "plan/failed"},
		{"nonsense", pair, plan(77, "x", true), abi.FlowConcurrent, nil, "plan/nonsense"},
		{"no pair to disaggregate on", []string{"b both"}, plan(abi.PlanDisaggregate, "x", true), 0, coordinator.ErrNoTarget, ""},
		{"degraded: prefill is down", []string{"downp=m prefill", "d decode", "b both one"}, plan(abi.PlanAggregate, "x", true), abi.FlowAggregated, nil, "plan/no_prefill"},
		{"degraded: decode is down", []string{"p prefill", "downd=m decode", "b both one"}, plan(abi.PlanAggregate, "x", true), abi.FlowAggregated, nil, "plan/no_decode"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, tt.specs...)
			w.SetDecider(tt.d)
			p, err := w.Place(t.Context(), placetest.NewPlacementRequest())
			if !errors.Is(err, tt.err) {
				t.Fatalf("got error %v, want %v", err, tt.err)
			}
			if err != nil {
				w.Idle(t)
				return
			}
			if p.Flow != tt.flow || placetest.Show(p.Fallbacks) != tt.fallbacks {
				t.Errorf("got flow %v, fallbacks %q", p.Flow, placetest.Show(p.Fallbacks))
			}
			p.Lease.Release()
			w.Idle(t)
		})
	}
}

func TestPlanFacts(t *testing.T) {
	w := newWorld(t, "p prefill two 2", "d decode two 3", "b both one 4", "e both two 1")
	var seen abi.PlanFacts
	w.SetDecider(placetest.Stub{OnPlan: func(f *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
		seen = *f
		return abi.PlanAnswer{Decision: abi.PlanAggregate}, "x", true
	}})
	a := placetest.NewPlacementRequest()
	w.Must(t, a).Lease.Release()
	a.Request.Model = "m"
	if want := (abi.PlanFacts{Request: a.Request, PrefillTargets: 3, DecodeTargets: 4, BothTargets: 5}); !reflect.DeepEqual(seen, want) {
		t.Errorf("facts %+v, want %+v", seen, want)
	}
}

// TestPlaceVerifies: the native rule replaces an answer that breaks the contract. The
// coordinator counts the fallback.
func TestPlaceVerifies(t *testing.T) {
	// Rows: p1 0, d1 1, b1 2 in one group, p2 3, d2 4 in another.
	specs := []string{"p1 prefill", "d1 decode", "b1 both", "p2 prefill", "d2 decode"}
	for _, tt := range []struct {
		name            string
		prefill, decode int32
		ok              bool
	}{
		{"good", 0, 1, true},
		{"good, other group", 3, 4, true},
		{"both decodes", 0, 2, true},
		{"prefill out of range", 5, 1, false},
		{"decode out of range", 0, 5, false},
		{"no prefill", -1, 1, false},
		{"no decode", 0, -1, false},
		{"far below", -1 << 31, 1, false},
		{"roles swapped", 1, 0, false},
		{"two groups", 0, 4, false},
		{"one row for both legs", 2, 2, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, specs...)
			w.SetDecider(placetest.Stub{OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
				if len(f.Candidates) != 5 || f.Fixed != -1 {
					t.Errorf("facts %+v", f)
				}
				return abi.PlaceDecision{Prefill: tt.prefill, Decode: tt.decode}, "mine", true
			}})
			p := w.Must(t, placetest.NewPlacementRequest())
			if tt.ok {
				if p.Policy != "mine" || p.Prefill != p.Targets[tt.prefill] || p.Decode != p.Targets[tt.decode] || len(p.Fallbacks) != 0 {
					t.Errorf("policy %q placed on %q, %q, fallbacks %q", p.Policy, p.Prefill.Name(), p.Decode.Name(), placetest.Show(p.Fallbacks))
				}
			} else if p.Policy != "native" || placetest.Show(p.Fallbacks) != "place/nonsense" {
				t.Errorf("policy %q, fallbacks %q", p.Policy, placetest.Show(p.Fallbacks))
			}
			p.Lease.Release()
			w.Idle(t)
		})
	}
}

func TestPlaceVerifiesAggregated(t *testing.T) {
	w := newWorld(t, "a both one", "b both one")
	for _, tt := range []struct {
		d  abi.PlaceDecision
		ok bool
	}{
		{abi.PlaceDecision{Prefill: -1, Decode: 1}, true},
		{abi.PlaceDecision{Prefill: 0, Decode: 1}, false},
		{abi.PlaceDecision{Prefill: -1, Decode: 2}, false},
		{abi.PlaceDecision{Prefill: -1, Decode: -1}, false},
	} {
		w.SetDecider(placetest.Stub{OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) { return tt.d, "mine", true }})
		p := w.Must(t, placetest.NewPlacementRequest())
		if ok := p.Policy == "mine"; ok != tt.ok {
			t.Errorf("%+v: policy %q", tt.d, p.Policy)
		}
		p.Lease.Release()
	}
	w.Idle(t)
}

// TestPlaceWithoutAnyAnswer: the last fallback places without a Decider.
func TestPlaceWithoutAnyAnswer(t *testing.T) {
	w := newWorld(t, "p prefill", "q prefill", "d decode", "e decode", "b both one")
	w.SetFallback(placetest.Stub{OnPlan: func(*abi.PlanFacts) (abi.PlanAnswer, string, bool) {
		return abi.PlanAnswer{Decision: abi.PlanDisaggregate}, "", true
	}})
	w.Target(t, "p", 0).Load[0].Hold(10)
	w.Target(t, "e", 0).Load[0].Hold(10)
	p := w.Must(t, placetest.NewPlacementRequest())
	if p.Prefill.Name() != "q" || p.Decode.Name() != "d" || p.Policy != "native" {
		t.Errorf("%q placed on %q and %q", p.Policy, p.Prefill.Name(), p.Decode.Name())
	}
	p.Lease.Release()
	a := placetest.NewPlacementRequest()
	a.Request.PairBroken = true
	p = w.Must(t, a)
	if p.Decode.Name() != "b" {
		t.Errorf("placed on %q", p.Decode.Name())
	}
	p.Lease.Release()
}

func TestMint(t *testing.T) {
	mint := func(id uint64, policy string, ok bool) placetest.Stub {
		return placetest.Stub{OnMint: func(*abi.MintFacts) (uint64, string, bool) { return id, policy, ok }}
	}
	for _, tt := range []struct {
		name      string
		d         coordinator.Decider
		times     int
		own       bool // the policy's id is used
		fallbacks string
	}{
		{"own id", mint(abi.MinDisaggID, "mine", true), 1, true, ""},
		{"highest id", mint(abi.MaxDisaggID-1, "mine", true), 1, true, ""},
		{"absent", mint(0, coordinator.ReasonAbsent, false), 1, false, ""},
		{"trap", mint(0, coordinator.ReasonTrap, false), 1, false, "mint/trap"},
		{"too low", mint(abi.MinDisaggID-1, "mine", true), 1, false, "mint/nonsense"},
		{"too high", mint(abi.MaxDisaggID, "mine", true), 1, false, "mint/nonsense"},
		{"in flight", mint(1<<50, "mine", true), 2, false, "mint/duplicate"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, "p prefill", "d decode")
			w.SetDecider(tt.d)
			var p *coordinator.Placement
			for range tt.times {
				p = w.Must(t, placetest.NewPlacementRequest())
				defer p.Lease.Release()
			}
			if !disaggid.InRange(p.ID) || w.LiveIDs() != tt.times {
				t.Errorf("id %d, %d in flight", p.ID, w.LiveIDs())
			}
			if got := w.Counts.IDs["mine"] == tt.times; got != tt.own || placetest.Show(p.Fallbacks) != tt.fallbacks {
				t.Errorf("minted %v, fallbacks %q", w.Counts.IDs, placetest.Show(p.Fallbacks))
			}
		})
	}
}

// TestNativeMintSkipsForeignIDs: the native rule skips an id that a policy has issued.
func TestNativeMintSkipsForeignIDs(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	w.SetDecider(placetest.Stub{OnMint: func(f *abi.MintFacts) (uint64, string, bool) {
		next := *f
		for range 3 { // holds the next ids
			next.Counter++
			w.HoldID(disaggid.Pack(next))
		}
		return 0, "mine", true
	}})
	seen := map[uint64]bool{}
	for range 50 {
		p := w.Must(t, placetest.NewPlacementRequest())
		if seen[p.ID] {
			t.Fatalf("id %d twice", p.ID)
		}
		seen[p.ID] = true
	}
}

// TestPackIsSnowflake: the native rule and the built-in policy issue the same ids.
func TestPackIsSnowflake(t *testing.T) {
	s, err := disaggid.New(200, 50)
	if err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		f, _ := s.Next()
		if a, b := disaggid.Pack(f), snowflake.Mint(&f); a != b {
			t.Fatalf("%+v: %d and %d", f, a, b)
		}
	}
}

// TestNoIDIsLeft: without ids a placement that needs an id fails and holds nothing. A
// placement that needs no id succeeds. With a new range all placements succeed.
func TestNoIDIsLeft(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode", "b both")
	ids := disaggid.NewSource()
	w.SetIDs(ids)
	if _, err := w.Place(t.Context(), placetest.NewPlacementRequest()); !errors.Is(err, coordinator.ErrNoID) {
		t.Fatal(err)
	}
	if w.Open() != 0 || w.LiveIDs() != 0 {
		t.Errorf("%d leases, %d ids", w.Open(), w.LiveIDs())
	}
	for _, name := range []string{"p", "d"} {
		if l := &w.Target(t, name, 0).Load[0]; l.Requests() != 0 {
			t.Errorf("%s has %d requests", name, l.Requests())
		}
	}
	a := placetest.NewPlacementRequest()
	a.ID = 1 << 41
	kept, err := w.Place(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	kept.Lease.Release()
	ids.Extend(disaggid.Range{From: disaggid.Epoch, Until: disaggid.Epoch + 1})
	w.Must(t, placetest.NewPlacementRequest())
}

// TestFallbacksOfAFailedPlace: the observer gets the fallbacks of a placement that
// fails, because there is no Placement that contains them.
func TestFallbacksOfAFailedPlace(t *testing.T) {
	w := newWorld(t, "p prefill")
	w.SetDecider(placetest.Stub{OnPlan: func(*abi.PlanFacts) (abi.PlanAnswer, string, bool) {
		return abi.PlanAnswer{}, coordinator.ReasonTrap, false
	}})
	if _, err := w.Place(t.Context(), placetest.NewPlacementRequest()); !errors.Is(err, coordinator.ErrNoTarget) {
		t.Fatal(err)
	}
	if w.Counts.Fallbacks[coordinator.Fallback{What: "plan", Reason: "trap"}] != 1 {
		t.Errorf("counted %v", w.Counts.Fallbacks)
	}
}

func TestExpected(t *testing.T) {
	for _, tt := range []struct{ max, n, want int64 }{
		{10, 1, 10}, {0, 1, 0}, {-1, 1, coordinator.UsualAnswer}, {-1, 3, 3 * coordinator.UsualAnswer}, {10, 0, 10},
		{1 << 62, 1, coordinator.LongAnswer}, {1 << 62, 1 << 62, coordinator.LongAnswer * coordinator.MaxSequence},
	} {
		if got := coordinator.Expected(&abi.RequestFacts{MaxTokens: tt.max, N: tt.n}); got != tt.want {
			t.Errorf("max %d, n %d: %d, want %d", tt.max, tt.n, got, tt.want)
		}
	}
}

// TestSetDecider: new placements use the new decider at once. Earlier placements stay.
func TestSetDecider(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode", "b both one")
	w.SetDecider(placetest.Builtin(t, "always", "round_robin"))
	a := w.Must(t, placetest.NewPlacementRequest())
	w.SetDecider(placetest.Builtin(t, "never", "power_of_two"))
	b := w.Must(t, placetest.NewPlacementRequest())
	if a.Policy != "round_robin" || a.Flow != abi.FlowConcurrent || b.Policy != "power_of_two" || b.Flow != abi.FlowAggregated {
		t.Errorf("%s %v, then %s %v", a.Policy, a.Flow, b.Policy, b.Flow)
	}
	a.Lease.Release()
	b.Lease.Release()
	w.Idle(t)
}

func TestRemovedInstanceFreesItsLoad(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	p := w.Must(t, placetest.NewPlacementRequest())
	if err := w.Reg.Remove("d", time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Place(t.Context(), placetest.NewPlacementRequest()); !errors.Is(err, coordinator.ErrNoTarget) {
		t.Errorf("got a placement on a draining instance: %v", err)
	}
	p.Lease.Release()
	w.Arrived()
	for _, target := range []engine.Target{p.Prefill, p.Decode} {
		if target.Load[0].Requests() != 0 {
			t.Errorf("%s still carries load", target.Name())
		}
	}
}

// A draining prefill engine that has answered stays until decode has fetched the KV, or
// until the attempt has ended.
func TestDrainingPrefillIsFetchedFrom(t *testing.T) {
	for name, over := range map[string]func(*coordinator.Lease){"answered": func(l *coordinator.Lease) { l.Answered(true) }, "released": (*coordinator.Lease).Release} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "p prefill", "d decode")
				p := w.Must(t, placetest.NewPlacementRequest())
				p.Lease.PrefillDone()
				if err := w.Reg.Remove("p", time.Hour); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Minute) // the registry checks the drain many times
				if p.Prefill.Gone() {
					t.Error("prefill has left before decode has its KV")
				}
				over(p.Lease)
				time.Sleep(time.Second)
				if !p.Prefill.Gone() {
					t.Error("prefill stays although no decode needs its KV")
				}
				p.Lease.Release()
			})
		})
	}
}

// The pair table and the pair states of the rows are filled only if a policy needs them.
func TestPairsOnRequest(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode", "e decode")
	target := func(name string) engine.Target { return w.Target(t, name, 0) }
	w.Reg.Pair(target("p"), target("e")).Success()
	var seen abi.PlaceFacts
	for _, needs := range []abi.Needs{0, abi.NeedPairs} {
		w.SetDecider(placetest.Stub{Wants: needs, OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			seen = *f
			seen.Pairs, seen.Candidates = slices.Clone(f.Pairs), slices.Clone(f.Candidates)
			return abi.PlaceDecision{}, coordinator.ReasonAbsent, false
		}})
		for _, fixed := range []engine.Target{{}, target("p")} {
			p, err := w.Place(t.Context(), &coordinator.PlacementRequest{Model: "m", Prefill: fixed})
			if err != nil {
				t.Fatal(err)
			}
			p.Lease.Release()
			ready := 0
			for _, c := range seen.Candidates {
				if c.Pair == abi.PairReady {
					ready++
				}
			}
			want, wantReady := 0, 0
			if needs != 0 {
				want = 1
				if !fixed.IsZero() {
					wantReady = 1
				}
			}
			if len(seen.Pairs) != want || ready != wantReady {
				t.Errorf("needs %d, fixed %q: pairs %v, %d rows ready", needs, fixed.Name(), seen.Pairs, ready)
			}
			for _, pair := range seen.Pairs {
				d := seen.Candidates[pair.Decode]
				if pair.State != abi.PairReady || d.Instance != target("e").ID || seen.Candidates[pair.Prefill].Instance != target("p").ID {
					t.Errorf("pair %+v of %+v", pair, seen.Candidates)
				}
			}
		}
	}
}
