package engine

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
)

// TestKVSlots: each rank has a separate slot while the registry has the instance. After a
// restart the slot is empty. When an instance leaves, its blocks are removed.
func TestKVSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		index := kvindex.New(kvindex.Options{})
		f.o.Index = index
		two := f.spec("a", "both", "fake")
		two.Ranks = 2
		f.must(t, f.Apply(SourceStatic, []config.Engine{two, f.spec("b", "both", "fake")}, 0))
		f.start(t)
		a, b := f.get(t, "a"), f.get(t, "b")
		slots := []kvindex.Target{a.KV[0], a.KV[1], b.KV[0]}
		if len(a.KV) != 2 || len(b.KV) != 1 || slots[0] == slots[1] || slots[0] == slots[2] || slots[1] == slots[2] {
			t.Fatalf("slots %v of a, %v of b", a.KV, b.KV)
		}
		blocks := kvindex.AppendTokens(nil, kvindex.Seed("m", "", ""), []uint32{1, 2, 3, 4}, 2)
		held := func() (n [3]uint32) {
			found := make([]kvindex.Match, index.Targets())
			index.Match(blocks, found)
			for i, slot := range slots {
				if int(slot) < len(found) {
					n[i] = found[slot].Blocks()
				}
			}
			return n
		}
		for _, slot := range slots {
			index.Store(slot, kvindex.GPU, blocks)
		}
		a.Load[1].Report(load.Report{At: time.Now(), Every: time.Hour, Running: 9}, a.Load[1].Mark())
		a.Media[1].Sent([]mediacache.Hash{7})
		if got := held(); got != [3]uint32{2, 2, 2} {
			t.Fatalf("held %v", got)
		}
		f.engines.set(func() { f.engines.down["a:80"] = true })
		time.Sleep(10 * time.Second)
		f.engines.set(func() { f.engines.down["a:80"] = false })
		time.Sleep(10 * time.Second)
		if got := held(); a.State() != Ready || got != [3]uint32{0, 0, 2} {
			t.Errorf("after a's restart: state %v, held %v", a.State(), got)
		}
		if v := a.Load[1].View(time.Now()); v.Requests != 0 {
			t.Errorf("load of a's former process remains: %+v", v)
		}
		if n := a.Media[1].Count([]mediacache.Hash{7}); n != 0 {
			t.Errorf("media of a's former process remain")
		}
		f.must(t, f.Remove("b", 0))
		time.Sleep(drainPoll)
		synctest.Wait()
		if got := held(); !b.Gone() || a.Gone() || got != [3]uint32{} {
			t.Errorf("held blocks after b has left: %v", got)
		}
	})
}

// TestNoIndex: without an index there are no slots. Nothing else changes.
func TestNoIndex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Add(f.spec("a", "both", "fake")))
		f.start(t)
		a := f.get(t, "a")
		f.restarted(a)
		f.must(t, f.Remove("a", 0))
		time.Sleep(drainPoll)
		synctest.Wait()
		if a.KV != nil || !a.Gone() {
			t.Errorf("slots %v, left %v", a.KV, a.Gone())
		}
	})
}

func TestBlockTokens(t *testing.T) {
	var i Instance
	for _, tt := range []struct {
		name string
		do   func()
		want int
	}{
		{"nothing known", func() {}, 0},
		{"impossible sizes", func() { i.SetBlockTokens(0); i.SetBlockTokens(-1); i.GuessBlockTokens(1 << 40) }, 0},
		{"metrics", func() { i.GuessBlockTokens(16) }, 16},
		{"page size", func() { i.facts.Store(&Facts{PageSize: 32}) }, 32},
		{"announced", func() { i.facts.Store(&Facts{PageSize: 32, KVEvents: KVPublisher{BlockTokens: 64}}) }, 64},
		{"events", func() { i.SetBlockTokens(128) }, 128},
		{"events of another size", func() { i.SetBlockTokens(48) }, 48},
		{"configured", func() { i.Spec.BlockTokens = 256 }, 256},
	} {
		tt.do()
		if got := i.BlockTokens(); got != tt.want {
			t.Errorf("%s: i.BlockTokens() = %d, want %d", tt.name, got, tt.want)
		}
	}
}

func TestMeasurePair(t *testing.T) {
	f, p, d := pairOf(t)
	if pairs := f.AppendPairs(nil, p); len(pairs) != 0 || len(f.Pairs()) != 0 {
		t.Errorf("before any transfer: %v", pairs)
	}
	for n := int64(100); n < 5000; n += 100 {
		f.MeasurePair(p, d, n, time.Duration(2000+3*n)*time.Microsecond)
	}
	f.Pair(p, d).Success()
	pairs := f.AppendPairs(nil, p)
	if len(pairs) != 1 || pairs[0].State() != abi.PairReady || pairs[0].Decode != d {
		t.Fatalf("pairs %v", pairs)
	}
	per, fixed := pairs[0].TransferMicros(), f.Pairs()[0].HandoverMicros
	if per < 2.99 || per > 3.01 || fixed < 1990 || fixed > 2010 {
		t.Errorf("got %v µs a token and %v µs, want 3 and 2000", per, fixed)
	}
	if row := f.Pairs()[0]; row.TransferMicros != per {
		t.Errorf("row %+v", row)
	}
	other := f.Pair(p, Target{Instance: new(Instance)})
	if per := other.TransferMicros(); other.State() != abi.PairUnknown || per < 2.99 || per > 3.01 {
		t.Errorf("unused pair of a measured prefill: %v, %v", other.State(), per)
	}
	if pairs := f.AppendPairs(nil, p); len(pairs) != 2 {
		t.Errorf("%d pairs, want 2", len(pairs))
	}
	f.pairs.drop(p.ID)
	if pairs := f.AppendPairs(nil, p); len(pairs) != 0 || len(f.pairs.from) != 0 {
		t.Errorf("%d pairs of an instance that has left", len(pairs))
	}
}

// TestAnnouncementChange: the hook is also called if a ready engine announces another
// endpoint for its events.
func TestAnnouncementChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.must(t, f.Add(f.spec("a", "both", "fake")))
		f.start(t)
		f.said()
		f.engines.set(func() { f.engines.facts["a:80"] += "events tcp://*:5557\n" })
		time.Sleep(3 * relearnEvery * time.Second) // probes come every 2 s
		if got := f.said(); got != "a ready" || f.get(t, "a").Facts().KVEvents.Ranks[0].Events != "tcp://*:5557" {
			t.Errorf("hook calls %q, facts %+v", got, f.get(t, "a").Facts())
		}
	})
}
