//go:build pdproxy_sdk

package main

import (
	"unsafe"

	"github.com/pdproxy/pdproxy/abi/guest"
)

// The functions that another SDK exports in the place of abi/guest.

//go:wasmexport proxy_abi_version_0_2_1
func marker() {}

var buffers [][]byte // for the host; each call gets another one

//go:wasmexport proxy_on_memory_allocate
func allocate(size uint32) *byte {
	buffers = append(buffers, make([]byte, size))
	return &buffers[len(buffers)-1][0]
}

//go:wasmexport proxy_on_vm_start
func vmStart(_, _ uint32) uint32 { return 1 }

//go:wasmimport env proxy_get_buffer_bytes
func getBufferBytes(buffer, start, size uint32, result, resultSize *uint32) uint32

//go:wasmexport proxy_on_configure
func configure(_, size uint32) uint32 {
	const pluginConfiguration = 7
	var at, n uint32
	if getBufferBytes(pluginConfiguration, 0, size, &at, &n) != 0 || !guest.Configured(string(unsafe.Slice((*byte)(unsafe.Pointer(uintptr(at))), n))) {
		return 0
	}
	return 1
}
