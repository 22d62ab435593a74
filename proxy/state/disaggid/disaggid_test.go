package disaggid

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// TestPack holds the vectors published for TensorRT-LLM's layout.
func TestPack(t *testing.T) {
	for _, tt := range []struct {
		milli        int64
		node, worker uint8
		counter      uint16
		want         uint64
	}{
		{0, 0, 0, 0, 1099511627776},
		{1, 0, 0, 0, 1099528404992},
		{123456789, 7, 3, 5, 2072360727809029},
	} {
		f := abi.MintFacts{UnixMilli: abi.DisaggEpochMilli + tt.milli, Node: tt.node, Worker: tt.worker, Counter: tt.counter}
		if got := Pack(f); got != tt.want {
			t.Errorf("Pack(%+v) = %d, want %d", f, got, tt.want)
		}
	}
}

func TestPackStaysInRange(t *testing.T) {
	for _, f := range []abi.MintFacts{
		{},
		{UnixMilli: abi.DisaggEpochMilli - 1, Node: 255, Worker: 255, Counter: 65535},
		{UnixMilli: abi.DisaggEpochMilli + 1<<39 - 1, Node: 255, Worker: 63, Counter: 1023},
		{UnixMilli: -1 << 63},
		{UnixMilli: 1<<63 - 1},
	} {
		if id := Pack(f); !InRange(id) {
			t.Errorf("Pack(%+v) = %d is out of range", f, id)
		}
	}
}

func TestInRange(t *testing.T) {
	for id, want := range map[uint64]bool{
		0: false, 1<<40 - 1: false, 1 << 40: true, 1<<63 - 2: true, 1<<63 - 1: false, 1 << 63: false,
	} {
		if InRange(id) != want {
			t.Errorf("InRange(%d) = %v", id, !want)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, n := range [][2]int{{-1, 0}, {256, 0}, {0, -1}, {0, 64}} {
		if _, err := New(n[0], n[1]); err == nil {
			t.Errorf("New(%d, %d): no error", n[0], n[1])
		}
	}
	if _, err := New(255, 63); err != nil {
		t.Error(err)
	}
}

func source(t testing.TB, node, worker int) *Source {
	t.Helper()
	s, err := New(node, worker)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestNextFollowsTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := source(t, 9, 4)
		start := time.Now().UnixMilli()
		for i := range 3 {
			if got, want := s.Next(), (abi.MintFacts{UnixMilli: start, Node: 9, Worker: 4, Counter: uint16(i)}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		}
		time.Sleep(1500 * time.Microsecond)
		if got, want := s.Next(), (abi.MintFacts{UnixMilli: start + 1, Node: 9, Worker: 4}); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
	})
}

// TestNextBlocks: the 1025th of a millisecond waits for the next one.
func TestNextBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := source(t, 0, 0)
		time.Sleep(300 * time.Microsecond)
		start := time.Now()
		for range 1024 {
			s.Next()
		}
		if d := time.Since(start); d != 0 {
			t.Fatalf("1024 in one millisecond took %v", d)
		}
		f := s.Next()
		if d := time.Since(start); d != 700*time.Microsecond {
			t.Errorf("waited %v, want the 700µs that were left of the millisecond", d)
		}
		if f.UnixMilli != start.UnixMilli()+1 || f.Counter != 0 {
			t.Errorf("got %+v", f)
		}
	})
}

// TestNextNeverGoesBack: facts handed out with a time ahead of the clock, as
// after a step, are followed by later ones.
func TestNextNeverGoesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := source(t, 0, 0)
		ahead := time.Now().UnixMilli() + 5
		s.last.Store(ahead<<counterBits | 1022)
		if f := s.Next(); f.UnixMilli != ahead || f.Counter != 1023 {
			t.Errorf("got %+v", f)
		}
		if f := s.Next(); f.UnixMilli != ahead+1 || f.Counter != 0 {
			t.Errorf("got %+v", f)
		}
	})
}

// TestNextHammer: many goroutines, two sources, no id twice.
func TestNextHammer(t *testing.T) {
	sources := []*Source{source(t, 1, 0), source(t, 1, 1)}
	const each = 3000
	var (
		mu   sync.Mutex
		seen = make(map[uint64]bool)
		wg   sync.WaitGroup
	)
	for g := range 8 {
		wg.Go(func() {
			ids := make([]uint64, 0, each)
			for range each {
				ids = append(ids, Pack(sources[g%2].Next()))
			}
			mu.Lock()
			defer mu.Unlock()
			for i, id := range ids {
				if i > 0 && id <= ids[i-1] {
					t.Errorf("id %d after %d", id, ids[i-1])
				}
				if seen[id] {
					t.Errorf("id %d issued twice", id)
				}
				seen[id] = true
			}
		})
	}
	wg.Wait()
	if len(seen) != 8*each {
		t.Errorf("%d different ids, want %d", len(seen), 8*each)
	}
}

func TestLive(t *testing.T) {
	var l Live
	if !l.Add(7) || l.Add(7) {
		t.Error("a second Add of an id in flight must be refused, the first not")
	}
	l.Hold(7)
	l.Drop(7)
	if l.Add(7) {
		t.Error("id 7 has a holder left")
	}
	l.Drop(7)
	if l.Len() != 0 {
		t.Errorf("%d ids left", l.Len())
	}
	if !l.Add(7) {
		t.Error("id 7 is free again")
	}
	l.Drop(8)
	if l.Len() != 1 {
		t.Errorf("%d ids, want 1", l.Len())
	}
}

func TestLiveHammer(t *testing.T) {
	var (
		l  Live
		wg sync.WaitGroup
	)
	for g := range 8 {
		wg.Go(func() {
			for i := range 2000 {
				id := uint64(i % 97)
				if l.Add(id) {
					if l.Add(id) {
						t.Errorf("id %d added twice", id)
					}
					l.Hold(id)
					runtime.Gosched()
					l.Drop(id)
					l.Drop(id)
				}
				own := uint64(1000 + g)
				if !l.Add(own) {
					t.Errorf("own id %d refused", own)
				}
				l.Drop(own)
			}
		})
	}
	wg.Wait()
	if l.Len() != 0 {
		t.Errorf("%d ids left", l.Len())
	}
}

func TestLiveDoesNotAllocate(t *testing.T) {
	var l Live
	s := source(t, 0, 0)
	for range 4096 {
		id := Pack(s.Next())
		l.Add(id)
		l.Drop(id)
	}
	if n := testing.AllocsPerRun(1000, func() {
		id := Pack(s.Next())
		l.Add(id)
		l.Drop(id)
	}); n != 0 {
		t.Errorf("%v allocations an id", n)
	}
}

func BenchmarkMint(b *testing.B) {
	s := source(b, 0, 0)
	var l Live
	b.ReportAllocs()
	for b.Loop() {
		id := Pack(s.Next())
		l.Add(id)
		l.Drop(id)
	}
}
