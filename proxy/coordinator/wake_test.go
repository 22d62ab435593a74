package coordinator_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// waker notes which engines are woken. It wakes none.
type waker struct {
	registry *engine.Registry
	never    []string // engines that must not be woken
	woken    []string
}

func (w *waker) May(i *engine.Instance) bool { return !slices.Contains(w.never, i.Spec.Name) }

func (w *waker) Wake(i *engine.Instance) {
	if w.registry.BeginWake(i) {
		w.woken = append(w.woken, i.Spec.Name)
	}
}

// TestWakes: a request without a target wakes one engine, or one of each phase in one group. A second
// request wakes no more while these wake up. It wakes none if it has a target.
func TestWakes(t *testing.T) {
	for _, tt := range []struct {
		name          string
		specs         []string
		asleep, never []string
		plan          string
		one           bool     // the request requires one leg
		decode        []string // the allowed decode engines; nil: all
		woken         []string
		placed        bool // the request has a target
	}{
		{name: "a pair", specs: []string{"p prefill", "q prefill", "d decode", "e decode"}, asleep: []string{"p", "q", "d", "e"}, woken: []string{"p", "d"}},
		{name: "prefill sleeps", specs: []string{"p prefill", "q prefill", "d decode"}, asleep: []string{"p", "q"}, woken: []string{"p"}},
		{name: "decode sleeps", specs: []string{"p prefill", "d decode", "e decode"}, asleep: []string{"d", "e"}, woken: []string{"d"}},
		{name: "one prefill sleeps", specs: []string{"p prefill", "q prefill", "d decode"}, asleep: []string{"p"}, placed: true},
		{name: "one cannot be woken", specs: []string{"p prefill", "q prefill", "d decode"}, asleep: []string{"p", "q", "d"}, never: []string{"p"}, woken: []string{"q", "d"}},
		{name: "no decode can be woken", specs: []string{"p prefill", "d decode"}, asleep: []string{"p", "d"}, never: []string{"d"}},
		{name: "no decode can be woken, but one for all", specs: []string{"p prefill", "d decode", "a1 both"}, asleep: []string{"p", "d", "a1"}, never: []string{"d"}, woken: []string{"a1"}},
		{name: "the nearer group", specs: []string{"p1 prefill", "d1 decode", "p2 prefill", "d2 decode"}, asleep: []string{"p1", "d1", "p2"}, woken: []string{"p2"}},
		{name: "groups do not mix", specs: []string{"p1 prefill", "d1 decode", "p2 prefill", "d2 decode"}, asleep: []string{"d1", "p2"}, never: []string{"d1"}, woken: []string{"p2"}},
		{name: "both roles", specs: []string{"a both", "b both"}, asleep: []string{"a", "b"}, woken: []string{"a", "b"}, plan: "always"},
		{name: "one leg", specs: []string{"a both one", "b both one"}, asleep: []string{"a", "b"}, woken: []string{"a"}},
		{name: "one leg on decode", specs: []string{"p prefill", "d decode"}, asleep: []string{"p", "d"}, one: true, woken: []string{"d"}},
		{name: "an engine that must not be used", specs: []string{"p prefill", "d decode", "e decode"}, asleep: []string{"d", "e"}, decode: []string{"e"}, woken: []string{"e"}},
		{name: "ranks of one engine", specs: []string{"p prefill two 2", "d decode two 2"}, asleep: []string{"p", "d"}, woken: []string{"p", "d"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, tt.specs...)
			if tt.plan != "" {
				w.SetDecider(placetest.Builtin(t, tt.plan, "least_load"))
			}
			wake := &waker{registry: w.Reg, never: tt.never}
			w.SetWaker(wake)
			for _, i := range w.instances(t, tt.asleep...) {
				w.Reg.ReportSleep(i, engine.SleepReport{Known: true, Ranks: slices.Repeat([]bool{true}, len(i.Load))}, time.Now())
			}
			for range 2 {
				a := placetest.NewPlacementRequest()
				a.Within.Decode = w.instances(t, tt.decode...)
				if tt.one {
					a.Aggregate = abi.RoleDecode
				}
				p, err := w.Place(t.Context(), a)
				if tt.placed {
					if err != nil {
						t.Fatal(err)
					}
					p.Lease.Release()
				} else if !errors.Is(err, coordinator.ErrNoTarget) {
					t.Fatalf("got %v", err)
				}
				if !slices.Equal(wake.woken, tt.woken) {
					t.Errorf("woke %s, want %s", strings.Join(wake.woken, " "), strings.Join(tt.woken, " "))
				}
			}
			w.Idle(t)
		})
	}
}
