//go:build !amd64 && !arm64

package kvindex

// prefetch does nothing on this architecture: each look-up waits for memory.
func prefetch(*lines, int) {}
