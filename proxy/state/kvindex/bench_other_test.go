//go:build !linux

package kvindex

import "time"

// threadTime is the wall-clock time, because this system does not report the CPU time of
// a thread.
func threadTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
