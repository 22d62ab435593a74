package engine

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// brokenPair returns a registry with the engines p and d, the home of none (e), and the broken
// pair of p and d, in a synctest bubble.
func brokenPair(t *testing.T, run func(f *fleet, pair *Pair)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{
			f.spec("p", "prefill", "fake"), f.spec("d", "decode", "fake"), f.spec("e", "decode", "fake"),
		}, 0))
		f.start(t)
		pair := f.Pair(Target{Instance: f.get(t, "p")}, Target{Instance: f.get(t, "d")})
		pair.Begin()
		if !pair.Failure(Unmet) {
			t.Fatal("the pair is not broken")
		}
		pair.End()
		run(f, pair)
	})
}

// users reports whether a user's request may use the pair. It may take the trial.
func (f *fleet) users(p *Pair) bool {
	return !f.PairBlocked(p.Prefill, p.Decode, time.Now()) && f.AllowPair(p.Prefill, p.Decode)
}

// TestTrialIsTheProxys: after the pause the proxy takes the trial, only one at a time. Users'
// requests wait for its success, however long the trial takes.
func TestTrialIsTheProxys(t *testing.T) {
	brokenPair(t, func(f *fleet, pair *Pair) {
		none := func(when string) {
			t.Helper()
			if _, p := f.ClaimTrial(time.Now(), nil); p != nil {
				t.Errorf("%s: the trial was claimed", when)
			}
			if f.users(pair) || pair.State() != abi.PairBroken {
				t.Errorf("%s: a user's request may use the pair in state %v", when, pair.State())
			}
		}
		none("the circuit is open")
		time.Sleep(10 * time.Second)
		if f.users(pair) {
			t.Error("a user's request got the trial")
		}
		if _, p := f.ClaimTrial(time.Now(), f.get(t, "e")); p != nil {
			t.Error("a sidecar tries a pair of other engines")
		}
		if _, p := f.ClaimFresh(time.Now(), nil, func(*Instance) bool { return true }); p == nil || p.Decode.Name() != "e" {
			t.Error("the pair that is not broken was not claimed")
		} else if _, p := f.ClaimFresh(time.Now(), nil, func(*Instance) bool { return true }); p != nil {
			t.Error("a broken pair is no new pair")
		}
		model, p := f.ClaimTrial(time.Now(), f.get(t, "d"))
		if model != "m" || p != pair {
			t.Fatalf("claimed %q %v", model, p)
		}
		for range 10 { // the pause of the circuit ends during the trial
			none("a trial runs")
			time.Sleep(10 * time.Second)
		}
		if f.TryPair(pair.Prefill, pair.Decode) {
			t.Error("a user's request without another pair got a second trial")
		}
		pair.Failure(Unmet)
		pair.Tried(false)
		none("the trial has failed")
		time.Sleep(40 * time.Second)
		if _, p := f.ClaimTrial(time.Now(), nil); p != pair {
			t.Fatal("the second trial was not claimed")
		}
		pair.Success()
		pair.Tried(false)
		if !f.users(pair) || f.PairsInTrouble() || pair.State() != abi.PairReady {
			t.Errorf("after a good trial: state %v", pair.State())
		}
	})
}

// TestTrialOfUsers: a user's request is the trial if the proxy does not begin one, if the engines
// refuse the proxy's request, or if there is no other pair.
func TestTrialOfUsers(t *testing.T) {
	brokenPair(t, func(f *fleet, pair *Pair) {
		if f.TryPair(pair.Prefill, pair.Decode) {
			t.Error("the circuit is open")
		}
		time.Sleep(10 * time.Second)
		if !f.TryPair(pair.Prefill, pair.Decode) || f.TryPair(pair.Prefill, pair.Decode) {
			t.Error("one request without another pair is the trial")
		}
		pair.Failure(Unmet)
		time.Sleep(20*time.Second + ownTrial - 1)
		if f.users(pair) {
			t.Error("the proxy's time is not over")
		}
		time.Sleep(time.Nanosecond)
		if !f.users(pair) || f.users(pair) {
			t.Error("one user's request is the trial if the proxy begins none")
		}
		pair.Failure(Unmet)

		time.Sleep(40 * time.Second)
		if _, p := f.ClaimTrial(time.Now(), nil); p != pair {
			t.Fatal("the trial was not claimed")
		}
		pair.Tried(true) // the engines refuse it
		if _, p := f.ClaimTrial(time.Now(), nil); p != nil {
			t.Error("the proxy tries again although the engines refuse")
		}
		if !f.users(pair) || f.users(pair) {
			t.Error("one user's request is the trial at once")
		}
		pair.Failure(Unmet)
		time.Sleep(2 * time.Minute)
		if _, p := f.ClaimTrial(time.Now(), nil); p != pair {
			t.Error("the next trial is the proxy's again")
		}
	})
}

// TestTrialWithoutOutcome: the proxy tries again after the next pause. A pair whose engine has
// restarted is not the broken pair.
func TestTrialWithoutOutcome(t *testing.T) {
	brokenPair(t, func(f *fleet, pair *Pair) {
		time.Sleep(10 * time.Second)
		f.ClaimTrial(time.Now(), nil)
		pair.Tried(false)
		if f.users(pair) {
			t.Error("a user's request may use the pair")
		}
		time.Sleep(20 * time.Second)
		if _, p := f.ClaimTrial(time.Now(), nil); p != pair {
			t.Fatal("the pair was not tried again")
		}
		f.pairs.drop(pair.Prefill.ID)
		pair.Failure(Unmet)
		pair.Tried(true)
		if f.PairsInTrouble() || f.Pair(pair.Prefill, pair.Decode) == pair {
			t.Error("the late end of a trial affects the new pair")
		}
	})
}

// TestDoubtedPair: after a restart of prefill at the same address, the proxy tries each pair of the
// former process at once. Users' requests wait for its success, unless they have no other pair.
func TestDoubtedPair(t *testing.T) {
	for _, works := range []bool{true, false} {
		brokenPair(t, func(f *fleet, pair *Pair) {
			p, d := pair.Prefill, pair.Decode
			pair.Success()
			f.doubt(d.Instance, []*Pair{pair})
			if !f.users(pair) {
				t.Fatal("a restart of decode breaks the pair")
			}
			f.doubt(p.Instance, f.restarted(p.Instance))
			if pair = f.Pair(p, d); f.users(pair) || !f.TryPair(p, d) {
				t.Error("before the trial: want only requests without another pair")
			}
			if _, tried := f.ClaimTrial(time.Now(), nil); tried != pair {
				t.Fatal("the proxy does not try the pair at once")
			}
			if f.users(pair) || !f.TryPair(p, d) {
				t.Error("during the trial: want only requests without another pair")
			}
			if works {
				pair.Success()
			} else {
				pair.Failure(Unmet)
			}
			pair.Tried(false)
			if f.users(pair) != works || f.TryPair(p, d) != works {
				t.Errorf("after a trial with success %v: users %v, without another pair %v", works, f.users(pair), f.TryPair(p, d))
			}
		})
	}
}

// TestRestartsOfManyPairs: the work for a restart grows with the number of the instance's pairs, not
// with its square. During a part of this work no request can be placed.
func TestRestartsOfManyPairs(t *testing.T) {
	const pairs, each = 2000, 2 << 10 // bytes
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("p", "prefill", "fake"), f.spec("d", "decode", "fake")}, 0))
		p, d := f.get(t, "p"), f.get(t, "d")
		for rank := range pairs {
			f.Pair(Target{Instance: p}, Target{Instance: d, Rank: rank}).Success()
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range 3 {
			f.doubt(p, f.restarted(p))
		}
		runtime.ReadMemStats(&after)
		if n := len(*f.pairs.trouble.Load()); n != pairs {
			t.Errorf("%d pairs are doubted, want %d", n, pairs)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 3*pairs*each {
			t.Errorf("three restarts allocate %d MiB", n>>20)
		}
		if f.restarted(d); f.pairs.trouble.Load() != nil || len(f.pairs.from) != 0 {
			t.Error("pairs are left after a restart of decode")
		}
	})
}

// TestFailedWarmUpOpensTheCircuit: the first failure of a new pair that the proxy tries opens the
// circuit, whatever its kind. A user's request that fails counts as usual.
func TestFailedWarmUpOpensTheCircuit(t *testing.T) {
	for _, own := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet(t)
			f.must(t, f.Apply(SourceStatic, []config.Engine{f.spec("p", "prefill", "fake"), f.spec("d", "decode", "fake")}, 0))
			f.start(t)
			pair := f.Pair(Target{Instance: f.get(t, "p")}, Target{Instance: f.get(t, "d")})
			if own {
				if _, p := f.ClaimFresh(time.Now(), nil, func(*Instance) bool { return true }); p != pair {
					t.Fatal("not claimed")
				}
			}
			pair.Begin()
			if opened := pair.Failure("kv_load"); opened != own || f.users(pair) == own {
				t.Errorf("proxy's own request %t: opened %t", own, opened)
			}
			pair.End()
			pair.Tried(false)
		})
	}
}
