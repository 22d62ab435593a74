// Package testbed supports tests of the whole program: a fake engine, addresses that stay
// free, a real etcd, and wires between processes that a test can cut.
package testbed

import (
	"sync"
	"testing"
	"time"
)

// Eventually waits for a condition; its bound is no claim about speed.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(45 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// Parallel calls f with 0 to n-1, at most width calls at a time, and waits for their end.
func Parallel(n, width int, f func(int)) {
	var wg sync.WaitGroup
	places := make(chan struct{}, width)
	for i := range n {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			f(i)
		})
	}
	wg.Wait()
}
