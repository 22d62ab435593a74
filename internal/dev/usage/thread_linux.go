package usage

import (
	"time"

	"golang.org/x/sys/unix"
)

// ThreadTime returns the CPU time of the calling thread. The caller has locked its goroutine to the
// thread.
func ThreadTime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) // cannot fail
	return time.Duration(ts.Nano())
}
