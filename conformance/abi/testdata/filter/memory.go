package main

import "unsafe"

// memoryEnd is one past the last byte of linear memory: an assembly stub,
// because Go has no name for the instruction memory.size.
func memoryEnd() uint32 { return currentMemory() * 65536 }

//go:linkname currentMemory runtime.currentMemory
func currentMemory() uint32

var _ unsafe.Pointer
