package guest

import (
	"strings"
	"unsafe"
)

// scratch is the buffer for the host's frames. It consists of words, so that it
// is aligned.
var scratch []uint64

// policyList, needsList and headerList stay in memory, because the host reads them after
// the calls that return them.
var policyList, needsList, headerList string

//go:wasmexport pdproxy_v1_scratch
func exportScratch(size uint32) uint32 {
	if words := (int(size) + 7) / 8; words > len(scratch) {
		scratch = make([]uint64, words)
	}
	if len(scratch) == 0 {
		return 0
	}
	return address(unsafe.Pointer(&scratch[0]))
}

//go:wasmexport pdproxy_v1_policies
func exportPolicies() uint64 {
	policyList = list()
	return textAt(policyList)
}

//go:wasmexport pdproxy_v1_policy_needs
func exportPolicyNeeds() uint64 {
	needsList = listNeeds()
	return textAt(needsList)
}

//go:wasmexport pdproxy_v1_headers
func exportHeaders() uint64 {
	headerList = strings.Join(headers, "\n")
	return textAt(headerList)
}

// textAt packs the address and length of a text as the host expects them.
func textAt(s string) uint64 {
	return uint64(address(unsafe.Pointer(unsafe.StringData(s))))<<32 | uint64(len(s))
}

//go:wasmexport pdproxy_v1_needs
func exportNeeds() uint64 { return uint64(needs) }

//go:wasmexport pdproxy_v1_on_plan
func exportPlan(ptr, size uint32) uint64 {
	frame, _ := frameAt(ptr, size)
	return onPlan(frame)
}

//go:wasmexport pdproxy_v1_on_place
func exportPlace(ptr, size uint32) uint64 {
	frame, _ := frameAt(ptr, size)
	return onPlace(frame)
}

//go:wasmexport pdproxy_v1_on_mint
func exportMint(ptr, size uint32) uint64 {
	frame, _ := frameAt(ptr, size)
	return onMint(frame)
}

//go:wasmexport pdproxy_v1_on_leg
func exportLeg(ptr, size uint32) uint64 { return onLeg(frameAt(ptr, size)) }

//go:wasmexport pdproxy_v1_on_finish
func exportFinish(ptr, size uint32) {
	frame, _ := frameAt(ptr, size)
	onFinish(frame)
}

//go:wasmexport pdproxy_v1_on_retain
func exportRetain(ptr, size uint32) uint64 {
	frame, _ := frameAt(ptr, size)
	return onRetain(frame)
}

//go:wasmexport pdproxy_v1_on_score
func exportScore(ptr, size uint32) uint64 {
	frame, _ := frameAt(ptr, size)
	return onScore(frame)
}

//go:wasmexport pdproxy_v1_on_evict
func exportEvict(ptr, size uint32) uint64 {
	frame, _ := frameAt(ptr, size)
	return onEvict(frame)
}

// frameAt returns the frame and the free part of the scratch buffer after it;
// nil for a frame that does not begin at the start of the buffer.
func frameAt(ptr, size uint32) (frame, room []byte) {
	if len(scratch) == 0 || ptr != address(unsafe.Pointer(&scratch[0])) || int(size) > len(scratch)*8 {
		return nil, nil
	}
	memory := unsafe.Slice((*byte)(unsafe.Pointer(&scratch[0])), len(scratch)*8)
	return memory[:size:size], memory[size:]
}

// address returns a pointer in the host's form: 32 bits, because WebAssembly addresses have 32
// bits, whatever the width of Go's pointers.
func address(p unsafe.Pointer) uint32 { return uint32(uintptr(p)) }
