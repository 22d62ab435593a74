package attempt

import (
	"sync"
	"testing"
	"time"
)

func TestRetryBudget(t *testing.T) {
	start := time.Unix(1_000_000_000, 0) // the beginning of a window
	step := func(n int) time.Time { return start.Add(time.Duration(n) * retryWindow) }
	tests := []struct {
		name      string
		exchanges map[int]int // by window
		retries   map[int]int // taken by then
		ask       int         // the window that is asked about
		share     float64
		floor     int
		want      int // retries left
	}{
		{"floor alone", nil, nil, 0, 0.5, 3, 3},
		{"nothing", nil, nil, 0, 0.5, 0, 0},
		{"share", map[int]int{0: 10}, nil, 0, 0.2, 0, 2},
		{"share and floor", map[int]int{0: 10}, nil, 0, 0.2, 3, 5},
		{"share is rounded down", map[int]int{0: 9}, nil, 0, 0.2, 0, 1},
		{"taken ones count", map[int]int{0: 10}, map[int]int{0: 2}, 0, 0.2, 3, 3},
		{"the last window counts half", map[int]int{0: 10}, nil, 1, 0.2, 0, 1},
		{"so do its retries", map[int]int{0: 10}, map[int]int{0: 4}, 1, 0.5, 0, 0},
		{"older ones do not count", map[int]int{0: 10}, nil, 2, 0.5, 3, 3},
		{"nor do older retries", map[int]int{0: 10}, map[int]int{0: 10}, 2, 0.5, 3, 3},
		{"each window adds", map[int]int{0: 10, 1: 5}, nil, 1, 1, 0, 10},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var b Budget
			for w := range tt.ask + 1 {
				for range tt.exchanges[w] {
					b.Request(step(w))
				}
				for range tt.retries[w] {
					if !b.Allow(step(w), 1, 0) {
						t.Fatal("the budget is used up before the test")
					}
				}
			}
			got := 0
			for b.Allow(step(tt.ask), tt.share, tt.floor) {
				got++
			}
			if got != tt.want {
				t.Errorf("Allow returned true %d times, want %d", got, tt.want)
			}
			taken := b.retries.Load()
			if b.Allow(step(tt.ask), tt.share, tt.floor); b.retries.Load() != taken {
				t.Error("Allow counted a retry that it did not allow")
			}
		})
	}
}

// TestRetryBudgetHammer: concurrent calls of Allow never take more retries than the budget has.
func TestRetryBudgetHammer(t *testing.T) {
	var b Budget
	now := time.Unix(1_000_000_000, 0)
	for range 100 {
		b.Request(now)
	}
	var got [8]int
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() {
			for range 1000 {
				if b.Allow(now, 0.5, 7) {
					got[i]++
				}
			}
		})
	}
	wg.Wait()
	sum := 0
	for _, n := range got {
		sum += n
	}
	if sum > 57 || b.retries.Load() != int64(sum) {
		t.Errorf("Allow returned true %d times and counted %d retries, want equal numbers, at most 57", sum, b.retries.Load())
	}
}
