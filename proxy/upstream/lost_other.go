//go:build !linux

package upstream

import (
	"syscall"
	"time"
)

// unreceived stands for what there is not.
func unreceived(syscall.RawConn) bool { return false }

// giveUpAfter stands for what there is not: probes alone tell of a host that has
// gone.
func giveUpAfter(syscall.RawConn, time.Duration) error { return nil }
