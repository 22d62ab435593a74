package fleet

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/cleanup"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// extremes sets one number or text of v at a time, at any depth, to its least and its
// greatest value, and calls try with each. Unexported fields, targets and types with a
// few values only are left as they are. Targets are instances of this process.
func extremes(v reflect.Value, path string, try func(what string)) {
	set := func(values ...any) {
		old := reflect.ValueOf(v.Interface())
		for _, value := range values {
			v.Set(reflect.ValueOf(value).Convert(v.Type()))
			try(fmt.Sprintf("%s = %.20v", path, value))
		}
		v.Set(old)
	}
	switch v.Interface().(type) {
	case engine.Target, abi.Role, abi.Flow, abi.Phase, abi.PairState:
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				extremes(v.Field(i), path+"."+f.Name, try)
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			extremes(v.Index(i), fmt.Sprintf("%s[%d]", path, i), try)
		}
	case reflect.Int, reflect.Int64:
		set(math.MinInt64, -1, 0, math.MaxInt32, math.MaxInt64)
	case reflect.Int32:
		set(math.MinInt32, -1, 0, math.MaxInt32)
	case reflect.Uint32:
		set(0, uint32(math.MaxUint32))
	case reflect.Uint64:
		set(0, uint64(math.MaxUint64))
	case reflect.String:
		set("", "\x00", strings.Repeat("\xff", 1<<16))
	}
}

// TestExtremes: each side can read everything that the other side writes. Otherwise the
// connection would end, reconnect and end again for the same reason.
func TestExtremes(t *testing.T) {
	w := newWorld(t, "p prefill two 2", "q prefill", "d decode")
	w.SetDecider(placetest.Stub{Wants: abi.NeedBlocks | abi.NeedConversation})
	numbers := placetest.Same{Reg: w.Reg}
	var many []coordinator.Chain
	for i := range maxChains + 2 {
		many = append(many, coordinator.Chain{Form: kvindex.Form{Block: i + 1}, Blocks: []kvindex.Hash{kvindex.Hash(i)}})
	}
	t.Run("ask", func(t *testing.T) {
		h := new(heard)
		for i, a := range append(asks(w, t),
			&coordinator.PlacementRequest{Key: coordinator.Key{Chains: many, Conversation: conversation.Query{Chain: many[0].Blocks}}},
			&coordinator.PlacementRequest{Key: coordinator.Key{Chains: many, Conversation: conversation.Query{Chain: many[maxChains].Blocks}}},
		) {
			extremes(reflect.ValueOf(a).Elem(), fmt.Sprint(i), func(what string) {
				b, ok := appendPlace(nil, new(fleetpb.Place), math.MaxUint64, a, numbers)
				if !ok {
					t.Fatal("a PlacementRequest could not be encoded")
				}
				if err := h.read(b, numbers, make(names)); err != nil || h.lost || h.lease != math.MaxUint64 {
					t.Errorf("%s: %v, lost %v, lease %d", what, err, h.lost, h.lease)
				}
				got, want := h.Request, a.Request
				got.Remaining = want.Remaining                                                                            // sent as PlacementRequest.Deadline
				got.Model, got.Turn, got.Conversation, got.Shared = want.Model, want.Turn, want.Conversation, want.Shared // found by the coordinator
				want.Headers = slices.Clone(want.Headers)
				for i := range want.Headers { // the wire has the bounds of a frame
					l := &want.Headers[i]
					l.Name, l.Value = l.Name[:min(len(l.Name), abi.MaxHeaderName)], l.Value[:min(len(l.Value), abi.MaxHeaderValue)]
				}
				if !reflect.DeepEqual(got, want) || h.Model != a.Model || h.ID != a.ID && !a.Prefill.IsZero() || h.Key.Conversation.ID != a.Key.Conversation.ID ||
					!slices.Equal(h.Key.Conversation.Chain, a.Key.Conversation.Chain) {
					t.Errorf("%s reads as %+v, want %+v", what, &h.PlacementRequest, a)
				}
				h.drop()
			})
		}
	})
	t.Run("reply", func(t *testing.T) {
		a := placetest.NewPlacementRequest()
		p := w.Must(t, a)
		defer p.Lease.Release()
		p.Notes, p.Fallbacks = []string{"note"}, []coordinator.Fallback{{What: "place", Reason: "late"}}
		read := func(what string, a *coordinator.PlacementRequest) {
			g, charge := &granted{}, new(coordinator.Charge)
			if err := readPlaced(appendPlaced(nil, new(fleetpb.Placed), a, p, nil), new(fleetpb.Placed), placetest.NewPlacementRequest(), g, charge, numbers, make(names)); err != nil {
				t.Errorf("%s: readPlaced = %v, want nil", what, err)
			}
			long := p.FirstByte < 0 || p.FirstByte > 24*time.Hour
			if g.ID != p.ID || g.Policy != p.Policy || g.Matched != p.Matched || *charge != p.Lease.Charge() || g.Turn != a.Lookup.Turn ||
				!long && g.FirstByte != p.FirstByte.Truncate(time.Microsecond) || g.FirstByte < 0 || g.FirstByte > 24*time.Hour ||
				!slices.Equal(g.Notes, p.Notes) || !slices.Equal(g.Fallbacks, p.Fallbacks) {
				t.Errorf("%s reads as %+v", what, &g.Placement)
			}
		}
		instances := p.Facts.Candidates
		p.Facts.Candidates = slices.Clone(instances)
		for _, a := range append(asks(w, t), a) {
			extremes(reflect.ValueOf(p).Elem(), "placement", func(what string) { read(what, a) })
			for _, n := range []int64{math.MinInt64, -1, math.MaxInt64} {
				own := p.Lease
				p.Lease = new(coordinator.Lease)
				w.Local.Adopt(p.Lease, coordinator.Adoption{Charge: coordinator.Charge{Prompt: n, Queued: n, Tokens: n}})
				read(fmt.Sprintf("charge %d", n), a)
				p.Lease.Release()
				p.Lease = own
			}
		}
		for flow := range abi.FlowDecodeFirst + 1 {
			p.Flow = flow
			read(fmt.Sprintf("flow %v", flow), a)
		}
		errs := []error{&coordinator.RejectedError{}, &coordinator.RejectedError{Status: 400}, &coordinator.RejectedError{Status: 599}}
		for phase := range abi.Encode + 1 {
			errs = append(errs, &coordinator.NoTargetError{Phase: phase, Model: "m"})
		}
		for _, want := range errs {
			if err := readPlaced(appendPlaced(nil, new(fleetpb.Placed), a, nil, want), new(fleetpb.Placed), placetest.NewPlacementRequest(), &granted{}, new(coordinator.Charge), numbers, make(names)); !reflect.DeepEqual(err, want) {
				t.Errorf("%v became %v", want, err)
			}
		}
	})
	t.Run("adoption", func(t *testing.T) {
		a := coordinator.Adoption{Prefill: w.Target(t, "p", 1), Decode: w.Target(t, "d", 0)}
		extremes(reflect.ValueOf(&a).Elem(), "adoption", func(what string) {
			if got := readAdoption(adoption(math.MaxUint64, &a, numbers, nil), numbers); got != a {
				t.Errorf("%s reads as %+v", what, got)
			}
		})
	})
	t.Run("turn", func(t *testing.T) {
		now := time.UnixMilli(1 << 40)
		k := &RetainedKV{Holder: w.Target(t, "d", 0), Since: now, Host: "host"}
		o := conversation.OnShelf[*RetainedKV]{Scope: "m", Name: "n", IDs: []uint32{1}, Value: k}
		try := func(what string) {
			store, ok := storeTurn(math.MaxUint64, &o, now, numbers)
			if !ok {
				t.Fatalf("%s: no form", what)
			}
			var m fleetpb.TurnStore
			if err := fleetpb.Unmarshal(fleetpb.Append(nil, store), &m, maxTurnRecords); err != nil || m.Number != math.MaxUint64 {
				t.Fatalf("%s: %v, number %d", what, err, m.Number)
			}
			got := readTurnStore(&m, now)
			turn := getKV(got.Value, numbers)
			lasts := o.Expires.Sub(now)
			if kept := got.Expires.Sub(now); kept < 0 || kept > 24*time.Hour || lasts >= 0 && lasts <= 24*time.Hour && kept != lasts.Truncate(time.Microsecond) {
				t.Errorf("%s: KV is kept for %v", what, kept)
			}
			if got.Scope != o.Scope || got.Name != o.Name || !slices.Equal(got.IDs, o.IDs) || turn.Host != k.Host || !turn.Since.Equal(k.Since) ||
				!bytes.Equal(turn.Params, k.Params) || !bytes.Equal(turn.Forget, k.Forget) {
				t.Errorf("%s reads as %+v, %+v", what, got, turn)
			}
		}
		o.Expires = now.Add(time.Hour)
		extremes(reflect.ValueOf(k).Elem(), "kept", try)
		extremes(reflect.ValueOf(&o).Elem(), "shelf", try)
		for _, d := range []time.Duration{math.MinInt64, -1, 0, 1, 24 * time.Hour, 25 * time.Hour, math.MaxInt64} {
			o.Expires = now.Add(d)
			try(d.String())
		}
		for _, at := range []time.Time{{}, time.UnixMilli(0), time.UnixMilli(-1), time.UnixMilli(1 << 50)} {
			k.Since = at
			try(at.String())
		}
	})
	t.Run("peer", func(t *testing.T) {
		for _, p := range []peer{{process: 1}, {process: math.MaxUint64, slot: math.MaxInt32, pid: math.MaxInt32, node: strings.Repeat("n", 255), standby: true}} {
			b := p.append(nil)
			var got peer
			if err := got.read(b); err != nil || got != p || len(b) > maxSays {
				t.Errorf("%+v reads as %+v: %v", p, got, err)
			}
		}
		for _, want := range []coordinator.Demand{{}, {Needs: math.MaxUint32, Index: true}, {Headers: slices.Repeat([]string{strings.Repeat("x", abi.MaxHeaderName)}, abi.MaxAllHeaders)}} {
			if got, err := readDemand(appendDemand(nil, want)); err != nil || !got.Equal(&want) {
				t.Errorf("%+v reads as %+v: %v", want, got, err)
			}
		}
	})
}

// TestExtremeMessages: the coordinator accepts a worker's messages about a lease for any
// durations and any values from the engines.
func TestExtremeMessages(t *testing.T) {
	bubble(t, "pair", nil, func(t *testing.T, w *wired) {
		blocks := []kvindex.Hash{1, 2}
		for _, n := range []int64{math.MinInt64, -1, 0, 1, 1 << 31, math.MaxInt64} {
			p := w.Must(t, placetest.NewPlacementRequest())
			if here(p) {
				t.Fatalf("request %d was placed without the coordinator", n)
			}
			p.Lease.Computed(coordinator.CacheReport{Block: int(n), Prompt: n, Cached: n})
			p.Lease.Computed(coordinator.CacheReport{Block: 16, Blocks: blocks, Prompt: n, Cached: n})
			p.Lease.RegisterOrphanCleanup(make([]byte, cleanup.MaxEncoded))
			p.Lease.SetOrphanCleanup([]byte("owed"))
			p.Lease.PrefillDoneAfter(time.Duration(n))
			p.Lease.AnsweredAfter(time.Duration(n))
			later(2 * link.Linger)
			w.holds(t, 1)
			p.Lease.Release()
			later(2 * link.Linger)
			w.holds(t, 0)
		}
		if rows := w.server.Workers(); len(rows) != 1 || rows[0].Number != 1 {
			t.Errorf("the worker reconnected in between: %+v", rows)
		}
	})
}

// TestLimitOfAPlan: a worker stays connected if a plan policy sets the longest limit.
func TestLimitOfAPlan(t *testing.T) {
	bubble(t, "pair", nil, func(t *testing.T, w *wired) {
		w.SetDecider(placetest.Stub{OnPlan: func(*abi.PlanFacts) (abi.PlanAnswer, string, bool) {
			return abi.PlanAnswer{Decision: abi.PlanDisaggregate, LimitMillis: math.MaxUint32}, "patient", true
		}})
		for range 3 {
			p := w.Must(t, placetest.NewPlacementRequest())
			if here(p) || p.FirstByte != 24*time.Hour || !w.client.Connected() {
				t.Errorf("got fallbacks %v, limit %v, connected %v", p.Fallbacks, p.FirstByte, w.client.Connected())
			}
			p.Lease.Release()
			later(2 * link.Linger)
		}
		if rows := w.server.Workers(); len(rows) != 1 || rows[0].Number != 1 {
			t.Errorf("the worker reconnected in between: %+v", rows)
		}
	})
}

// TestShortSessions: a worker whose connections end soon waits longer before each new
// connection. After a connection that has lasted it dials at once.
func TestShortSessions(t *testing.T) {
	bubble(t, "left", nil, func(t *testing.T, w *wired) {
		leave := func() {
			w.server.mu.Lock()
			defer w.server.mu.Unlock()
			for _, worker := range w.server.workers {
				worker.conn.Close(errors.New("away with it"))
			}
		}
		before, began := w.pipes.dials(), time.Now()
		for time.Since(began) < 10*time.Second {
			leave()
			later(time.Millisecond)
		}
		if n := w.pipes.dials() - before; n < 10 || n > 20 {
			t.Errorf("got %d dials in ten seconds", n)
		}
		later(3 * time.Second)
		before = w.pipes.dials()
		leave()
		later(50 * time.Millisecond)
		if n := w.pipes.dials() - before; n != 1 || !w.client.Connected() {
			t.Errorf("%d dials, connected %v", n, w.client.Connected())
		}
	})
}
