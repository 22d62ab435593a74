//go:build !wasm

package abi

// Little-endian words at an offset. On amd64 and arm64 the compiler makes one
// move of each.

func get16(b []byte, at int) uint16 {
	b = b[at : at+2]
	return uint16(b[0]) | uint16(b[1])<<8
}

func get32(b []byte, at int) uint32 {
	b = b[at : at+4]
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}

func get64(b []byte, at int) uint64 {
	b = b[at : at+8]
	return uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16 | uint64(b[3])<<24 |
		uint64(b[4])<<32 | uint64(b[5])<<40 | uint64(b[6])<<48 | uint64(b[7])<<56
}

func put32(b []byte, at int, v uint32) {
	b = b[at : at+4]
	b[0], b[1], b[2], b[3] = byte(v), byte(v>>8), byte(v>>16), byte(v>>24)
}

func put64(b []byte, at int, v uint64) {
	b = b[at : at+8]
	b[0], b[1], b[2], b[3] = byte(v), byte(v>>8), byte(v>>16), byte(v>>24)
	b[4], b[5], b[6], b[7] = byte(v>>32), byte(v>>40), byte(v>>48), byte(v>>56)
}
