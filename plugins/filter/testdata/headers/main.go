// Command headers is the smallest guest that looks at headers: it reads one line
// of each head and has no callbacks for bodies.
package main

import "unsafe"

func main() {}

var buffer [4096]byte

//go:wasmimport env proxy_get_header_map_value
func getHeaderMapValue(kind uint32, key unsafe.Pointer, keySize uint32, value, size unsafe.Pointer) uint32

//go:wasmexport proxy_abi_version_0_2_1
func abiVersion() {}

//go:wasmexport proxy_on_memory_allocate
func allocate(size uint32) unsafe.Pointer {
	if size > uint32(len(buffer)) {
		return nil
	}
	return unsafe.Pointer(&buffer)
}

var name = "content-type"

func read(kind uint32) uint32 {
	var value, size uint32
	getHeaderMapValue(kind, unsafe.Pointer(unsafe.StringData(name)), uint32(len(name)), unsafe.Pointer(&value), unsafe.Pointer(&size))
	return 0
}

//go:wasmexport proxy_on_request_headers
func onRequestHeaders(ctx, lines, end uint32) uint32 { return read(0) }

//go:wasmexport proxy_on_response_headers
func onResponseHeaders(ctx, lines, end uint32) uint32 { return read(2) }
