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
		fails  []int // times in ms
		parks  int   // index of the failure that parks; -1: none
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
			b, start := New(tt.most, tt.window, 0), time.Unix(1000, 0)
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
	b, now := New(100, time.Hour, 0), time.Now()
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

// TestTimeouts: repeated timeouts park, on machines of any size and with one
// client, but a single stall of the machine does not.
func TestTimeouts(t *testing.T) {
	type call struct{ at, took int } // ms
	every := func(n, pause, took int) (calls []call) {
		for i := range n {
			calls = append(calls, call{(i + 1) * (pause + took), took})
		}
		return calls
	}
	for name, tt := range map[string]struct {
		share float64
		calls []call
		parks int // index of the call that parks; -1: none
	}{
		"one client, 1 s each":          {0.1, every(25, 0, 1000), 2},
		"one client, 20 s each":         {0.1, every(5, 0, 20000), 2},
		"with pauses of 5 s":            {0.1, every(25, 5000, 1000), 2},
		"less than the share":           {0.1, every(200, 10000, 1000), -1},
		"two at once, and never again":  {0.1, []call{{1000, 1000}, {1000, 1000}}, -1},
		"two at once, again and again":  {0.1, []call{{1000, 1000}, {1000, 1000}, {31000, 1000}, {31000, 1000}, {61000, 1000}, {61000, 1000}}, -1},
		"short ones":                    {0.1, every(300, 45, 5), -1},
		"short ones without a pause":    {0.1, every(300, 0, 5), 222},
		"a larger share":                {0.5, every(25, 0, 1000), 9},
		"their time does not count":     {0, every(25, 0, 1000), -1},
		"eight at once":                 {0.1, []call{{1000, 1000}, {1000, 1000}, {1000, 1000}, {1000, 1000}}, 2},
		"a clock that was set back 1 h": {0.1, []call{{3600000, 1000}, {0, 1000}, {10, 1000}, {20, 1000}}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			b, start := New(1000, 10*time.Second, tt.share), time.Unix(1000, 0)
			for i, c := range tt.calls {
				if got := b.Timeout(start.Add(time.Duration(c.at)*time.Millisecond), time.Duration(c.took)*time.Millisecond); got != (i == tt.parks) {
					t.Fatalf("call %d at %d ms: parked %v", i, c.at, got)
				}
				if b.Parked() != (tt.parks >= 0 && i >= tt.parks) {
					t.Fatalf("call %d: parked %v", i, b.Parked())
				}
			}
		})
	}
	if b := New(0, time.Second, 0); !b.Timeout(time.Unix(1, 0), 1) {
		t.Error("a timeout is no failure")
	}
}
