package coordinator_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// offered lists the name and role of each candidate of a placement.
func offered(p *coordinator.Placement) string {
	s := ""
	for i, c := range p.Facts.Candidates {
		s += p.Targets[i].Name() + ":" + c.Roles.String() + " "
	}
	return s
}

// TestOffered: an unfit target is no candidate for a phase while the phase has a fitter
// target. Each phase is judged separately.
func TestOffered(t *testing.T) {
	for _, tt := range []struct {
		name     string
		specs    []string
		broken   []string
		excluded []string
		want     string
	}{
		{"all well", []string{"p prefill", "q prefill", "d decode"}, nil, nil, "p:prefill q:prefill d:decode "},
		{"broken is left out", []string{"p prefill", "q prefill", "d decode", "e decode"}, []string{"p"}, nil, "q:prefill d:decode e:decode "},
		{"excluded is left out", []string{"p prefill", "d decode", "e decode"}, nil, []string{"e"}, "p:prefill d:decode "},
		{"excluded, and no other target", []string{"p prefill", "d decode"}, nil, []string{"p"}, "p:prefill d:decode "},
		{"broken before excluded", []string{"p prefill", "q prefill", "d decode"}, []string{"q"}, []string{"p"}, "q:prefill d:decode "},
		{"all prefill broken, one decode broken", []string{"p prefill", "q prefill", "d decode", "e decode"}, []string{"p", "q", "e"}, nil, "p:prefill q:prefill d:decode "},
		{"every prefill broken", []string{"p prefill", "d decode", "e decode"}, []string{"p"}, nil, "p:prefill d:decode e:decode "},
		{"every decode broken", []string{"p prefill", "d decode", "e decode"}, []string{"d", "e"}, nil, ""},
		{"a broken decode before an excluded one", []string{"p prefill", "d decode", "e decode"}, []string{"d"}, []string{"e"}, "p:prefill e:decode "},
		{"the fitter group", []string{"p1 prefill", "d1 decode", "p2 prefill", "d2 decode"}, []string{"d1"}, nil, "p2:prefill d2:decode "},
		{"the better group, in the other order", []string{"p1 prefill", "d1 decode", "p2 prefill", "d2 decode"}, []string{"p2"}, nil, "p1:prefill d1:decode "},
		{"the less unfit group", []string{"p1 prefill", "d1 decode", "p2 prefill", "d2 decode"}, []string{"p1"}, []string{"p2"}, "p1:prefill d1:decode "},
		{"the group with a decode", []string{"p1 prefill", "d1 decode", "p2 prefill", "d2 decode"}, []string{"d1"}, []string{"p2"}, "p2:prefill d2:decode "},
		{"a broken one of role both is prefill only", []string{"a both", "b both"}, []string{"a"}, nil, "a:prefill b:decode "},
		{"two of role both: decode on the fit one", []string{"b both", "c both"}, []string{"c"}, nil, "b:decode c:prefill "},
		{"the only fit decode cannot prefill too", []string{"a both", "b both", "p prefill"}, []string{"b"}, nil, "a:decode p:prefill "},
		{"the only fit prefill cannot decode too", []string{"a both", "b both", "d decode"}, []string{"b"}, nil, "a:prefill d:decode "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, tt.specs...)
			w.BreakCircuit(t, tt.broken...)
			w.SetDecider(placetest.Builtin(t, "always", "least_load"))
			a := placetest.NewPlacementRequest()
			for _, name := range tt.excluded {
				a.Excluded = append(a.Excluded, w.Target(t, name, 0))
			}
			if tt.want == "" {
				var nt *coordinator.NoTargetError
				if _, err := w.Place(t.Context(), a); !errors.As(err, &nt) || nt.Phase != abi.Decode {
					t.Errorf("got %v, want no target for decode", err)
				}
				return
			}
			p := w.Must(t, a)
			if got := offered(p); got != tt.want {
				t.Errorf("offered %q, want %q", got, tt.want)
			}
			if p.Prefill.Instance == p.Decode.Instance {
				t.Error("both legs on one instance")
			}
			p.Lease.Release()
		})
	}
}

func TestOfferedAggregated(t *testing.T) {
	for _, tt := range []struct {
		name             string
		broken, excluded []string
		want             string
	}{
		{"all well", nil, nil, "a:both b:both c:both "},
		{"one broken, one excluded", []string{"a"}, []string{"b"}, "c:both "},
		{"broken before excluded", []string{"a", "c"}, []string{"b"}, "a:both c:both "},
		{"everything broken", []string{"a", "b", "c"}, []string{"b"}, "a:both c:both "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, "a both one", "b both one", "c both one")
			w.BreakCircuit(t, tt.broken...)
			a := placetest.NewPlacementRequest()
			for _, name := range tt.excluded {
				a.Excluded = append(a.Excluded, w.Target(t, name, 0))
			}
			if got := offered(w.Must(t, a)); got != tt.want {
				t.Errorf("offered %q, want %q", got, tt.want)
			}
		})
	}
}

// TestOfferedFull: targets that have just refused a request for lack of room are offered only if
// a phase has no others, and before those that failed.
func TestOfferedFull(t *testing.T) {
	both := []string{"a both one", "b both one", "c both one"}
	pairs := []string{"p prefill", "q prefill", "d decode", "e decode"}
	for _, tt := range []struct {
		name                   string
		specs                  []string
		full, broken, excluded []string
		want                   string
	}{
		{"one", both, []string{"a"}, nil, nil, "b:both c:both "},
		{"all", both, []string{"a", "b", "c"}, nil, nil, "a:both b:both c:both "},
		{"before broken and excluded", both, []string{"a"}, []string{"b"}, []string{"c"}, "a:both "},
		{"decode", pairs, []string{"d"}, nil, nil, "p:prefill q:prefill e:decode "},
		{"prefill", pairs, []string{"p"}, nil, nil, "q:prefill d:decode e:decode "},
		{"all decodes, one prefill", pairs, []string{"d", "e", "q"}, nil, nil, "p:prefill d:decode e:decode "},
		{"decode, and the other has failed", pairs, []string{"d"}, nil, []string{"e"}, "p:prefill q:prefill d:decode "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, tt.specs...)
			w.BreakCircuit(t, tt.broken...)
			a := placetest.NewPlacementRequest()
			for _, name := range tt.full {
				w.Reg.NoRoom(w.Target(t, name, 0))
			}
			for _, name := range tt.excluded {
				a.Excluded = append(a.Excluded, w.Target(t, name, 0))
			}
			if got := offered(w.Must(t, a)); got != tt.want {
				t.Errorf("offered %q, want %q", got, tt.want)
			}
		})
	}
}

// halfOpen runs f in simulated time. The circuits of the named instances have just
// become half open.
func halfOpen(t *testing.T, specs []string, names []string, f func(t *testing.T, w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, specs...)
		w.BreakCircuit(t, names...)
		time.Sleep(time.Hour)
		synctest.Wait()
		f(t, w)
	})
}

// TestTrial: a half-open instance gets one request. If the request succeeds, the
// circuit closes.
func TestTrial(t *testing.T) {
	halfOpen(t, []string{"p prefill", "d decode", "e decode"}, []string{"e"}, func(t *testing.T, w *world) {
		// The policy always chooses e.
		w.SetDecider(placetest.Stub{OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			return abi.PlaceDecision{Prefill: 0, Decode: int32(len(f.Candidates)) - 1}, "mine", true
		}})
		first := w.Must(t, placetest.NewPlacementRequest())
		if first.Decode.Name() != "e" || !first.Facts.Candidates[2].Trial {
			t.Fatalf("the trial request was placed on %q", first.Decode.Name())
		}
		second := w.Must(t, placetest.NewPlacementRequest())
		if second.Decode.Name() != "d" || len(second.Facts.Candidates) != 2 {
			t.Errorf("during the trial a request was placed on %q of %q", second.Decode.Name(), offered(second))
		}
		first.Decode.Breaker.Success()
		if third := w.Must(t, placetest.NewPlacementRequest()); third.Decode.Name() != "e" {
			t.Errorf("after the trial a request was placed on %q", third.Decode.Name())
		}
	})
}

// TestTrialTaken: a policy decides on a table in which the trial is free. In the meantime
// another request becomes the trial.
func TestTrialTaken(t *testing.T) {
	for _, tt := range []struct {
		name, taken, prefill, decode string
		specs                        []string
	}{
		{"decode", "e", "p", "d", []string{"p prefill", "e decode", "d decode"}},
		{"prefill", "q", "p", "d", []string{"q prefill", "p prefill", "d decode"}},
		{"nothing else", "d", "p", "d", []string{"p prefill", "d decode"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			halfOpen(t, tt.specs, []string{tt.taken}, func(t *testing.T, w *world) {
				w.SetDecider(placetest.Stub{OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
					if !w.Target(t, tt.taken, 0).Breaker.Allow() {
						t.Error("the trial was not free")
					}
					d := abi.PlaceDecision{Prefill: 0, Decode: 1}
					if f.Candidates[1].Roles&abi.RoleDecode == 0 {
						d.Decode = 2
					}
					return d, "mine", true
				}})
				p := w.Must(t, placetest.NewPlacementRequest())
				if p.Prefill.Name() != tt.prefill || p.Decode.Name() != tt.decode || placetest.Show(p.Fallbacks) != "place/trial_taken" {
					t.Errorf("placed on %q and %q, fallbacks %q", p.Prefill.Name(), p.Decode.Name(), placetest.Show(p.Fallbacks))
				}
			})
		})
	}
}

func TestTrialTakenAggregated(t *testing.T) {
	halfOpen(t, []string{"a both one", "b both one"}, []string{"a"}, func(t *testing.T, w *world) {
		w.SetDecider(placetest.Stub{OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			w.Target(t, "a", 0).Breaker.Allow()
			return abi.PlaceDecision{Prefill: -1, Decode: 0}, "mine", true
		}})
		if p := w.Must(t, placetest.NewPlacementRequest()); p.Decode.Name() != "b" {
			t.Errorf("placed on %q", p.Decode.Name())
		}
	})
}

// TestPairCircuit: placements avoid a pair whose transfers fail. Each of the two
// engines still serves in other pairs.
func TestPairCircuit(t *testing.T) {
	for _, tt := range []struct {
		name            string
		broken          []string // pairs such as "pd"
		prefill, decode string
		fallbacks       string
	}{
		{"another decode", []string{"pd"}, "p", "e", "place/pair_broken"},
		{"another prefill", []string{"pd", "pe"}, "q", "d", "place/pair_broken"},
		{"another of both", []string{"pd", "pe", "qd"}, "q", "e", "place/pair_broken"},
		{"none", []string{"pd", "pe", "qd", "qe"}, "", "", ""},
		{"not this pair", []string{"qe"}, "p", "d", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, "p prefill", "q prefill", "d decode", "e decode")
			for _, b := range tt.broken {
				for range 3 {
					w.Reg.Pair(w.Target(t, b[:1], 0), w.Target(t, b[1:], 0)).Failure("kv_load")
				}
			}
			w.SetDecider(placetest.Stub{OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
				return abi.PlaceDecision{Prefill: 0, Decode: 2}, "mine", true
			}})
			if tt.prefill == "" {
				var nt *coordinator.NoTargetError
				if _, err := w.Place(t.Context(), placetest.NewPlacementRequest()); !errors.As(err, &nt) || nt.Phase != abi.Decode {
					t.Errorf("got %v, want no target for decode", err)
				}
				w.Idle(t)
				return
			}
			p := w.Must(t, placetest.NewPlacementRequest())
			if p.Prefill.Name() != tt.prefill || p.Decode.Name() != tt.decode || placetest.Show(p.Fallbacks) != tt.fallbacks {
				t.Errorf("placed on %q and %q, fallbacks %q", p.Prefill.Name(), p.Decode.Name(), placetest.Show(p.Fallbacks))
			}
			if len(p.Facts.Candidates) != 4 {
				t.Error("a broken pair is no reason to leave out its engines")
			}
		})
	}
}

// TestPairTrial: a half-open pair gets one request, after the time in which the proxy
// may try the pair itself.
func TestPairTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "p prefill", "d decode", "e decode")
		pair := w.Reg.Pair(w.Target(t, "p", 0), w.Target(t, "d", 0))
		for range 3 {
			pair.Failure("kv_load")
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		w.SetDecider(placetest.Stub{OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			return abi.PlaceDecision{Prefill: 0, Decode: 1}, "mine", true
		}})
		for n, want := range []string{"d", "e", "e"} {
			if p := w.Must(t, placetest.NewPlacementRequest()); p.Decode.Name() != want {
				t.Errorf("request %d was placed on %q, want %q", n, p.Decode.Name(), want)
			}
		}
		pair.Success()
		if p := w.Must(t, placetest.NewPlacementRequest()); p.Decode.Name() != "d" {
			t.Errorf("after the trial a request was placed on %q", p.Decode.Name())
		}
	})
}

// TestFixed: a new placement keeps the prefill target and the id of an earlier one.
func TestFixed(t *testing.T) {
	w := newWorld(t, "p prefill two 2", "q prefill", "d decode", "e decode")
	first := w.Must(t, placetest.NewPlacementRequest())
	a := placetest.NewPlacementRequest()
	a.Prefill, a.ID, a.Excluded = first.Prefill, first.ID, []engine.Target{first.Decode}
	second := w.Must(t, a)
	if second.Prefill != first.Prefill || second.ID != first.ID || second.Decode == first.Decode || second.Flow != first.Flow {
		t.Errorf("moved to %q/%d and %q, id %d", second.Prefill.Name(), second.Prefill.Rank, second.Decode.Name(), second.ID)
	}
	if second.Facts.Fixed != 0 || second.Targets[0] != first.Prefill || offered(second) != first.Prefill.Name()+":prefill "+second.Decode.Name()+":decode " {
		t.Errorf("offered %q", offered(second))
	}
	if n := first.Prefill.Load[first.Prefill.Rank].Requests(); n != 1 {
		t.Errorf("prefill carries %d requests: its work is done once", n)
	}
	first.Lease.Release()
	if w.LiveIDs() != 1 {
		t.Error("the id is still in flight")
	}
	second.Lease.PrefillDone()
	second.Lease.Release()
	w.Idle(t)
}

func TestFixedVerifies(t *testing.T) {
	w := newWorld(t, "p prefill", "q prefill", "d decode", "e decode")
	for _, tt := range []struct {
		prefill, decode int32
		ok              bool
	}{{0, 1, true}, {0, 2, true}, {1, 2, false}, {-1, 1, false}, {0, 0, false}} {
		w.SetDecider(placetest.Stub{OnPlace: func(f *abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
			if f.Fixed != 0 || len(f.Candidates) != 3 {
				t.Errorf("facts %+v", f)
			}
			return abi.PlaceDecision{Prefill: tt.prefill, Decode: tt.decode}, "mine", true
		}})
		a := placetest.NewPlacementRequest()
		a.Prefill, a.ID = w.Target(t, "p", 0), abi.MinDisaggID
		p := w.Must(t, a)
		if (p.Policy == "mine") != tt.ok || p.Prefill.Name() != "p" || p.ID != abi.MinDisaggID {
			t.Errorf("%+v: %q placed on %q and %q", tt, p.Policy, p.Prefill.Name(), p.Decode.Name())
		}
		p.Lease.Release()
	}
	w.Idle(t)
}

// TestFixedWhere: the state of the prefill target and of its decode targets changes
// between the two placements.
func TestFixedWhere(t *testing.T) {
	for _, tt := range []struct {
		name  string
		do    func(t *testing.T, w *world)
		want  string // decode target, or the phase without a target
		count string
	}{
		{"prefill drains", func(t *testing.T, w *world) { w.remove(t, "p") }, "d", ""},
		{"prefill's circuit is open", func(t *testing.T, w *world) { w.BreakCircuit(t, "p") }, "d", ""},
		{"a decode's circuit is open", func(t *testing.T, w *world) { w.BreakCircuit(t, "d") }, "e", ""},
		{"a pair's circuit is open", func(t *testing.T, w *world) { w.breakPair(t, "p", "d") }, "e", ""},
		{"all are open", func(t *testing.T, w *world) { w.BreakCircuit(t, "d"); w.breakPair(t, "p", "e") }, "d", ""},
		{"all pairs are open", func(t *testing.T, w *world) { w.breakPair(t, "p", "d"); w.breakPair(t, "p", "e") }, "d", "place/pair_broken"},
		{"no decode is left", func(t *testing.T, w *world) { w.remove(t, "d"); w.remove(t, "e") }, "decode", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, "p prefill", "q prefill", "d decode", "e decode")
			a := placetest.NewPlacementRequest()
			a.Prefill, a.ID = w.Target(t, "p", 0), abi.MinDisaggID
			// The policy takes the first decode.
			w.SetDecider(placetest.Stub{OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
				return abi.PlaceDecision{Prefill: 0, Decode: 1}, "mine", true
			}})
			hold := a.Prefill.Load[0].Hold(1) // keeps p from leaving
			defer hold.Drop()
			tt.do(t, w)
			p, err := w.Place(t.Context(), a)
			var nt *coordinator.NoTargetError
			switch {
			case errors.As(err, &nt):
				if nt.Phase.String() != tt.want {
					t.Errorf("no target for %v, want %s", nt.Phase, tt.want)
				}
			case err != nil:
				t.Error(err)
			case p.Decode.Name() != tt.want || p.Prefill != a.Prefill || placetest.Show(p.Fallbacks) != tt.count:
				t.Errorf("placed on %q and %q, fallbacks %q", p.Prefill.Name(), p.Decode.Name(), placetest.Show(p.Fallbacks))
			}
		})
	}
}

// TestFixedGone: a placement cannot keep a prefill target that has left.
func TestFixedGone(t *testing.T) {
	w := newWorld(t, "p prefill", "q prefill", "d decode")
	a := placetest.NewPlacementRequest()
	a.Prefill, a.ID = engine.Target{Instance: &engine.Instance{}}, abi.MinDisaggID
	_, err := w.Place(context.Background(), a)
	var nt *coordinator.NoTargetError
	if !errors.As(err, &nt) || nt.Phase != abi.Prefill {
		t.Errorf("got %v", err)
	}
	w.Idle(t)
}

func (w *world) remove(t *testing.T, name string) {
	t.Helper()
	if err := w.Reg.Remove(name, time.Hour); err != nil {
		t.Fatal(err)
	}
}

// TestTrialOfTheProxy: while the trial of a half-open pair is the proxy's, requests use other pairs,
// and one that no other pair can take is the trial. The proxy's own request is placed on busy
// engines, too.
func TestTrialOfTheProxy(t *testing.T) {
	for _, alone := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			engines := []string{"p prefill", "d decode", "e decode"}
			if alone {
				engines = engines[:2]
			}
			w := newWorld(t, engines...)
			w.breakPair(t, "p", "d")
			time.Sleep(time.Hour)
			synctest.Wait()
			w.SetDecider(placetest.Stub{OnPlace: func(*abi.PlaceFacts) (abi.PlaceDecision, string, bool) {
				return abi.PlaceDecision{Prefill: 0, Decode: 1}, "mine", true
			}})
			if alone {
				w.Must(t, placetest.NewPlacementRequest()).Lease.Release()
				var none *coordinator.NoTargetError
				if _, err := w.Place(t.Context(), placetest.NewPlacementRequest()); !errors.As(err, &none) {
					t.Errorf("the second request without another pair: %v", err)
				}
				return
			}
			user := w.Must(t, placetest.NewPlacementRequest())
			if user.Decode.Name() != "e" {
				t.Errorf("a request was placed on %q", user.Decode.Name())
			}
			model, pair := w.Reg.ClaimTrial(time.Now(), nil)
			if pair == nil {
				t.Fatal("the trial was not claimed")
			}
			a := placetest.NewPlacementRequest()
			a.Model, a.Only = model, coordinator.Pair{Prefill: pair.Prefill, Decode: pair.Decode}
			w.Must(t, a).Lease.Release()
			if p := w.Must(t, placetest.NewPlacementRequest()); p.Decode.Name() != "e" {
				t.Errorf("during the trial a request was placed on %q", p.Decode.Name())
			}
			pair.Success()
			pair.Tried(false)
			if p := w.Must(t, placetest.NewPlacementRequest()); p.Decode.Name() != "d" {
				t.Errorf("after the trial a request was placed on %q", p.Decode.Name())
			}
		})
	}
}

func (w *world) breakPair(t *testing.T, p, d string) {
	t.Helper()
	for range 3 {
		w.Reg.Pair(w.Target(t, p, 0), w.Target(t, d, 0)).Failure("kv_load")
	}
}
