//go:build !abi010

package main

import "unsafe"

// The parts of 0.2.1 that 0.1.0 does not have.

//go:wasmimport env proxy_continue_stream
func proxyContinueStream(a0 uint32) uint32

//go:wasmimport env proxy_close_stream
func proxyCloseStream(a0 uint32) uint32

//go:wasmimport env proxy_get_log_level
func proxyGetLogLevel(a0 uint32) uint32

func init() {
	for name, c := range map[string]hostcall{
		"proxy_continue_stream": {1, func(a []uint64) uint32 { return proxyContinueStream(uint32(a[0])) }},
		"proxy_close_stream":    {1, func(a []uint64) uint32 { return proxyCloseStream(uint32(a[0])) }},
		"proxy_get_log_level":   {1, func(a []uint64) uint32 { return proxyGetLogLevel(uint32(a[0])) }},
	} {
		hostcalls[name] = c
	}
}

//go:wasmexport proxy_abi_version_0_2_1
func abiVersion() {}

//go:wasmexport proxy_on_request_headers
func onRequestHeaders(ctx, count, end uint32) uint32 {
	return stream(ctx, "request_headers", count, end != 0)
}

//go:wasmexport proxy_on_response_headers
func onResponseHeaders(ctx, count, end uint32) uint32 {
	return stream(ctx, "response_headers", count, end != 0)
}

//go:wasmexport proxy_on_foreign_function
func onForeignFunction(root, id, size uint32) {
	run(&call{ctx: root, script: "main", name: "foreign_function", size: size, id: id})
}

// configuration reads a whole configuration buffer.
func configuration(kind uint32) string {
	var ptr, size uint32
	if proxyGetBufferBytes(kind, 0, 1<<31-1, uint32(uintptr(unsafe.Pointer(&ptr))), uint32(uintptr(unsafe.Pointer(&size)))) != 0 {
		return ""
	}
	return text(ptr, size)
}
