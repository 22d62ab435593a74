//go:build unix

package link

import "syscall"

// canTry reports whether this system can write to a socket without waiting.
const canTry = true

// attempt writes to a socket without waiting, and without an allocation.
type attempt struct {
	b    []byte
	done bool
	once func(fd uintptr) bool
}

func (a *attempt) init() {
	a.once = func(fd uintptr) bool {
		for {
			n, err := syscall.Write(int(fd), a.b)
			if err == syscall.EINTR {
				continue
			}
			if n > 0 {
				a.b = a.b[n:]
			}
			a.done = len(a.b) == 0
			return true
		}
	}
}

// write returns the unwritten rest of b, and whether it wrote all of b.
func (a *attempt) write(raw syscall.RawConn, b []byte) (done bool, rest []byte) {
	a.b, a.done = b, false
	err := raw.Write(a.once)
	rest, a.b = a.b, nil
	return a.done && err == nil, rest
}
