//go:build !linux

package upstream

import "syscall"

// resetUnsent does nothing: this system does not report unacknowledged bytes.
func resetUnsent(syscall.RawConn) {}
