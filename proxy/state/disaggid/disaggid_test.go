package disaggid

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// TestPack checks the published vectors of TensorRT-LLM's layout.
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

// next returns the next id of a source, which must have one.
func next(t testing.TB, s *Source) uint64 {
	f, ok := s.Next()
	if !ok {
		t.Error("the source has no id left")
	}
	return Pack(f)
}

func source(t testing.TB, node, worker int) *Source {
	t.Helper()
	s, err := New(node, worker)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestNextCounts: a source counts from the start of the process and ignores the clock.
func TestNextCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(time.Until(time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC)))
		start := time.Now().UnixMilli()
		s := source(t, 9, 4)
		for i := range 5000 {
			want := abi.MintFacts{UnixMilli: start + int64(i)/1024, Node: 9, Worker: 4, Counter: uint16(i % 1024)}
			if got, ok := s.Next(); got != want || !ok {
				t.Fatalf("got %+v, want %+v", got, want)
			}
		}
		if time.Now().UnixMilli() != start {
			t.Error("Next waited")
		}
		time.Sleep(time.Hour)
		if got, _ := s.Next(); got.UnixMilli != start+4 {
			t.Errorf("got %+v", got)
		}
		if _, few := s.Ask(); few {
			t.Error("Ask requests a range although a whole line is left")
		}
	})
}

// TestNextHammer: many goroutines use two sources, and no id is issued twice.
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
				ids = append(ids, next(t, sources[g%2]))
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
		t.Errorf("got %d different ids, want %d", len(seen), 8*each)
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
		t.Error("id 7 still has a holder")
	}
	l.Drop(7)
	if l.Len() != 0 {
		t.Errorf("%d ids remain", l.Len())
	}
	if !l.Add(7) {
		t.Error("id 7 is free again")
	}
	l.Drop(8)
	if l.Len() != 1 {
		t.Errorf("got %d ids, want 1", l.Len())
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
		t.Errorf("%d ids remain", l.Len())
	}
}

func TestLiveDoesNotAllocate(t *testing.T) {
	var l Live
	s := source(t, 0, 0)
	for range 4096 {
		id := next(t, s)
		l.Add(id)
		l.Drop(id)
	}
	if n := testing.AllocsPerRun(1000, func() {
		id := next(t, s)
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
		f, _ := s.Next()
		id := Pack(f)
		l.Add(id)
		l.Drop(id)
	}
}
