package coordinator_test

import (
	"errors"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// instances returns the instances with these names; nil for no names.
func (w *world) instances(t *testing.T, names ...string) []*engine.Instance {
	t.Helper()
	var list []*engine.Instance
	for _, name := range names {
		list = append(list, w.Target(t, name, 0).Instance)
	}
	return list
}

// TestWithin: a phase is placed only on the instances that the request allows for the
// phase. An instance gets no role for which no partner is left.
func TestWithin(t *testing.T) {
	for _, tt := range []struct {
		name                   string
		specs                  []string
		prefill, decode, whole []string
		broken, excluded       []string
		one                    bool   // the request requires one leg
		want                   string // "" for no target
	}{
		{"no limit", []string{"p prefill", "d decode"}, nil, nil, nil, nil, nil, false, "p:prefill d:decode "},
		{"decode here", []string{"p prefill", "q prefill", "d decode", "e decode"}, nil, []string{"e"}, nil, nil, nil, false, "p:prefill q:prefill e:decode "},
		{"prefill named", []string{"p prefill", "q prefill", "d decode", "e decode"}, []string{"q"}, []string{"e"}, nil, nil, nil, false, "q:prefill e:decode "},
		{"prefill here", []string{"p prefill", "q prefill", "d decode", "e decode"}, []string{"p"}, nil, nil, nil, nil, false, "p:prefill d:decode e:decode "},
		{"here is of both roles", []string{"a both", "b both", "p prefill"}, nil, []string{"a"}, nil, nil, nil, false, "a:decode b:prefill p:prefill "},
		{"one of both roles for both phases", []string{"a both", "b both"}, []string{"a"}, []string{"a"}, nil, nil, nil, false, ""},
		{"groups that cannot meet", []string{"p1 prefill", "d1 decode", "p2 prefill", "d2 decode"}, []string{"p1"}, []string{"d2"}, nil, nil, nil, false, ""},
		{"the group of the one named", []string{"p1 prefill", "d1 decode", "p2 prefill", "d2 decode"}, []string{"p2"}, nil, nil, nil, nil, false, "p2:prefill d2:decode "},
		{"named of the wrong role", []string{"p prefill", "d decode"}, []string{"d"}, nil, nil, nil, nil, false, ""},
		{"named is down", []string{"p prefill", "d decode", "downp prefill"}, []string{"downp"}, []string{"d"}, nil, nil, nil, false, ""},
		{"named is broken and alone", []string{"p prefill", "q prefill", "d decode"}, []string{"q"}, []string{"d"}, nil, []string{"q"}, nil, false, "q:prefill d:decode "},
		{"one of two named is excluded", []string{"p prefill", "q prefill", "r prefill", "d decode"}, []string{"p", "q"}, []string{"d"}, nil, nil, []string{"p"}, false, "q:prefill d:decode "},
		{"nobody", []string{"p prefill", "d decode"}, []string{}, nil, nil, nil, nil, false, ""},
		{"whole here", []string{"d decode", "e decode", "a both"}, nil, nil, []string{"e"}, nil, nil, true, "e:decode "},
		{"whole on nobody", []string{"d decode", "a both"}, nil, nil, []string{}, nil, nil, true, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, tt.specs...)
			w.BreakCircuit(t, tt.broken...)
			w.SetDecider(placetest.Builtin(t, "always", "least_load"))
			a := placetest.NewPlacementRequest()
			list := func(names []string) []*engine.Instance {
				if names == nil {
					return nil
				}
				return append([]*engine.Instance{}, w.instances(t, names...)...)
			}
			a.Within = coordinator.Within{list(tt.prefill), list(tt.decode), list(tt.whole)}
			for _, name := range tt.excluded {
				a.Excluded = append(a.Excluded, w.Target(t, name, 0))
			}
			if tt.one {
				a.Aggregate = abi.RoleDecode
			}
			p, err := w.Place(t.Context(), a)
			if tt.want == "" {
				if !errors.Is(err, coordinator.ErrNoTarget) {
					t.Fatalf("got %v", err)
				}
				w.Idle(t)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := offered(p); got != tt.want {
				t.Errorf("offered %q, want %q", got, tt.want)
			}
			p.Lease.Release()
			w.Idle(t)
		})
	}
}

// TestWithinFixed: the allowed instances also limit the decode of a kept prefill.
func TestWithinFixed(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode", "e decode")
	a := placetest.NewPlacementRequest()
	a.Prefill, a.ID = w.Target(t, "p", 0), abi.MinDisaggID
	a.Within.Decode = w.instances(t, "e")
	p := w.Must(t, a)
	if p.Decode.Name() != "e" || p.Prefill != a.Prefill || len(p.Targets) != 2 {
		t.Errorf("placed on %q and %q of %d", p.Prefill.Name(), p.Decode.Name(), len(p.Targets))
	}
	p.Lease.Release()
}

// TestTwo: the option forces two legs where the plan would have one. It does not if the
// form of the request or an earlier decision excludes two legs.
func TestTwo(t *testing.T) {
	for _, tt := range []struct {
		name string
		ask  func(*coordinator.PlacementRequest)
		flow abi.Flow
	}{
		{"forced", func(*coordinator.PlacementRequest) {}, abi.FlowConcurrent},
		{"one leg was requested", func(a *coordinator.PlacementRequest) { a.Aggregate = abi.RoleDecode }, abi.FlowAggregated},
		{"unpairable", func(a *coordinator.PlacementRequest) { a.Request.PairBroken = true }, abi.FlowAggregated},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, "p prefill", "d decode", "b both")
			w.SetDecider(placetest.Builtin(t, "never", "least_load"))
			a := placetest.NewPlacementRequest()
			a.Two = true
			tt.ask(a)
			p := w.Must(t, a)
			if p.Flow != tt.flow {
				t.Errorf("got flow %v", p.Flow)
			}
			p.Lease.Release()
		})
	}
}
