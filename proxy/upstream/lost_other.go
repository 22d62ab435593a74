//go:build !linux

package upstream

import (
	"syscall"
	"time"
)

// withdraw does nothing: this system has no such option.
func withdraw(syscall.RawConn) {}

// giveUpAfter does nothing: on this system only probes detect a host that has gone.
func giveUpAfter(syscall.RawConn, time.Duration) error { return nil }
