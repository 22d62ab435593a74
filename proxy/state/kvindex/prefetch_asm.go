//go:build amd64 || arm64

package kvindex

// prefetch starts to load the memory at the first n addresses into the cache and does not
// wait.
//
//go:noescape
func prefetch(at *lines, n int)
