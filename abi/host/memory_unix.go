//go:build unix

package host

import "golang.org/x/sys/unix"

// reserve reserves size bytes of address space, none of which can be used yet.
func reserve(size int) ([]byte, error) {
	return unix.Mmap(-1, 0, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
}

// commit makes reserved memory usable. It is zero until it is written to.
func commit(b []byte) error { return unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE) }

// unmap gives back what reserve returned.
func unmap(b []byte) { _ = unix.Munmap(b) } // it can only fail for memory that is not mapped
