package engine

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

func newBreaker(failures int, openFor time.Duration) *Breaker {
	var c atomic.Pointer[config.Circuit]
	c.Store(&config.Circuit{Failures: failures, OpenFor: config.Duration(openFor)})
	b := new(Breaker)
	b.arm(&c)
	return b
}

func TestBreaker(t *testing.T) {
	type step struct {
		do    string // fail, ok, allow, deny, or a pause such as 10s
		then  Circuit
		fails int
	}
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"opens after so many in a row", []step{
			{"fail", CircuitClosed, 1}, {"fail", CircuitClosed, 2}, {"allow", CircuitClosed, 2},
			{"fail", CircuitOpen, 3}, {"deny", CircuitOpen, 3},
		}},
		{"a success between starts over", []step{
			{"fail", CircuitClosed, 1}, {"fail", CircuitClosed, 2}, {"ok", CircuitClosed, 0},
			{"fail", CircuitClosed, 1}, {"fail", CircuitClosed, 2}, {"fail", CircuitOpen, 3},
		}},
		{"one trial, then closed by its success", []step{
			{"fail", CircuitClosed, 1}, {"fail", CircuitClosed, 2}, {"fail", CircuitOpen, 3},
			{"9999ms", CircuitOpen, 3}, {"1ms", CircuitHalfOpen, 3},
			{"allow", CircuitOpen, 3}, {"deny", CircuitOpen, 3}, {"ok", CircuitClosed, 0}, {"allow", CircuitClosed, 0},
		}},
		{"a failed trial opens for the whole time", []step{
			{"fail", CircuitClosed, 1}, {"fail", CircuitClosed, 2}, {"fail", CircuitOpen, 3},
			{"10s", CircuitHalfOpen, 3}, {"allow", CircuitOpen, 3}, {"1s", CircuitOpen, 3}, {"fail", CircuitOpen, 4},
			{"8999ms", CircuitOpen, 4}, {"1ms", CircuitHalfOpen, 4},
		}},
		{"a trial without a word is followed by another", []step{
			{"fail", CircuitClosed, 1}, {"fail", CircuitClosed, 2}, {"fail", CircuitOpen, 3},
			{"10s", CircuitHalfOpen, 3}, {"allow", CircuitOpen, 3}, {"10s", CircuitHalfOpen, 3}, {"allow", CircuitOpen, 3},
		}},
		{"late failures do not prolong", []step{
			{"fail", CircuitClosed, 1}, {"fail", CircuitClosed, 2}, {"fail", CircuitOpen, 3},
			{"5s", CircuitOpen, 3}, {"fail", CircuitOpen, 4}, {"5s", CircuitHalfOpen, 4},
		}},
		{"a failure while half open opens again", []step{
			{"fail", CircuitClosed, 1}, {"fail", CircuitClosed, 2}, {"fail", CircuitOpen, 3},
			{"10s", CircuitHalfOpen, 3}, {"fail", CircuitOpen, 4},
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
	if !b.Allow() || b.Circuit(time.Now()) != CircuitClosed {
		t.Error("a breaker without rules opened")
	}
	b.Success()
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
	if b.Circuit(time.Now()) != CircuitClosed || b.Failures() != 0 {
		t.Error("a success must close the circuit")
	}
}
