package coordinator_test

import (
	"context"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/indexcheck"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// knowing makes the policies request blocks and conversations. The native rule places.
func (w *world) knowing(needs abi.Needs) { w.SetDecider(placetest.Stub{Wants: needs}) }

// asking returns a request with this text.
func asking(text string) *coordinator.PlacementRequest {
	a := placetest.NewPlacementRequest()
	blocks := kvindex.AppendText(nil, kvindex.Seed("m", "", ""), []byte(text), coordinator.TextForm.Block)
	a.Key.Chains = []coordinator.Chain{{Form: coordinator.TextForm, Blocks: blocks}}
	a.Key.Conversation.Chain = blocks
	a.Request.PromptTokens = int64(len(text) / coordinator.BytesPerToken)
	return a
}

// blocks returns n blocks of text.
func blocks(letter string, n int) string { return strings.Repeat(letter, n*coordinator.TextForm.Block) }

// row returns the row of an instance in a placement's table.
func row(t *testing.T, p *coordinator.Placement, target engine.Target) abi.Candidate {
	t.Helper()
	for i, o := range p.Targets {
		if o == target {
			return p.Facts.Candidates[i]
		}
	}
	t.Fatalf("no row of %s", target.Name())
	return abi.Candidate{}
}

func TestBlocksOfARequestAreExpected(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	prefill, decode := w.Target(t, "p", 0), w.Target(t, "d", 0)
	matched := func(text string) (p, d int64) {
		w.Arrived()
		placed := w.Must(t, asking(text))
		defer placed.Lease.Release()
		at, to := row(t, placed, prefill), row(t, placed, decode)
		return at.Matched(), to.Matched()
	}
	w.knowing(0)
	w.Must(t, asking(blocks("a", 4))).Lease.Release()
	w.knowing(abi.NeedBlocks)
	if p, d := matched(blocks("a", 4)); p != 0 || d != 0 {
		t.Fatalf("got %d and %d matched tokens of a request that was placed without NeedBlocks, want 0", p, d)
	}
	if p, d := matched(blocks("a", 4)); p != 0 || d != 0 {
		t.Errorf("got %d and %d matched tokens of a failed request, want 0", p, d)
	}

	first := w.Must(t, asking(blocks("a", 4)))
	if first.Matched != -1 {
		t.Errorf("matched %d without events", first.Matched)
	}
	if p, d := matched(blocks("a", 4) + blocks("b", 1)); p != 4*128 || d != 4*128 {
		t.Errorf("%d and %d tokens while the first is under way", p, d)
	}
	first.Lease.PrefillDone()
	first.Lease.Release() // decode failed
	if p, d := matched(blocks("a", 4) + blocks("b", 1)); p != 4*128 || d != 0 {
		t.Errorf("%d and %d matched tokens although decode did not run", p, d)
	}
	w.Arrived()
	again := w.Must(t, asking(blocks("a", 4)))
	if c := row(t, again, prefill); c.BlockTokens != 128 || c.BlocksGPU != 4 {
		t.Errorf("row %+v", c)
	}
	again.Lease.Answered(true)
	again.Lease.Release()
	if p, d := matched(blocks("a", 2) + blocks("c", 2)); p != 2*128 || d != 2*128 {
		t.Errorf("%d and %d tokens of two blocks in common", p, d)
	}
	w.Idle(t)
}

func TestQueuedTokensAreThoseNotHeld(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	w.knowing(abi.NeedBlocks)
	first := w.Must(t, asking(blocks("a", 4)))
	prefill := w.Target(t, "p", 0)
	if got := prefill.Load[0].Queued(); got != 4*128 {
		t.Errorf("%d tokens queued of a new prompt", got)
	}
	first.Lease.Answered(true)
	first.Lease.Release()
	w.Arrived()
	second := w.Must(t, asking(blocks("a", 4)+blocks("b", 2)))
	if got := prefill.Load[0].Queued(); got != 2*128 {
		t.Errorf("%d tokens queued of a prompt of which four blocks are held", got)
	}
	if c := row(t, second, prefill); c.RecentRequests < 0.99 || c.RecentTokens < 4*128-1 {
		t.Errorf("of late: %v requests, %v tokens", c.RecentRequests, c.RecentTokens)
	}
	second.Lease.PrefillDone()
	w.Arrived()
	if got := prefill.Load[0].Queued(); got != 0 {
		t.Errorf("%d tokens queued of a prompt that is computed", got)
	}
	second.Lease.Release()
	w.Idle(t)
}

func TestConversationsComeHome(t *testing.T) {
	w := newWorld(t, "pa prefill", "pb prefill", "da decode", "db decode")
	for _, tt := range []struct {
		name  string
		turns [3]func() *coordinator.PlacementRequest
	}{
		{"by the client's id", [3]func() *coordinator.PlacementRequest{named("s-1"), named("s-1"), named("s-1")}},
		{"by the prompts", [3]func() *coordinator.PlacementRequest{
			func() *coordinator.PlacementRequest { return asking(blocks("x", 3)) },
			func() *coordinator.PlacementRequest { return asking(blocks("x", 3) + blocks("y", 2)) },
			func() *coordinator.PlacementRequest { return asking(blocks("x", 3) + blocks("y", 2) + blocks("z", 1)) },
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w.knowing(abi.NeedConversation)
			var home coordinator.Pair
			for i, turn := range tt.turns {
				a := turn()
				p := w.Must(t, a)
				if p.Turn.Number != int32(i+1) || p.Facts.Request.Turn != p.Turn.Number || a.Request.Turn != p.Turn.Number {
					t.Errorf("turn %d is %d, shown as %d", i+1, p.Turn.Number, p.Facts.Request.Turn)
				}
				if len(p.Facts.Request.Conversation) != 16 {
					t.Errorf("key %q", p.Facts.Request.Conversation)
				}
				for j, target := range p.Targets {
					want := abi.Role(0)
					if target == home.Prefill {
						want = abi.RolePrefill
					} else if target == home.Decode {
						want = abi.RoleDecode
					}
					if got := p.Facts.Candidates[j].Home; got != want {
						t.Errorf("turn %d: %s is home to %v, want %v", i+1, target.Name(), got, want)
					}
				}
				home = coordinator.Pair{p.Prefill, p.Decode}
				again := w.Must(t, a) // another attempt is not another turn
				if again.Turn.Number != int32(i+1) {
					t.Errorf("another attempt at turn %d has turn number %d", i+1, again.Turn.Number)
				}
				home = coordinator.Pair{again.Prefill, again.Decode}
				p.Lease.Release()
				again.Lease.Release()
			}
		})
	}
	w.Idle(t)
}

func named(id string) func() *coordinator.PlacementRequest {
	return func() *coordinator.PlacementRequest {
		a := placetest.NewPlacementRequest()
		a.Key.Conversation = conversation.Query{ID: id}
		return a
	}
}

func TestCut(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode", "x=other both one")
	token := kvindex.Form{Block: 16}
	for _, tt := range []struct {
		name, model string
		needs       abi.Needs
		want        coordinator.Cut
	}{
		{"nothing", "m", 0, coordinator.Cut{Model: "m"}},
		{"conversations", "m", abi.NeedConversation, coordinator.Cut{Model: "m", Forms: []kvindex.Form{coordinator.TextForm}}},
		{"blocks", "other", abi.NeedBlocks, coordinator.Cut{Model: "other", Forms: []kvindex.Form{coordinator.TextForm}}},
		{"an unknown model", "z", abi.NeedBlocks, coordinator.Cut{}},
		{"no model among several", "", abi.NeedBlocks, coordinator.Cut{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w.knowing(tt.needs)
			c := coordinator.Cut{Model: "old", Forms: []kvindex.Form{token}}
			if w.Cut(&c, tt.model); c.Model != tt.want.Model || c.LoRA != tt.want.LoRA || len(c.Forms)+len(tt.want.Forms) > 0 && !reflect.DeepEqual(c.Forms, tt.want.Forms) {
				t.Errorf("got %+v, want %+v", c, tt.want)
			}
		})
	}
}

// TestComputed compares the cached tokens that an engine reports with the prediction
// from the engine's events.
func TestComputed(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	target := w.Target(t, "p", 0)
	p := &coordinator.Placement{Prefill: target, Decode: w.Target(t, "d", 0), Matched: 640}
	for range 100 {
		w.Computed(p, &coordinator.Key{}, 1000, 0)
	}
	if len(w.Verdicts) != 1 || w.Verdicts[0].Engine != "p" || w.Verdicts[0].Reason == indexcheck.Agrees {
		t.Fatalf("verdicts %+v", w.Verdicts)
	}
	p.Matched = -1 // there was no prediction
	before := len(w.Verdicts)
	for range 200 {
		w.Computed(p, &coordinator.Key{}, 1000, 1000)
	}
	if len(w.Verdicts) != before {
		t.Errorf("verdicts %+v", w.Verdicts)
	}
}

// TestCosts: the plan policy gets the best value of all targets.
func TestCosts(t *testing.T) {
	w := newWorld(t, "pa prefill", "pb prefill", "d decode", "b both")
	p0, p1, b := w.Target(t, "pa", 0), w.Target(t, "pb", 0), w.Target(t, "b", 0)
	chain := asking(blocks("a", 4)).Key.Chains[0].Blocks
	w.Known.Index.Store(p1.KV[0], kvindex.GPU, chain[:3])
	w.Known.Index.Store(b.KV[0], kvindex.CPU, chain[:1])
	for i := range 8 {
		p0.Load[0].Prefill.Measure(1000, time.Duration(100+i%2)*time.Millisecond)
		b.Load[0].Prefill.Measure(1000, 200*time.Millisecond)
		w.Reg.MeasurePair(p0, w.Target(t, "d", 0), 1000, 50*time.Millisecond)
	}
	for _, target := range []engine.Target{p0, p1} {
		hold := target.Load[0].HoldPrefill(700, 700)
		defer hold.Drop()
	}
	var got abi.PlanFacts
	w.SetDecider(placetest.Stub{Wants: abi.NeedBlocks, OnPlan: func(f *abi.PlanFacts) (abi.PlanAnswer, string, bool) {
		got = *f
		return abi.PlanAnswer{Decision: abi.PlanAggregate}, "p", true
	}})
	w.Must(t, asking(blocks("a", 4))).Lease.Release()
	if got.PrefillCached != 3*128 || got.BothCached != 128 {
		t.Errorf("cached %d and %d", got.PrefillCached, got.BothCached)
	}
	if got.PrefillQueued != 0 || got.BothQueued != 0 { // b is idle, and b also takes prefill legs
		t.Errorf("queued %d and %d", got.PrefillQueued, got.BothQueued)
	}
	if got.PrefillMicros < 140 || got.PrefillMicros > 160 || got.BothMicros < 199 || got.BothMicros > 201 {
		t.Errorf("µs %v and %v", got.PrefillMicros, got.BothMicros)
	}
	if got.TransferMicros+got.HandoverMicros/1000 < 49 || got.TransferMicros+got.HandoverMicros/1000 > 51 {
		t.Errorf("transfer %v, handover %v", got.TransferMicros, got.HandoverMicros)
	}
}

// TestNextPlacementFindsTheBlocks: a placement finds the blocks of the request that was placed
// immediately before. No other goroutine has to run between the two.
func TestNextPlacementFindsTheBlocks(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	w.knowing(abi.NeedBlocks)
	first := w.Must(t, asking(blocks("a", 4)))
	second := w.Must(t, asking(blocks("a", 4)+blocks("b", 1)))
	for _, target := range []engine.Target{first.Prefill, first.Decode} {
		if c := row(t, second, target); c.BlocksGPU != 4 {
			t.Errorf("%s holds %d blocks, want 4", target.Name(), c.BlocksGPU)
		}
	}
	first.Lease.Release()
	second.Lease.Release()
	w.Idle(t)
}

// TestComparisonsAreBounded: requests are also compared if Run is slow or does not run. The
// number of waiting comparisons is bounded. Run does waiting comparisons until its context ends.
func TestComparisonsAreBounded(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	target := w.Target(t, "p", 0)
	p := &coordinator.Placement{Prefill: target, Decode: w.Target(t, "d", 0), Matched: 640}
	report := coordinator.CacheReport{Block: target.BlockTokens(), Blocks: asking(blocks("a", 2)).Key.Chains[0].Blocks, Prompt: 1000}
	for range coordinator.MaxWaiting + 1 {
		w.Compare(p, report)
	}
	if n := w.Waiting(); n != coordinator.MaxWaiting {
		t.Errorf("%d comparisons wait, want %d", n, coordinator.MaxWaiting)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx) }()
	for w.Waiting() > 0 {
		runtime.Gosched()
	}
	cancel()
	<-done
	if len(w.Verdicts) != 1 {
		t.Errorf("%d verdicts, want 1: %+v", len(w.Verdicts), w.Verdicts)
	}
	w.Idle(t)
}

// TestFirstTurnsAreCountedApart: first turns have consecutive numbers, whatever the
// number of later turns between them.
func TestFirstTurnsAreCountedApart(t *testing.T) {
	w := newWorld(t, "p prefill", "d decode")
	w.knowing(abi.NeedConversation)
	var first, later []uint64
	for i := range 4 {
		for turn := range 1 + i {
			p := w.Must(t, named(fmt.Sprint("s-", i))())
			if turn == 0 {
				first = append(first, p.Facts.Sequence)
			} else {
				later = append(later, p.Facts.Sequence)
			}
			p.Lease.Release()
		}
	}
	if !slices.Equal(first, []uint64{0, 1, 2, 3}) || !slices.Equal(later, []uint64{0, 1, 2, 3, 4, 5}) {
		t.Errorf("first turns %v, later ones %v", first, later)
	}
}

// TestSharedBeginnings: a policy learns how many of the latest conversations of the model begin
// with the blocks that a target holds. Later turns, repeated prompts and retries have no such number.
func TestSharedBeginnings(t *testing.T) {
	w := newWorld(t, "b both")
	w.knowing(abi.NeedBlocks | abi.NeedConversation)
	place := func(a *coordinator.PlacementRequest, want uint32) {
		t.Helper()
		p := w.Must(t, a)
		if got := p.Facts.Request.Shared; got != want {
			t.Errorf("shared %d, want %d (turn %d)", got, want, p.Facts.Request.Turn)
		}
		p.Lease.Answered(true)
		p.Lease.Release()
		w.Arrived()
	}
	system := blocks("s", 4)
	of := func(letter string) *coordinator.PlacementRequest { return asking(system + blocks(letter, 2)) }
	place(of("a"), 0)              // no target holds a part of it
	place(of("b"), 0)              // a is not counted, because it computed the beginning
	place(of("c"), abi.SharedOf/2) // one of two, extrapolated
	d := of("d")
	place(d, abi.SharedOf*2/3)
	place(d, 0)       // a retry
	place(of("d"), 0) // a repeated prompt
	place(asking(system+blocks("d", 2)+blocks("e", 2)), 0)
	place(of("f"), abi.SharedOf*3/4)
	w.knowing(abi.NeedBlocks)
	place(of("g"), 0)
	w.Idle(t)
}
