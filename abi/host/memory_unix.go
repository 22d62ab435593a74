//go:build unix

package host

import "golang.org/x/sys/unix"

// reserve reserves size bytes of address space. None of them can be used before
// commit.
func reserve(size int) ([]byte, error) {
	return unix.Mmap(-1, 0, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
}

// commit makes reserved memory usable. It reads as zero until the first write.
func commit(b []byte) error { return unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE) }

// unmap frees the range that reserve returned.
func unmap(b []byte) { _ = unix.Munmap(b) } // it fails only for memory that is not mapped
