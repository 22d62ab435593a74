package engine

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// pairOf returns a registry and two targets. The registry need not contain the targets.
func pairOf(t *testing.T) (f *fleet, p, d Target) {
	t.Helper()
	f = newFleet(t)
	p = Target{Instance: &Instance{ID: 1, Spec: config.Engine{Name: "p"}}}
	d = Target{Instance: &Instance{ID: 2, Spec: config.Engine{Name: "d"}}, Rank: 1}
	return f, p, d
}

func TestPairStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, p, d := pairOf(t)
		if f.Pairs() == nil {
			t.Error("no list")
		}
		pair := f.Pair(p, d)
		check := func(want abi.PairState, blocked, allowed bool) {
			t.Helper()
			if got := pair.State(); got != want {
				t.Errorf("state %v, want %v", got, want)
			}
			if got := f.PairBlocked(p, d, time.Now()); got != blocked {
				t.Errorf("blocked %v", got)
			}
			if got := f.AllowPair(p, d); got != allowed {
				t.Errorf("allowed %v", got)
			}
		}
		check(abi.PairUnknown, false, true)
		for range 2 {
			if !pair.Begin() {
				t.Error("Begin = false for a pair without a transfer")
			}
		}
		check(abi.PairWarming, false, true)
		pair.End()
		check(abi.PairWarming, false, true)
		pair.End() // both attempts ended without KV
		check(abi.PairUnknown, false, true)
		pair.Begin()
		pair.Success()
		check(abi.PairReady, false, true)
		pair.End()
		check(abi.PairReady, false, true)
		if pair.Begin() {
			t.Error("a ready pair is not fresh")
		}
		pair.Failure("kv_load")
		pair.Failure("kv_load")
		check(abi.PairReady, false, true)
		if f.PairsInTrouble() {
			t.Error("no circuit has opened")
		}
		pair.Failure("timeout")
		check(abi.PairBroken, true, false)
		if !f.PairsInTrouble() {
			t.Error("the circuit is open")
		}
		time.Sleep(10 * time.Second)
		check(abi.PairBroken, true, false) // half open, but the first trial is the proxy's
		time.Sleep(ownTrial)
		if got := pair.State(); got != abi.PairUnknown {
			t.Errorf("half open: state %v", got)
		}
		if f.PairBlocked(p, d, time.Now()) || !f.AllowPair(p, d) || f.AllowPair(p, d) {
			t.Error("half open: one trial may pass")
		}
		if !pair.Begin() {
			t.Error("Begin = false for a pair whose circuit has opened")
		}
		opened := time.Now()
		time.Sleep(time.Second)
		pair.Success()
		check(abi.PairReady, false, true)
		if f.PairsInTrouble() {
			t.Error("the circuit has closed")
		}
		rows := f.Pairs()
		if len(rows) != 1 {
			t.Fatalf("got %d rows", len(rows))
		}
		want := PairRow{Prefill: "p", Decode: "d", DecodeRank: 1, State: "ready", Failures: 3, LastError: "timeout", Since: opened.Add(time.Second)}
		if rows[0] != want {
			t.Errorf("row %+v, want %+v", rows[0], want)
		}
	})
}

// TestPairIsNotTheEngine: an open circuit of a pair affects neither the engines nor other
// pairs.
func TestPairIsNotTheEngine(t *testing.T) {
	f, p, d := pairOf(t)
	other := Target{Instance: d.Instance, Rank: 0}
	for range 3 {
		f.Pair(p, d).Failure("kv_load")
	}
	now := time.Now()
	if !f.PairBlocked(p, d, now) || f.PairBlocked(p, other, now) || f.PairBlocked(d, p, now) {
		t.Error("only the pair itself is blocked")
	}
	if p.Breaker.Circuit(now) != circuit.Closed || d.Breaker.Circuit(now) != circuit.Closed {
		t.Error("an engine's circuit opened")
	}
}

func TestPairDrop(t *testing.T) {
	f, p, d := pairOf(t)
	old := f.Pair(p, d)
	for range 3 {
		old.Failure("kv_load")
	}
	f.Pair(d, p)
	f.pairs.drop(p.ID)
	if len(f.Pairs()) != 0 || f.PairsInTrouble() {
		t.Error("pairs of a dropped instance remain")
	}
	old.Success()
	old.Failure("late") // the leg began before the success
	old.Failure("late")
	old.Failure("late")
	if f.PairsInTrouble() || f.Pair(p, d) == old {
		t.Error("a dropped pair is used again")
	}
	p.gone.Store(true)
	f.pairs.drop(p.ID)
	f.Pair(p, d).Success()
	if len(f.Pairs()) != 0 {
		t.Error("a pair of an instance that has left remains")
	}
}

func TestPairTableIsBounded(t *testing.T) {
	f, p, d := pairOf(t)
	for range 3 {
		f.Pair(p, d).Failure("kv_load")
	}
	for n := range maxPairs + 10 {
		f.Pair(Target{Instance: p.Instance, Rank: n + 1}, d)
	}
	if n := len(f.pairs.pairs); n != maxPairs {
		t.Errorf("got %d pairs, want %d", n, maxPairs)
	}
	if !f.PairBlocked(p, d, time.Now()) {
		t.Error("a broken pair was evicted before a good one")
	}
}

func TestPairTableEvictsBroken(t *testing.T) {
	f, p, d := pairOf(t)
	for range 3 {
		f.Pair(p, d).Failure("kv_load")
	}
	f.pairs.mu.Lock()
	f.pairs.evict()
	f.pairs.mu.Unlock()
	if len(f.Pairs()) != 0 || f.PairsInTrouble() {
		t.Error("the only pair was not evicted")
	}
}

func TestPairRowsAreSorted(t *testing.T) {
	f, p, d := pairOf(t)
	for _, rank := range []int{2, 0, 1} {
		f.Pair(Target{Instance: p.Instance, Rank: rank}, d)
		f.Pair(d, Target{Instance: p.Instance, Rank: rank})
	}
	got := ""
	for _, r := range f.Pairs() {
		got += fmt.Sprintf("%s%d%s%d ", r.Prefill, r.PrefillRank, r.Decode, r.DecodeRank)
	}
	if want := "d1p0 d1p1 d1p2 p0d1 p1d1 p2d1 "; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestPairHammer(t *testing.T) {
	f, p, d := pairOf(t)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for n := range 500 {
				a, b := Target{Instance: p.Instance, Rank: n % 3}, Target{Instance: d.Instance, Rank: g % 2}
				pair := f.Pair(a, b)
				if n%4 == 0 {
					pair.Failure("kv_load")
				} else {
					pair.Success()
				}
				f.PairBlocked(a, b, time.Now())
				f.AllowPair(a, b)
				if n%100 == 0 {
					f.pairs.drop(p.ID)
					f.Pairs()
				}
			}
		})
	}
	wg.Wait()
	for _, r := range f.Pairs() {
		if r.State != "ready" && r.State != "broken" && r.State != "unknown" {
			t.Errorf("row %+v", r)
		}
	}
	f.pairs.drop(p.ID)
	if f.PairsInTrouble() {
		t.Error("trouble without pairs")
	}
}

// A pair is proven only while a further success would change nothing: whatever happened before, a
// success leaves a ready pair with a closed circuit and no failure.
func TestPairProven(t *testing.T) {
	f, p, d := pairOf(t)
	f.pairs.rules.Store(&circuit.Rules{Failures: 2, OpenFor: time.Minute})
	pair := f.Pair(p, d)
	for _, step := range []struct {
		name   string
		do     func()
		proven bool
	}{
		{"new", func() {}, false},
		{"begun", func() { pair.Begin() }, false},
		{"success", pair.Success, true},
		{"failure", func() { pair.Failure("x") }, false},
		{"success", pair.Success, true},
		{"broken", func() { pair.Failure("x"); pair.Failure("x") }, false},
		{"success", pair.Success, true},
		{"broken in another process", func() {
			pair.follow(abi.PairUnknown, &fleetpb.Circuit{Failures: 2, LeftMs: 1000})
		}, false},
		{"success", pair.Success, true},
		{"tried by the proxy", func() {
			if f.claim(p, d, time.Now()) == nil {
				t.Fatal("the pair was not claimed")
			}
		}, false},
		{"success", pair.Success, false}, // the proxy's request needs to know it
		{"the proxy's request has ended", func() { pair.Tried(true) }, true},
	} {
		step.do()
		if got := pair.proven.Load(); got != step.proven {
			t.Errorf("%s: proven is %v", step.name, got)
		}
		if got := pair.State(); step.name == "success" && (got != abi.PairReady || pair.Trial() || pair.circuit.Failures() != 0) {
			t.Errorf("after a success: %v, trial %v, %d failures", got, pair.Trial(), pair.circuit.Failures())
		}
	}
}

// The first failure of a new pair whose engines did not meet opens the circuit, and each opening
// in a row lasts twice as long, up to two minutes. A pair that has worked gets circuit.failures.
func TestPairsThatNeverMeet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, p, d := pairOf(t)
		f.pairs.rules.Store(&circuit.Rules{Failures: 3, OpenFor: 10 * time.Second})
		pair := f.Pair(p, d)
		pair.Begin()
		if pair.Trial() || !pair.Failure(Unmet) || pair.State() != abi.PairBroken || !pair.Trial() {
			t.Fatalf("after one failure: %v", pair.State())
		}
		for _, want := range []int{10, 20, 40, 80, 120, 120} {
			from := time.Now()
			for !pair.circuit.Allow() {
				time.Sleep(time.Second)
			}
			if got := time.Since(from); got != time.Duration(want)*time.Second {
				t.Errorf("a trial after %v, want %d s", got, want)
			}
			pair.Failure(Unmet)
		}
		pair.Success()
		for range 2 {
			if pair.Failure(Unmet) {
				t.Error("a pair that has worked is broken before circuit.failures")
			}
		}
		if !pair.Failure(Unmet) || f.PairsInTrouble() == false {
			t.Error("the pair is not broken")
		}
		for from := time.Now(); !pair.circuit.Allow(); time.Sleep(time.Second) {
			if time.Since(from) > 10*time.Second {
				t.Fatal("the first opening after a success lasts longer than circuit.open_for")
			}
		}
	})
}

// TestPairOfDeadEngine: a pair is broken while one of its engines does not answer probes, and names the
// engine. The state of its circuit does not change.
func TestPairOfDeadEngine(t *testing.T) {
	f, p, d := pairOf(t)
	f.Pair(p, d).Success()
	since := time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, tt := range []struct {
		prefill, decode    State
		state, unavailable string
	}{
		{Ready, Ready, "ready", ""}, {Ready, Unhealthy, "broken", "d is unhealthy"}, {Down, Ready, "broken", "p is down"},
		{Ready, Draining, "ready", ""}, {Unhealthy, Unhealthy, "broken", "p is unhealthy"}, {Ready, Ready, "ready", ""},
	} {
		for i, state := range map[*Instance]State{p.Instance: tt.prefill, d.Instance: tt.decode} {
			i.asked.Store(true)
			i.state.Store(uint32(state))
			i.since.Store(since.UnixMilli())
		}
		row := f.Pairs()[0]
		if row.State != tt.state || row.Unavailable != tt.unavailable || (tt.unavailable != "") != row.Since.Equal(since) {
			t.Errorf("%v and %v: %+v", tt.prefill, tt.decode, row)
		}
		if f.Pair(p, d).State() != abi.PairReady {
			t.Errorf("%v and %v: the circuit has changed", tt.prefill, tt.decode)
		}
	}
	d.asked.Store(false)
	if d.state.Store(uint32(Down)); !d.Answers() {
		t.Error("an engine that was not probed yet counts as dead")
	}
}
