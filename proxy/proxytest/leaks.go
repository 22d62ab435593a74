// Package proxytest has test doubles and checks for the tests of the proxy and of its
// packages.
//
// The decisions behind this package are in docs/design/edge.md.
package proxytest

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// Main is a TestMain. It fails the package when its tests leave a goroutine or a socket
// behind.
func Main(m *testing.M) {
	goroutines, sockets := runtime.NumGoroutine(), openSockets()
	code := m.Run()
	fuzzing := flag.Lookup("test.fuzz").Value.String() != "" // the fuzzing engine leaves its own goroutines
	if code == 0 && !fuzzing && !settles(goroutines, sockets) {
		code = 1
	}
	os.Exit(code)
}

// settles waits until goroutines that are about to end have ended, and until closed connections are
// released.
func settles(goroutines, sockets int) bool {
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		g, s := runtime.NumGoroutine(), openSockets()
		if g <= goroutines && s <= sockets {
			return true
		}
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			fmt.Fprintf(os.Stderr, "left behind: %d goroutines (%d before), %d sockets (%d before)\n%s\n", g, goroutines, s, sockets, stacks)
			return false
		}
	}
}

// openSockets counts the open sockets; other descriptors belong to the runtime.
func openSockets() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	n := 0
	for _, e := range entries {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}
