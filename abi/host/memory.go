package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/tetratelabs/wazero/experimental"
)

// memoryTotal counts the memory of all VMs of a module.
type memoryTotal struct {
	limit uint64 // bytes; 0: none
	used  atomic.Uint64
}

// take counts size more bytes. It returns false when they would exceed the limit.
func (t *memoryTotal) take(size uint64) bool {
	if used := t.used.Add(size); t.limit > 0 && used > t.limit {
		t.give(size)
		return false
	}
	return true
}

func (t *memoryTotal) give(size uint64) { t.used.Add(-size) }

// linearMemory is a guest's memory with a limit. It implements the engine's
// MemoryAllocator and LinearMemory for one VM. It enforces the limit itself,
// because the engine does not report that it refused memory.
//
// The host maps the memory outside Go's heap. A VM that ends frees its memory
// at once, while the garbage collector would keep the memory of many dead VMs.
// The host reserves the address space of the whole limit at first, so the
// memory never moves.
type linearMemory struct {
	total   *memoryTotal
	space   []byte // the whole reserved range; nil after release
	size    uint64 // bytes that are in use
	tables  uint64 // bytes that tables and variables use in addition, as far as they count
	refused bool   // a request for memory was refused during the running call
	cleanup runtime.Cleanup
}

// newLinearMemory reserves a memory of at most limit bytes, of which the first
// least bytes are in use, and counts the memory of tables. The owner must call release. The garbage
// collector releases a memory that is no longer reachable.
func newLinearMemory(limit, least, tables uint64, total *memoryTotal) (*linearMemory, error) {
	space, err := reserve(int(limit))
	if err != nil {
		return nil, fmt.Errorf("reserve %d bytes: %w", limit, err)
	}
	l := &linearMemory{total: total, space: space}
	if !l.takeTables(tables) || l.Reallocate(least) == nil {
		total.give(l.tables)
		unmap(space)
		return nil, errors.New("the instances of the module have reached their memory limit")
	}
	l.cleanup = runtime.AddCleanup(l, unmap, space)
	return l, nil
}

// Allocate implements experimental.MemoryAllocator.
func (l *linearMemory) Allocate(uint64, uint64) experimental.LinearMemory { return l }

// Reallocate implements experimental.LinearMemory.
func (l *linearMemory) Reallocate(size uint64) []byte {
	if size > l.size {
		if size+l.tables > uint64(len(l.space)) || !l.total.take(size-l.size) {
			l.refused = true
			return nil
		}
		if commit(l.space[l.size:size]) != nil {
			l.total.give(size - l.size)
			l.refused = true
			return nil
		}
		l.size = size
	}
	return l.space[:size:size]
}

// takeTables counts size more bytes of tables. It returns false when there is no memory for them.
func (l *linearMemory) takeTables(size uint64) bool {
	if size+l.size+l.tables > uint64(len(l.space)) || !l.total.take(size) {
		return false
	}
	l.tables += size
	return true
}

// Free implements experimental.LinearMemory and does nothing. The engine calls
// it when it closes an instance, perhaps in the middle of a call. The owner of
// the VM releases the memory later.
func (l *linearMemory) Free() {}

// release unmaps the memory. No code may use it afterwards.
func (l *linearMemory) release() {
	if l.space == nil {
		return
	}
	l.cleanup.Stop()
	unmap(l.space)
	l.total.give(l.size + l.tables)
	l.space, l.size, l.tables = nil, 0, 0
}

// read returns a view of the guest's memory. ok is false when the range is not
// wholly inside the memory, also for an empty range.
func (vm *VM) read(ptr, size uint64) (view []byte, ok bool) {
	return vm.memory.Read(uint32(ptr), uint32(size))
}

// readTwo reads two pieces of memory. The first four args are the address and
// the length of each.
func (vm *VM) readTwo(args []uint64) (first, second []byte, ok bool) {
	if first, ok = vm.read(args[0], args[1]); ok {
		second, ok = vm.read(args[2], args[3])
	}
	return first, second, ok
}

// inside reports whether four bytes can be written at each address.
func (vm *VM) inside(ptrs ...uint64) bool {
	for _, ptr := range ptrs {
		if _, ok := vm.memory.Read(uint32(ptr), 4); !ok {
			return false
		}
	}
	return true
}

// writeU32 stores a number at an address.
func (vm *VM) writeU32(ptr uint64, value uint32) Status {
	if !vm.memory.WriteUint32Le(uint32(ptr), value) {
		return InvalidMemoryAccess
	}
	return OK
}

// writeU64 stores a number at an address.
func (vm *VM) writeU64(ptr uint64, value uint64) Status {
	if !vm.memory.WriteUint64Le(uint32(ptr), value) {
		return InvalidMemoryAccess
	}
	return OK
}

// writeBytes copies value into memory from the guest's own allocator, and
// stores address and size at valuePtr and sizePtr. For an empty value it stores
// 0 and 0 without a call of the allocator, because allocators of the Go SDKs
// trap on size 0. It runs guest code, so every earlier view is stale
// afterwards.
func (vm *VM) writeBytes(valuePtr, sizePtr uint64, value []byte) Status {
	view, status := vm.reserve(valuePtr, sizePtr, uint64(len(value)))
	copy(view, value)
	return status
}

// writeString is writeBytes of a string.
func (vm *VM) writeString(valuePtr, sizePtr uint64, value string) Status {
	view, status := vm.reserve(valuePtr, sizePtr, uint64(len(value)))
	copy(view, value)
	return status
}

// reserve allocates size bytes of guest memory, stores their address and size,
// and returns the view for the caller to fill.
func (vm *VM) reserve(valuePtr, sizePtr, size uint64) ([]byte, Status) {
	if !vm.inside(valuePtr, sizePtr) {
		return nil, InvalidMemoryAccess
	}
	var ptr uint32
	if size > 0 {
		if ptr = vm.allocate(size); ptr == 0 {
			return nil, InvalidMemoryAccess
		}
	}
	view, ok := vm.read(uint64(ptr), size)
	if !ok {
		return nil, InvalidMemoryAccess
	}
	vm.memory.WriteUint32Le(uint32(valuePtr), ptr)
	vm.memory.WriteUint32Le(uint32(sizePtr), uint32(size))
	return view, OK
}

// allocate requests memory from the guest and returns its address, 0 when the guest has none. A
// failure inside the guest ends the outer call too.
func (vm *VM) allocate(size uint64) uint32 {
	if vm.allocator == nil || size >= 1<<32 {
		return 0
	}
	outer, caller := vm.phase, vm.callee
	vm.phase, vm.callee = allocating, vm.allocator
	vm.allocArg[0] = size
	err := vm.allocator.CallWithStack(vm.running, vm.allocArg[:])
	vm.phase, vm.callee = outer, caller
	vm.trim(vm.allocator)
	if err != nil {
		panic(err)
	}
	return uint32(vm.allocArg[0])
}

// readPairs decodes a map in guest memory. A map that cannot be decoded counts
// as empty, as in other proxy-wasm hosts.
func (vm *VM) readPairs(ptr, size uint64) (Pairs, Status) {
	data, ok := vm.read(ptr, size)
	if !ok {
		return nil, InvalidMemoryAccess
	}
	pairs, err := DecodePairs(data)
	if err != nil {
		return nil, OK
	}
	return pairs, OK
}

// u32 reads a number from a view. The view must be large enough.
func u32(view []byte, offset int) uint32 { return binary.LittleEndian.Uint32(view[offset:]) }
