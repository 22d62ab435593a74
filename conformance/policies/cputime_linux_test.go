package policies

import (
	"syscall"
	"time"
	"unsafe"
)

// threadTime is the CPU time of the calling thread (clock_gettime,
// CLOCK_THREAD_CPUTIME_ID).
func threadTime() time.Duration {
	var ts syscall.Timespec
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, 3, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		panic(errno)
	}
	return time.Duration(ts.Nano())
}
