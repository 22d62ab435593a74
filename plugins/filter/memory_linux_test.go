package filter

import (
	"os"
	"regexp"
	"runtime/debug"
	"strconv"
	"testing"
)

// resident is the memory of the process in RAM, in MiB.
func resident(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	kib, err := strconv.Atoi(regexp.MustCompile(`VmRSS:\s+(\d+)`).FindStringSubmatch(string(status))[1])
	if err != nil {
		t.Fatal(err)
	}
	return kib >> 10
}

// TestDeadInstancesLeaveNothing: instances that used all of their memory free
// it when they end, not at the next garbage collection.
func TestDeadInstancesLeaveNothing(t *testing.T) {
	w := newWorld(t)
	s := spec("f", "[s]\nrequest_headers: eat\n[fine]\nrequest_headers: say fine")
	s.FailOpen = true
	w.start(s)
	srv := w.serve(echo)
	do(t, srv, "fine", "x")
	debug.FreeOSMemory()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	before := resident(t)
	for range 10 {
		do(t, srv, "s", "x")
	}
	do(t, srv, "fine", "x") // answered by the instance that replaced the last one
	if after := resident(t); after > before+3*64 {
		t.Errorf("%d MiB are resident after ten dead instances of 64 MiB, %d before", after, before)
	}
}
