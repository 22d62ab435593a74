//go:build linux && (amd64 || arm64) && race

package socket

// now writes as much of the first unwritten buffer as the socket accepts.
func (o *output) now(fd uintptr) (int, error) { return WriteNow(fd, o.bufs[0]) }
