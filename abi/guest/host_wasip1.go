package guest

import "unsafe"

//go:wasmimport env proxy_log
//go:noescape
func proxyLog(level uint32, message *byte, size uint32) uint32

//go:wasmimport env proxy_call_foreign_function
//go:noescape
func proxyCallForeignFunction(name *byte, nameSize uint32, args *byte, argsSize uint32, result, resultSize *uint32) uint32

// The host gives back bytes by way of the allocator: they are the beginning of
// received, whose address is the host's to write into given.
var (
	received []byte
	given    struct{ ptr, size uint32 }
)

// allocate returns size bytes for the host to write to. One buffer is enough: a
// host function gives back one piece at most, which is used up before the next.
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

// Log writes a line into the host's log. Compiled natively it does nothing.
func Log(level Level, message string) {
	proxyLog(uint32(level), unsafe.StringData(message), uint32(len(message)))
}

// Foreign calls a foreign function by its name, one of the abi.Foreign names for
// example. The result is good until the next call. Compiled natively there is
// none, and the status is NotFound.
func Foreign(name string, args []byte) (result []byte, status Status) {
	given.ptr, given.size = 0, 0
	status = Status(proxyCallForeignFunction(unsafe.StringData(name), uint32(len(name)),
		unsafe.SliceData(args), uint32(len(args)), &given.ptr, &given.size))
	if status != OK || given.size == 0 {
		return nil, status
	}
	return received[:given.size], OK
}
