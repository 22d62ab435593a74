package budget

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestBudget(t *testing.T) {
	ms := func(at ...int) []int { return at }
	for name, tt := range map[string]struct {
		most   int
		window time.Duration
		fails  []int // ms
		parks  int   // index of the failure that parks; -1 none
	}{
		"none is borne":            {0, time.Second, ms(0), 0},
		"one is borne":             {1, time.Second, ms(0), -1},
		"two within":               {1, time.Second, ms(0, 999), 1},
		"two apart":                {1, time.Second, ms(0, 1000, 2000, 3000), -1},
		"three slow, then a burst": {3, time.Second, ms(0, 1500, 3000, 3100, 3200, 3300), 5},
		"just at the border":       {3, time.Second, ms(0, 100, 200, 1000, 1100, 1200, 2000), -1},
		"just inside":              {3, time.Second, ms(0, 100, 200, 1000, 1099), 4},
	} {
		t.Run(name, func(t *testing.T) {
			b, start := New(tt.most, tt.window), time.Unix(1000, 0)
			for i, at := range tt.fails {
				if got := b.Fail(start.Add(time.Duration(at) * time.Millisecond)); got != (i == tt.parks) {
					t.Fatalf("failure %d at %d ms: parked %v", i, at, got)
				}
			}
			if b.Parked() != (tt.parks >= 0) {
				t.Errorf("parked %v", b.Parked())
			}
			if tt.parks >= 0 && b.Fail(start.Add(time.Hour)) {
				t.Error("parked twice")
			}
		})
	}
}

func TestHammerBudget(t *testing.T) {
	b, now := New(100, time.Hour), time.Now()
	var parked atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				if b.Fail(now) {
					parked.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if parked.Load() != 1 || !b.Parked() {
		t.Errorf("parked %d times", parked.Load())
	}
}
