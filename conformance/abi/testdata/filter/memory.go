package main

import "unsafe"

// memoryEnd returns the size of linear memory. It is an assembly stub, because
// Go has no name for the instruction memory.size.
func memoryEnd() uint32 { return currentMemory() * 65536 }

//go:linkname currentMemory runtime.currentMemory
func currentMemory() uint32

var _ unsafe.Pointer
