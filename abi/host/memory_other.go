//go:build !unix

package host

// reserve allocates size bytes.
func reserve(size int) ([]byte, error) { return make([]byte, size), nil }

// commit makes reserved memory usable.
func commit([]byte) error { return nil }

// unmap does nothing: the garbage collector frees what reserve returned.
func unmap([]byte) {}
