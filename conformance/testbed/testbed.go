// Package testbed is what tests of the whole program stand on: addresses that stay
// free, a real etcd, and wires between processes that can be cut.
package testbed

import (
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
	"time"
)

// FreeAddr returns a loopback address that is free now, and that a server can
// leave and take again: its port is below those of outgoing connections.
func FreeAddr(t testing.TB) string {
	t.Helper()
	for range 1000 {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(12000+rand.IntN(20000))))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no free port")
	return ""
}

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
