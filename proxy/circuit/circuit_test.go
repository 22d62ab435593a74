package circuit

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func newBreaker(failures int, openFor time.Duration) *Breaker {
	b := new(Breaker)
	b.Init(Options{Rules: Fixed(failures, openFor)})
	return b
}

func TestBreaker(t *testing.T) {
	type step struct {
		do    string // fail, ok, allow, deny, or a pause such as 10s
		then  State
		fails int
	}
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"opens after so many in a row", []step{
			{"fail", Closed, 1}, {"fail", Closed, 2}, {"allow", Closed, 2},
			{"fail", Open, 3}, {"deny", Open, 3},
		}},
		{"a success between starts over", []step{
			{"fail", Closed, 1}, {"fail", Closed, 2}, {"ok", Closed, 0},
			{"fail", Closed, 1}, {"fail", Closed, 2}, {"fail", Open, 3},
		}},
		{"one trial, then closed by its success", []step{
			{"fail", Closed, 1}, {"fail", Closed, 2}, {"fail", Open, 3},
			{"9999ms", Open, 3}, {"1ms", HalfOpen, 3},
			{"allow", Open, 3}, {"deny", Open, 3}, {"ok", Closed, 0}, {"allow", Closed, 0},
		}},
		{"a failed trial opens for the whole time", []step{
			{"fail", Closed, 1}, {"fail", Closed, 2}, {"fail", Open, 3},
			{"10s", HalfOpen, 3}, {"allow", Open, 3}, {"1s", Open, 3}, {"fail", Open, 4},
			{"8999ms", Open, 4}, {"1ms", HalfOpen, 4},
		}},
		{"a trial without a word is followed by another", []step{
			{"fail", Closed, 1}, {"fail", Closed, 2}, {"fail", Open, 3},
			{"10s", HalfOpen, 3}, {"allow", Open, 3}, {"10s", HalfOpen, 3}, {"allow", Open, 3},
		}},
		{"late failures do not prolong", []step{
			{"fail", Closed, 1}, {"fail", Closed, 2}, {"fail", Open, 3},
			{"5s", Open, 3}, {"fail", Open, 4}, {"5s", HalfOpen, 4},
		}},
		{"a failure while half open opens again", []step{
			{"fail", Closed, 1}, {"fail", Closed, 2}, {"fail", Open, 3},
			{"10s", HalfOpen, 3}, {"fail", Open, 4},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBreaker(3, 10*time.Second)
				for n, s := range tt.steps {
					switch s.do {
					case "fail":
						b.Failure()
					case "ok":
						b.Success()
					case "allow", "deny":
						if got := b.Allow(); got != (s.do == "allow") {
							t.Fatalf("step %d: Allow() = %v", n, got)
						}
					default:
						d, err := time.ParseDuration(s.do)
						if err != nil {
							t.Fatal(err)
						}
						time.Sleep(d)
					}
					if got := b.Circuit(time.Now()); got != s.then || b.Failures() != s.fails {
						t.Fatalf("step %d (%s): circuit %d, %d failures; want %d, %d", n, s.do, got, b.Failures(), s.then, s.fails)
					}
				}
			})
		})
	}
}

func TestZeroBreakerNeverOpens(t *testing.T) {
	var b Breaker
	for range 100 {
		b.Failure()
	}
	if !b.Allow() || b.Circuit(time.Now()) != Closed {
		t.Error("a breaker without rules opened")
	}
	b.Success()
}

// TestTrip: one call of Trip opens the circuit for as long as several failures do.
func TestTrip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(3, 10*time.Second)
		b.Trip()
		time.Sleep(5 * time.Second)
		b.Trip() // Trip changes nothing here
		time.Sleep(5 * time.Second)
		if c := b.Circuit(time.Now()); c != HalfOpen {
			t.Errorf("b.Circuit(time.Now()) = %v, want %v", c, HalfOpen)
		}
		if b.Trip(); b.Circuit(time.Now()) != Open {
			t.Error("half open after a refused trial")
		}
		b.Success()
		if c := b.Circuit(time.Now()); c != Closed {
			t.Errorf("b.Circuit(time.Now()) = %v, want %v", c, Closed)
		}
		new(Breaker).Trip() // does not fail
	})
}

// TestBreakerOneTrial: of many simultaneous requests exactly one becomes the trial.
func TestBreakerOneTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(1, time.Second)
		for range 20 {
			b.Failure()
			time.Sleep(time.Second)
			var (
				passed atomic.Int32
				wg     sync.WaitGroup
			)
			for range 16 {
				wg.Go(func() {
					if b.Allow() {
						passed.Add(1)
					}
				})
			}
			wg.Wait()
			if passed.Load() != 1 {
				t.Fatalf("%d requests passed a half-open circuit", passed.Load())
			}
			b.Success()
		}
	})
}

func TestBreakerHammer(t *testing.T) {
	b := newBreaker(2, time.Nanosecond)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for n := range 2000 {
				if b.Allow() && n%3 == 0 {
					b.Failure()
				} else {
					b.Success()
				}
			}
		})
	}
	wg.Wait()
	b.Success()
	if b.Circuit(time.Now()) != Closed || b.Failures() != 0 {
		t.Error("a success must close the circuit")
	}
}
