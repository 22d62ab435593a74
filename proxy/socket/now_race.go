//go:build linux && (amd64 || arm64) && race

package socket

// now writes what the socket takes of the first buffer that is left.
func (o *output) now(fd uintptr) (int, error) { return WriteNow(fd, o.bufs[0]) }
