//go:build !pdproxy_sdk

package guest

import "unsafe"

//go:wasmimport env proxy_get_buffer_bytes
//go:noescape
func proxyGetBufferBytes(buffer, start, size uint32, result, resultSize *uint32) uint32

// pluginConfiguration is the number of the buffer PLUGIN_CONFIGURATION.
const pluginConfiguration = 7

//go:wasmexport proxy_abi_version_0_2_1
func exportVersion() {}

//go:wasmexport proxy_on_memory_allocate
func exportAllocate(size uint32) uint32 { return address(unsafe.Pointer(allocate(size))) }

//go:wasmexport proxy_on_vm_start
func exportVMStart(_, _ uint32) uint32 { return 1 }

//go:wasmexport proxy_on_configure
func exportConfigure(_, size uint32) uint32 {
	text := ""
	if size > 0 {
		given.ptr, given.size = 0, 0
		if proxyGetBufferBytes(pluginConfiguration, 0, size, &given.ptr, &given.size) != uint32(OK) {
			Log(LogError, "the configuration cannot be read")
			return 0
		}
		text = string(received[:given.size])
	}
	if !Configured(text) {
		return 0
	}
	return 1
}
