package guest

import "unsafe"

//go:wasmimport env proxy_log
//go:noescape
func proxyLog(level uint32, message *byte, size uint32) uint32

//go:wasmimport env proxy_call_foreign_function
//go:noescape
func proxyCallForeignFunction(name *byte, nameSize uint32, args *byte, argsSize uint32, result, resultSize *uint32) uint32

// The host returns bytes through the allocator of the module. It writes their address and size
// into given. If the allocator is that of this package, they are the beginning of received.
var (
	received []byte
	given    struct{ ptr, size uint32 }
)

// allocate returns size bytes for the host to write to. One buffer is enough: a
// host function returns at most one piece, which the caller uses before the
// next call.
func allocate(size uint32) *byte {
	if size == 0 {
		return nil
	}
	if uint32(cap(received)) < size {
		received = make([]byte, size)
	}
	received = received[:size]
	return &received[0]
}

// Log writes a line into the host's log. In a native build, Log does nothing.
func Log(level Level, message string) {
	proxyLog(uint32(level), unsafe.StringData(message), uint32(len(message)))
}

// Foreign calls a foreign function by its name, for example one of the
// abi.Foreign names. The result is valid until the next call. In a native build
// it only returns NotFound.
func Foreign(name string, args []byte) (result []byte, status Status) {
	given.ptr, given.size = 0, 0
	status = Status(proxyCallForeignFunction(unsafe.StringData(name), uint32(len(name)),
		unsafe.SliceData(args), uint32(len(args)), &given.ptr, &given.size))
	if status != OK || given.size == 0 {
		return nil, status
	}
	// Not received: the allocator may be that of another SDK.
	return unsafe.Slice((*byte)(unsafe.Pointer(uintptr(given.ptr))), given.size), OK
}
