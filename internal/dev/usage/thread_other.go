//go:build !linux

package usage

import "time"

// ThreadTime returns the wall-clock time, because this system does not report the CPU time of a
// thread.
func ThreadTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
