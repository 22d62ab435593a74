//go:build amd64 || arm64

package kvindex

// prefetch asks for the memory at the first n addresses and does not wait.
//
//go:noescape
func prefetch(at *lines, n int)
