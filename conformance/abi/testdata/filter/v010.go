//go:build abi010

package main

import "unsafe"

// These exports exist only in version 0.1.0.

//go:wasmimport env proxy_get_configuration
func proxyGetConfiguration(a0, a1 uint32) uint32

//go:wasmimport env proxy_continue_request
func proxyContinueRequest() uint32

//go:wasmimport env proxy_continue_response
func proxyContinueResponse() uint32

//go:wasmimport env proxy_clear_route_cache
func proxyClearRouteCache() uint32

func init() {
	for name, c := range map[string]hostcall{
		"proxy_get_configuration": {2, func(a []uint64) uint32 { return proxyGetConfiguration(uint32(a[0]), uint32(a[1])) }},
		"proxy_continue_request":  {0, func(a []uint64) uint32 { return proxyContinueRequest() }},
		"proxy_continue_response": {0, func(a []uint64) uint32 { return proxyContinueResponse() }},
		"proxy_clear_route_cache": {0, func(a []uint64) uint32 { return proxyClearRouteCache() }},
	} {
		hostcalls[name] = c
	}
}

//go:wasmexport proxy_abi_version_0_1_0
func abiVersion() {}

//go:wasmexport proxy_on_request_headers
func onRequestHeaders(ctx, count uint32) uint32 {
	return stream(ctx, "request_headers", count, false)
}

//go:wasmexport proxy_on_response_headers
func onResponseHeaders(ctx, count uint32) uint32 {
	return stream(ctx, "response_headers", count, false)
}

// configuration reads the configuration for the running callback.
func configuration(uint32) string {
	var ptr, size uint32
	if proxyGetConfiguration(uint32(uintptr(unsafe.Pointer(&ptr))), uint32(uintptr(unsafe.Pointer(&size)))) != 0 {
		return ""
	}
	return text(ptr, size)
}
