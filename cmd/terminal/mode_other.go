//go:build !linux

package terminal

import "golang.org/x/sys/unix"

// The requests that read and write the mode of a terminal.
const (
	getMode = unix.TIOCGETA
	setMode = unix.TIOCSETA
)
