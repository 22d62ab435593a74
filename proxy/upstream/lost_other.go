//go:build !linux

package upstream

import (
	"syscall"
	"time"
)

// resetUnsent does nothing: this system does not report unacknowledged bytes.
func resetUnsent(syscall.RawConn) {}

// giveUpAfter does nothing: on this system only probes detect a host that has gone.
func giveUpAfter(syscall.RawConn, time.Duration) error { return nil }
