//go:build !linux

package upstream

import (
	"syscall"
	"time"
)

// withdraw stands for what there is not.
func withdraw(syscall.RawConn) {}

// giveUpAfter stands for what there is not: probes alone tell of a host that has
// gone.
func giveUpAfter(syscall.RawConn, time.Duration) error { return nil }
