//go:build !linux

package balance

// queued is 1 if connections wait for accept(2) on a socket.
func queued(fd uintptr) int { return readable(fd) }
