package proxy

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// TestMain fails the package when its tests leave a goroutine or a socket
// behind.
func TestMain(m *testing.M) {
	goroutines, sockets := runtime.NumGoroutine(), openSockets()
	code := m.Run()
	fuzzing := flag.Lookup("test.fuzz").Value.String() != "" // which leaves some of its own
	if code == 0 && !fuzzing && !settles(goroutines, sockets) {
		code = 1
	}
	os.Exit(code)
}

// settles waits for what is on its way out: connections closed a moment ago.
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

// openSockets counts the open sockets; other descriptors are the runtime's own.
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
