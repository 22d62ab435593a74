//go:build !wasm

package abi

import "encoding/binary"

// Little-endian words at an offset.

func get16(b []byte, at int) uint16 { return binary.LittleEndian.Uint16(b[at:]) }

func get32(b []byte, at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }

func get64(b []byte, at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }

func put32(b []byte, at int, v uint32) { binary.LittleEndian.PutUint32(b[at:], v) }

func put64(b []byte, at int, v uint64) { binary.LittleEndian.PutUint64(b[at:], v) }
