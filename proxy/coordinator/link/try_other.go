//go:build !unix

package link

import "syscall"

// canTry says that a socket can be written to without waiting for the peer.
const canTry = false

// attempt stands for what there is not: writeRests writes.
type attempt struct{}

func (attempt) init() {}

func (attempt) write(_ syscall.RawConn, b []byte) (done bool, rest []byte) { return false, b }
