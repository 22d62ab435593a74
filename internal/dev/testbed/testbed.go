// Package testbed supports tests of the whole program: a fake engine, addresses that stay
// free, a real etcd, and wires between processes that a test can cut.
package testbed

import (
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
