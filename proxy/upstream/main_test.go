package upstream

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// TestMain fails the package if its tests leave a goroutine or a descriptor behind.
func TestMain(m *testing.M) {
	goroutines, files := runtime.NumGoroutine(), openFiles()
	code := m.Run()
	fuzzing := flag.Lookup("test.fuzz").Value.String() != "" // the fuzzer starts its own goroutines
	if code == 0 && !fuzzing && !settles(goroutines, files) {
		code = 1
	}
	os.Exit(code)
}

// settles waits for connections that were closed a moment ago.
func settles(goroutines, files int) bool {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		g, f := runtime.NumGoroutine(), openFiles()
		if g <= goroutines && f <= files {
			return true
		}
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			fmt.Fprintf(os.Stderr, "leak: %d goroutines (%d before), %d descriptors (%d before)\n%s\n", g, goroutines, f, files, stacks)
			return false
		}
	}
}

// openFiles counts the open sockets. Other descriptors belong to the runtime.
func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	n := 0
	for _, e := range entries {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); len(to) > 7 && to[:7] == "socket:" {
			n++
		}
	}
	return n
}
