package abi

import "unsafe"

// Little-endian words at an offset. WebAssembly is little-endian and takes
// unaligned addresses; its compiler would load byte by byte without this.

func get16(b []byte, at int) uint16 { return *(*uint16)(unsafe.Pointer(&b[at : at+2][0])) }

func get32(b []byte, at int) uint32 { return *(*uint32)(unsafe.Pointer(&b[at : at+4][0])) }

func get64(b []byte, at int) uint64 { return *(*uint64)(unsafe.Pointer(&b[at : at+8][0])) }

func put32(b []byte, at int, v uint32) { *(*uint32)(unsafe.Pointer(&b[at : at+4][0])) = v }

func put64(b []byte, at int, v uint64) { *(*uint64)(unsafe.Pointer(&b[at : at+8][0])) = v }
