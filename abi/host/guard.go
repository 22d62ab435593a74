package host

import (
	"context"
	"fmt"

	"github.com/tetratelabs/wazero/api"

	"github.com/pdproxy/pdproxy/abi/host/meter"
)

// A guarded module is metered: its code calls the host each time when it has executed some
// instructions, see meter.Budget. Then the host ends the call if the VM is interrupted or its stack is
// too large. The engine has its own checks for the end of a context, but only in loops, and they are
// slow. While a guest runs its own code, the Go runtime cannot stop its goroutine, and the
// garbage collector waits. So the time between two calls of the host has to be short.

// The limits of a guarded VM's memory outside of the linear memory.
const (
	// maxStack is the size of the stack of native code, in bytes, above which a call fails. Browsers
	// give about 1 MiB. The engine doubles the stack, so a guest has half of maxStack in any case. Before
	// a check fails, the stack may grow to several times maxStack.
	maxStack = 2 << 20
	// keepStack is the size of a stack that the VM keeps for the next call of the same function.
	keepStack = 256 << 10
	// maxTable is the number of entries of a table, as in browsers.
	maxTable = 10_000_000
	// freeTables is the memory of tables and variables that does not count, in bytes.
	freeTables = 256 << 10
)

// The memory of entries of the engine's lists, in bytes, with their growth.
const (
	sizeTableEntry = 16
	sizeVariable   = 128
	sizeFunction   = 64
)

// tableMemory returns the memory that a new VM of a module has outside of its linear memory.
func tableMemory(m *meter.Module) (size uint64, err error) {
	entries := uint64(m.Elements)
	for i, t := range m.Tables {
		if t.Min > maxTable {
			return 0, fmt.Errorf("load module: table %d has %d entries, the limit is %d", i, t.Min, maxTable)
		}
		entries += uint64(t.Min)
	}
	return entries*sizeTableEntry + uint64(m.Globals)*sizeVariable + uint64(len(m.Functions)+m.Imports)*sizeFunction, nil
}

// linkMeter gives a guarded module the functions of its meter.
func (m *Module) linkMeter(ctx context.Context) error {
	i32 := []api.ValueType{api.ValueTypeI32}
	_, err := m.runtime.NewHostModuleBuilder(meter.ImportModule).
		NewFunctionBuilder().WithGoModuleFunction(api.GoModuleFunc(func(ctx context.Context, mod api.Module, stack []uint64) {
		vmOf(ctx, mod).pause()
		stack[0] = meter.Budget
	}), nil, i32).Export(meter.Pause).
		NewFunctionBuilder().WithGoModuleFunction(api.GoModuleFunc(func(ctx context.Context, mod api.Module, stack []uint64) {
		stack[0] = vmOf(ctx, mod).room(uint32(stack[0]), uint32(stack[1]), uint32(stack[2]))
	}), append(i32, api.ValueTypeI32, api.ValueTypeI32), i32).Export(meter.Room).
		Instantiate(ctx)
	if err != nil {
		return fmt.Errorf("link meter: %w", err)
	}
	return nil
}

// pause ends the running call if the VM is interrupted or the stack is too large.
func (vm *VM) pause() {
	if vm.interrupted.Load() {
		panic(errInterrupted)
	}
	if fn := vm.callee; fn != nil && fn.stack.IsValid() && fn.stack.Len() > maxStack {
		panic(errStack)
	}
}

// errStack is the panic of a call whose stack is too large.
var errStack error = stackOverflow{}

type stackOverflow struct{}

// Error implements error, so that the engine returns the value unchanged.
func (stackOverflow) Error() string { return "stack overflow" }

// room counts the memory of a table that grows. It returns entries, or -1 when there is no memory.
// A growth above the table's own limit counts nothing: the engine refuses it.
func (vm *VM) room(entries, size, limit uint32) uint64 {
	vm.pause()
	switch wanted := uint64(size) + uint64(entries); {
	case wanted > uint64(limit):
		return uint64(entries)
	case wanted > maxTable || !vm.linear.takeTables(uint64(entries)*sizeTableEntry):
		vm.linear.refused = true
		return 1<<32 - 1
	}
	return uint64(entries)
}
