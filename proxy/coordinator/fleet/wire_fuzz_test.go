package fleet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
)

// asks returns requests that together set every field.
func asks(w *world, t testing.TB) []*coordinator.PlacementRequest {
	p, q, d := w.Target(t, "p", 1), w.Target(t, "q", 0), w.Target(t, "d", 0)
	chain := []kvindex.Hash{1, 2, 1 << 63}
	text := []coordinator.Chain{{Form: kvindex.Form{Block: 16}, Blocks: []kvindex.Hash{9}}, {Form: coordinator.TextForm, Blocks: chain}}
	table := conversation.New(10)
	table.Record(table.Look(conversation.Query{ID: "x"}), home(p), home(d), time.UnixMilli(77))
	return []*coordinator.PlacementRequest{
		{},
		placetest.NewPlacementRequest(),
		{Model: "m", Request: abi.RequestFacts{PromptTokens: 1 << 40, MaxTokens: -1, N: 3, Stream: true, PairBroken: true, Prompt: `"hi"`, Traits: abi.Traits{Salt: 1 << 63, TokenMicros: 40_000, Adapter: "sql", Tools: true, Audio: true}, Headers: []abi.RequestHeader{{Name: "x-tier", Value: "gold", Present: true}, {Name: "x-empty", Present: true, Cut: true}}}, Aggregate: abi.RoleDecode, Two: true},
		{Model: "m", Prefill: p, ID: 1<<63 - 2, Excluded: []engine.Target{q, d}, Same: coordinator.Pair{Decode: d}},
		{Model: "m", Same: coordinator.Pair{Prefill: p, Decode: d}, Within: coordinator.Within{Prefill: []*engine.Instance{p.Instance, q.Instance}, Whole: []*engine.Instance{}}},
		{Model: "m", Only: coordinator.Pair{Prefill: q, Decode: d}, Within: coordinator.Within{Decode: []*engine.Instance{d.Instance}}},
		{Key: coordinator.Key{Chains: text, Conversation: conversation.Query{Chain: chain, First: true}}},
		{Key: coordinator.Key{Chains: text, Conversation: conversation.Query{Chain: chain, EndsFrom: 1, Ends: []conversation.End{{Blocks: 1, Hash: 5}, {Blocks: 1, Hash: 6}, {Blocks: 3, Hash: 7}}}}},
		{Key: coordinator.Key{Conversation: conversation.Query{ID: "child", Parent: "x"}, Media: []mediacache.Hash{1, 1 << 63}}},
		{Key: coordinator.Key{Conversation: conversation.Query{Ends: []conversation.End{{Hash: 7}}}}},
		{Key: coordinator.Key{Chains: text[:1], Conversation: conversation.Query{ID: "x", Chain: chain}}, Lookup: coordinator.Lookup{Turn: table.Look(conversation.Query{ID: "x"}), Done: true}},
	}
}

func home(t engine.Target) conversation.Target {
	return conversation.Target{Instance: t.ID, Rank: int32(t.Rank)}
}

// TestAsksAndAdoptions: asks and adoptions are read as they were written.
func TestAsksAndAdoptions(t *testing.T) {
	w := newWorld(t, "p prefill two 2", "q prefill", "d decode")
	numbers, known := placetest.Same{Reg: w.Reg}, make(names)
	h := new(heard)
	for i, a := range asks(w, t) {
		b, ok := appendPlace(nil, new(fleetpb.Place), uint64(i)<<40, a, numbers)
		if !ok {
			t.Fatalf("ask %d has no form", i)
		}
		if err := h.read(b, numbers, known); err != nil || h.lost || h.lease != uint64(i)<<40 {
			t.Fatalf("ask %d: %v, lost %v, lease %d", i, err, h.lost, h.lease)
		}
		got := h.PlacementRequest
		if len(got.Excluded) == 0 {
			got.Excluded = nil
		}
		if len(got.Key.Chains) == 0 {
			got.Key.Chains = nil
		}
		if len(got.Key.Media) == 0 {
			got.Key.Media = nil
		}
		want := *a
		want.Request.Turn, want.Request.Conversation = a.Lookup.Turn.Number, string(a.Lookup.Turn.Key.AppendText(nil))
		if !reflect.DeepEqual(got, want) {
			t.Errorf("ask %d:\n%+v, want\n%+v", i, got, want)
		}
		h.drop()
	}
	a := coordinator.Adoption{Prefill: w.Target(t, "p", 1), Decode: w.Target(t, "d", 0), ID: 7, Charge: coordinator.Charge{Prompt: 100, Queued: -1, Tokens: 110}}
	if got := readAdoption(adoption(3, &a, numbers, nil), numbers); got != a {
		t.Errorf("readAdoption = %+v, want %+v", got, a)
	}
}

// TestWhatIsNotKnown: one side does not have an instance of a message.
func TestWhatIsNotKnown(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	p, d := w.Target(t, "p", 0), w.Target(t, "d", 0)
	stranger := engine.Target{Instance: &engine.Instance{ID: 999}}
	few := numbersOf{p.Instance: 1}
	for name, tt := range map[string]struct {
		a       *coordinator.PlacementRequest
		written bool
	}{
		"fixed":    {&coordinator.PlacementRequest{Prefill: d}, false},
		"only":     {&coordinator.PlacementRequest{Only: coordinator.Pair{Prefill: p, Decode: d}}, false},
		"same":     {&coordinator.PlacementRequest{Same: coordinator.Pair{Prefill: p, Decode: d}}, true},
		"excluded": {&coordinator.PlacementRequest{Excluded: []engine.Target{d}}, true},
		"within":   {&coordinator.PlacementRequest{Within: coordinator.Within{Decode: []*engine.Instance{d.Instance}}}, true},
	} {
		b, ok := appendPlace(nil, new(fleetpb.Place), 1, tt.a, few)
		if ok != tt.written {
			t.Errorf("%s: written %v", name, ok)
		}
		h := new(heard)
		if err := h.read(b, few, make(names)); ok && (err != nil || h.lost || !h.Same.Decode.IsZero() || len(h.Excluded) != 0 || len(h.Within.Decode) != 0) {
			t.Errorf("%s: h.read(b, few, make(names)) = %v, %+v", name, err, h.PlacementRequest)
		}
		if h.Within.Decode == nil && tt.a.Within.Decode != nil {
			t.Errorf("%s: any instance will do", name)
		}
	}
	b, _ := appendPlace(nil, new(fleetpb.Place), 1, &coordinator.PlacementRequest{Prefill: stranger}, numbersOf{stranger.Instance: 999})
	h := new(heard)
	if err := h.read(b, placetest.Same{Reg: w.Reg}, make(names)); err != nil || !h.lost {
		t.Errorf("%v, lost %v", err, h.lost)
	}
	if _, known := getTarget(numberOf(p.ID, 1), placetest.Same{Reg: w.Reg}); known {
		t.Error("a rank that the instance does not have is accepted")
	}
}

// numbersOf is a Numbers with only the instances of the map.
type numbersOf map[*engine.Instance]uint32

func (n numbersOf) Number(i *engine.Instance) (uint32, bool) { number, ok := n[i]; return number, ok }
func (n numbersOf) Instance(number uint32) *engine.Instance {
	for i, own := range n {
		if own == number {
			return i
		}
	}
	return nil
}

// TestReplies: replies are read as they were written.
func TestReplies(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	a := placetest.NewPlacementRequest()
	p := w.Must(t, a)
	p.Notes, p.Fallbacks = []string{"note"}, []coordinator.Fallback{{What: "place", Reason: "late"}}
	p.Facts.Scored, p.Facts.Scale = true, abi.LowWins|abi.UnitSeconds
	scored := p.Facts.AddScores(abi.RolePrefill, "chat", []abi.NamedScorer{{Name: "prefix", Weight: 3}, {Name: "queue", Weight: 0.5}})
	copy(scored.Units, []abi.Scale{abi.UnitTokens, abi.UnitRequests})
	copy(scored.Rows, []abi.RowScore{{Score: 0.5, Value: 100}, {Score: abi.Closed}, {Score: 1, Value: 2}, {Score: abi.Removed}})
	b := appendPlaced(nil, new(fleetpb.Placed), a, p, nil)
	g, charge := &granted{}, new(coordinator.Charge)
	if err := readPlaced(b, new(fleetpb.Placed), placetest.NewPlacementRequest(), g, charge, placetest.Same{Reg: w.Reg}, make(names)); err != nil || g.Prefill != p.Prefill || g.Decode != p.Decode || g.ID != p.ID ||
		!reflect.DeepEqual(g.Facts.Candidates, p.Facts.Candidates) || !reflect.DeepEqual(g.Targets, p.Targets) || !reflect.DeepEqual(g.Facts.Scores, p.Facts.Scores) ||
		!g.Facts.Scored || g.Facts.Scale != p.Facts.Scale || !reflect.DeepEqual(g.Notes, p.Notes) || !reflect.DeepEqual(g.Fallbacks, p.Fallbacks) || *charge != p.Lease.Charge() {
		t.Errorf("readPlaced = %v, %+v", err, g.Placement)
	}
	for _, want := range []error{coordinator.ErrUnknownModel, coordinator.ErrModelNeeded, &coordinator.RejectedError{Status: 429}, &coordinator.HeldError{Limit: 700 * time.Millisecond}, &coordinator.NoTargetError{Phase: abi.Decode, Model: "m"}, errAway} {
		if err := readPlaced(appendPlaced(nil, new(fleetpb.Placed), a, nil, want), new(fleetpb.Placed), placetest.NewPlacementRequest(), &granted{}, new(coordinator.Charge), placetest.Same{Reg: w.Reg}, make(names)); !reflect.DeepEqual(err, want) {
			t.Errorf("%v became %v", want, err)
		}
	}
	p.Lease.Release()
}

// FuzzWorker: the coordinator handles any bytes from a worker, and holds nothing for the
// worker in the end.
func FuzzWorker(f *testing.F) {
	w := newWorld(f, "p prefill two 2", "q prefill", "d decode")
	w.SetDecider(placetest.Stub{Wants: abi.NeedBlocks | abi.NeedConversation})
	numbers := placetest.Same{Reg: w.Reg}
	for i, a := range asks(w, f) {
		b, _ := appendPlace(nil, new(fleetpb.Place), uint64(i)+1, a, numbers)
		f.Add(kindOf(fleetpb.Kind_KIND_PLACE), b, kindOf(fleetpb.Kind_KIND_RELEASE), fleetpb.Append(nil, &fleetpb.LeaseUpdate{Lease: uint64(i) + 1}))
	}
	const adopt = fleetpb.Kind_KIND_ADOPT
	adopted := fleetpb.Append(nil, adoption(1, &coordinator.Adoption{Decode: w.Target(f, "d", 0), Charge: coordinator.Charge{Queued: 5, Tokens: 9}}, numbers, []byte("owed")))
	done := fleetpb.Append(nil, &fleetpb.LeaseUpdate{Lease: 1, TookUs: 1000, Cleanup: []byte("owed")})
	cached := fleetpb.Append(nil, &fleetpb.Computed{Lease: 1, Prompt: 9, Cached: 3, Block: 16, Blocks: []uint64{1}})
	for _, kind := range []fleetpb.Kind{fleetpb.Kind_KIND_DONE, fleetpb.Kind_KIND_ANSWERED, fleetpb.Kind_KIND_CLEANUP} {
		f.Add(kindOf(adopt), adopted, kindOf(kind), done)
		f.Add(kindOf(adopt), adopted, kindOf(kind), done[:3])
	}
	f.Add(kindOf(adopt), adopted, kindOf(fleetpb.Kind_KIND_COMPUTED), cached)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { w.Run(ctx) })
	f.Cleanup(func() { cancel(); running.Wait() })
	f.Fuzz(func(t *testing.T, kind uint8, first []byte, then uint8, second []byte) {
		s := NewServer(ServerOptions{Local: w.Local, Log: placetest.Quiet()})
		mine, theirs := net.Pipe()
		defer mine.Close()
		defer theirs.Close()
		one := &worker{s: s, ctx: t.Context(), leases: make(map[uint64]lent)}
		one.conn = link.New(theirs, one)
		for _, frame := range []struct {
			kind    uint8
			payload []byte
		}{{kind, first}, {then, second}} {
			var err error
			if frame.kind == kindOf(fleetpb.Kind_KIND_PLACE) {
				err = one.Call(1, frame.kind, frame.payload)
			} else {
				err = one.Message(frame.kind, frame.payload)
			}
			if err != nil && !errors.Is(err, link.ErrGarbage) {
				t.Fatal(err)
			}
		}
		one.beside.Wait()
		one.end()
		if w.Open() != 0 || w.LiveIDs() != 0 {
			t.Fatalf("%d leases and %d ids remain", w.Open(), w.LiveIDs())
		}
	})
}

// FuzzReply: a worker handles any answer of a coordinator without a panic.
func FuzzReply(f *testing.F) {
	w := newWorld(f, "p prefill", "d decode")
	a := placetest.NewPlacementRequest()
	p := w.Must(f, a)
	f.Add(appendPlaced(nil, new(fleetpb.Placed), a, p, nil))
	for _, err := range []error{coordinator.ErrModelNeeded, &coordinator.RejectedError{Status: 429}, &coordinator.NoTargetError{Phase: abi.Decode}, errAway} {
		f.Add(appendPlaced(nil, new(fleetpb.Placed), a, nil, err))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		g, charge := &granted{}, new(coordinator.Charge)
		if err := readPlaced(b, new(fleetpb.Placed), placetest.NewPlacementRequest(), g, charge, placetest.Same{Reg: w.Reg}, make(names)); err == nil && (g.Decode.IsZero() || len(g.Targets) != len(g.Facts.Candidates)) {
			t.Fatalf("%+v", g.Placement)
		}
		readDemand(b)
		var p peer
		if p.read(b) == nil && !bytes.Equal(p.append(nil), b) {
			var again peer
			if again.read(p.append(nil)) != nil || again != p {
				t.Fatalf("%+v reads as %+v", p, again)
			}
		}
	})
}

// TestNames: repeated texts share memory. Texts that peers choose cannot fill the table.
func TestNames(t *testing.T) {
	known := make(names)
	one := known.of("m")
	if unsafe.StringData(one) != unsafe.StringData(known.of("m")) {
		t.Error("a repeated name is not the stored text")
	}
	long := strings.Repeat("x", maxNameSize+1)
	if known.of(long) != long || known.of(long[1:]) != long[1:] {
		t.Error("a long name is another one")
	}
	if _, kept := known[long]; kept || len(known) != 2 {
		t.Errorf("%d names are stored; the long name: %v", len(known), kept)
	}
	for i := range 3 * maxNames {
		name := fmt.Sprint(long[:100], i)
		if known.of(name) != name || len(known) > maxNames {
			t.Fatalf("%d names are stored", len(known))
		}
	}
}
