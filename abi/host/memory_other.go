//go:build !unix

package host

// reserve allocates size bytes.
func reserve(size int) ([]byte, error) { return make([]byte, size), nil }

// commit makes reserved memory usable.
func commit([]byte) error { return nil }

// unmap leaves what reserve returned to the garbage collector.
func unmap([]byte) {}
