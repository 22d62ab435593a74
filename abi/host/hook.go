package host

import (
	"context"
	"errors"
	"fmt"

	"github.com/tetratelabs/wazero/api"
)

// scratchExport gives the host the memory that frames are written to.
const scratchExport = "pdproxy_v1_scratch"

// Hook is one hook of one VM. It is valid as long as the VM. As for the VM, only one goroutine at a
// time may call it.
type Hook struct {
	vm     *VM
	name   string
	fn     *entry
	result bool
}

// Hook returns the hook exported under a name such as pdproxy_v1_on_place; ok
// is false when the guest does not export it. The caller should keep the Hook,
// because a look-up allocates.
func (vm *VM) Hook(name string) (h *Hook, ok bool) {
	fn := vm.exported(name)
	if fn == nil || checkHook(name, fn.Definition()) != nil || len(fn.Definition().ParamTypes()) != 2 {
		return nil, false
	}
	return &Hook{vm: vm, name: name, fn: fn, result: len(fn.Definition().ResultTypes()) == 1}, true
}

// Call calls the hook with a frame of size bytes at ptr in guest memory and
// returns its answer, 0 for a hook without one. The current context is the VM's
// first root context, 0 if there is none. In an unguarded module Call does not
// allocate. The call may grow the guest's memory, which makes earlier views
// stale.
func (h *Hook) Call(ctx context.Context, ptr, size uint32) (int64, error) {
	vm := h.vm
	vm.stack[0], vm.stack[1] = uint64(ptr), uint64(size)
	if err := vm.call(ctx, h.fn, h.name, vm.root, vm.stack[:2]); err != nil || !h.result {
		return 0, err
	}
	return int64(vm.stack[0]), nil
}

// Scratch returns a view of the guest's scratch buffer, at least size bytes
// long, and its address. It calls the guest only when the existing buffer is
// too small, and costs next to nothing otherwise. So callers take a new view
// for each frame and after each hook call.
func (vm *VM) Scratch(ctx context.Context, size uint32) (view []byte, ptr uint32, err error) {
	if vm.failed != nil || vm.linear.space == nil {
		return nil, 0, ErrPoisoned
	}
	if size > vm.scratchSize || vm.scratchSize == 0 {
		if err := vm.askScratch(ctx, size); err != nil {
			return nil, 0, err
		}
	}
	view, ok := vm.memory.Read(vm.scratchPtr, vm.scratchSize)
	if !ok {
		return nil, 0, errors.New("take scratch buffer: guest memory shrank")
	}
	return view, vm.scratchPtr, nil
}

// askScratch requests from the guest a scratch buffer of at least size bytes.
func (vm *VM) askScratch(ctx context.Context, size uint32) error {
	fn := vm.exported(scratchExport)
	if fn == nil {
		return fmt.Errorf("take scratch buffer: no export %s", scratchExport)
	}
	vm.scratchSize = 0
	vm.stack[0] = uint64(size)
	outer := vm.phase
	vm.phase = allocating
	err := vm.call(ctx, fn, scratchExport, vm.root, vm.stack[:1])
	vm.phase = outer
	if err != nil {
		return err
	}
	ptr := uint32(vm.stack[0])
	if ptr == 0 {
		return fmt.Errorf("take scratch buffer: the guest refused %d bytes", size)
	}
	if ptr%8 != 0 {
		return errors.New("take scratch buffer: its address is not a multiple of 8")
	}
	if _, ok := vm.memory.Read(ptr, size); !ok {
		return errors.New("take scratch buffer: it lies outside guest memory")
	}
	vm.scratchPtr, vm.scratchSize = ptr, size
	return nil
}

// View returns size bytes of guest memory at ptr without a copy; ok is false
// when they are not all inside the memory. The view is valid until the next
// call into the VM. After Close no view may be used.
func (vm *VM) View(ptr, size uint32) (view []byte, ok bool) {
	if vm.linear.space == nil {
		return nil, false
	}
	return vm.memory.Read(ptr, size)
}

// Value calls an export without parameters that returns an i64, such as
// pdproxy_v1_needs; ok is false when there is no such export.
func (vm *VM) Value(ctx context.Context, export string) (value int64, ok bool, err error) {
	fn := vm.exported(export)
	if fn == nil {
		return 0, false, nil
	}
	def := fn.Definition()
	if len(def.ParamTypes()) != 0 || !sameTypes(def.ResultTypes(), []api.ValueType{api.ValueTypeI64}) {
		return 0, false, fmt.Errorf("call %s: it is not of type () -> i64", export)
	}
	if err := vm.call(ctx, fn, export, vm.root, vm.stack[:1]); err != nil {
		return 0, true, err
	}
	return int64(vm.stack[0]), true, nil
}

// Text calls an export without parameters that returns an i64 with an address
// in its high half and a length in its low half, such as pdproxy_v1_policies,
// and returns a copy of the bytes there; ok is false when there is no such
// export.
func (vm *VM) Text(ctx context.Context, export string) (text string, ok bool, err error) {
	value, ok, err := vm.Value(ctx, export)
	if !ok || err != nil {
		return "", ok, err
	}
	view, inside := vm.View(uint32(uint64(value)>>32), uint32(value))
	if !inside {
		return "", true, fmt.Errorf("call %s: the text lies outside guest memory", export)
	}
	if len(view) > MaxName {
		return "", true, fmt.Errorf("call %s: the text is longer than %d bytes", export, MaxName)
	}
	return string(view), true, nil
}

// checkHook rejects an export of pdproxy's whose type differs from the
// contract's: hooks take (i32, i32) and return an i64 or nothing.
func checkHook(name string, def api.FunctionDefinition) error {
	i32, i64 := api.ValueTypeI32, api.ValueTypeI64
	ok := true
	switch {
	case name == scratchExport:
		ok = sameTypes(def.ParamTypes(), []api.ValueType{i32}) && sameTypes(def.ResultTypes(), []api.ValueType{i32})
	case len(name) > len(hookPrefix) && name[:len(hookPrefix)] == hookPrefix:
		ok = sameTypes(def.ParamTypes(), []api.ValueType{i32, i32}) &&
			(len(def.ResultTypes()) == 0 || sameTypes(def.ResultTypes(), []api.ValueType{i64}))
	}
	if !ok {
		return fmt.Errorf("load module: export %s has the wrong type %s", name, typeText(def.ParamTypes(), def.ResultTypes()))
	}
	return nil
}
