//go:build !unix

package link

import "syscall"

// canTry reports whether this system can write to a socket without waiting.
const canTry = false

// attempt never writes on this system; writeRests does.
type attempt struct{}

func (attempt) init() {}

func (attempt) write(_ syscall.RawConn, b []byte) (done bool, rest []byte) { return false, b }
