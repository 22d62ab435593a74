package host

import (
	"context"
	"fmt"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
)

// phase says which host functions a guest may call now.
type phase uint8

const (
	serving    phase = iota // all
	starting                // logging, clocks, randomness and harmless WASI
	allocating              // logging, clocks and what Go's collector needs
)

// VM is one running instance of a module. It is not safe for concurrent use:
// its owner serialises all calls, also of its hooks. After a failed call (an
// *Error) it is poisoned and every further call answers ErrPoisoned.
type VM struct {
	module   *Module
	env      Env
	instance api.Module
	memory   api.Memory
	linear   *linearMemory

	callbacks [callbackCount]api.Function
	allocator api.Function
	scope     callScope  // of unguarded calls, used again and again
	running   *callScope // of the call that is running
	stack     [8]uint64  // parameters and result of the call from outside
	allocArg  [1]uint64

	contexts  map[uint32]uint32 // live context id -> its root
	root      uint32            // the first root context, 0: none
	current   uint32            // context of the running callback
	effective uint32
	phase     phase
	busy      bool
	failed    *Error

	answer     *callAnswer // of the HTTP call whose callback runs
	foreign    *[]byte     // arguments of the foreign function whose callback runs
	vmStarting bool        // proxy_on_vm_start runs

	out, err lineBuffer

	scratchPtr, scratchSize uint32
}

// callScope is the context of a guest call; it brings the VM to the host
// functions. Values of the caller's context are not handed on.
type callScope struct {
	context.Context
	vm *VM
}

// Value implements context.Context. It has none, whatever the outer one holds:
// guests see nothing of it, and the engine's look-ups stay cheap.
func (*callScope) Value(any) any { return nil }

// NewVM makes an instance and runs its initialisation: _initialize and then
// main(0, 0) if there is one, or _start when there is no _initialize. During it
// the guest may only log, read clocks, randomness and its empty environment.
// ctx bounds it if the module is guarded. The VM has no contexts yet: go on
// with ContextCreate, VMStart and Configure.
func (m *Module) NewVM(ctx context.Context, env Env) (*VM, error) {
	vm := &VM{module: m, env: env, contexts: make(map[uint32]uint32)}
	var err error
	if vm.linear, err = newLinearMemory(uint64(m.pages)*PageSize, uint64(m.minPages)*PageSize, &m.total); err != nil {
		return nil, fmt.Errorf("make vm: %w", err)
	}
	vm.scope.vm = vm
	vm.out = lineBuffer{level: LogInfo}
	vm.err = lineBuffer{level: LogError}
	// The scope is there already for a start function in the binary itself,
	// which the engine runs while it instantiates.
	vm.phase = starting
	scope := &callScope{Context: experimental.WithMemoryAllocator(ctx, vm.linear), vm: vm}
	instance, err := m.runtime.InstantiateModule(instantiation{scope}, m.compiled,
		wazero.NewModuleConfig().WithName("").WithStartFunctions())
	if err != nil {
		vm.flush()
		vm.linear.release()
		return nil, fmt.Errorf("make vm: %w", callError("instantiate", err, ctx.Err(), vm.linear.refused))
	}
	vm.instance = instance
	vm.memory = instance.Memory()
	if name := m.allocatorName(); name != "" {
		vm.allocator = instance.ExportedFunction(name)
	}
	if err := vm.start(ctx); err != nil {
		_ = vm.Close(ctx)
		return nil, err
	}
	vm.phase = serving
	return vm, nil
}

// start runs the guest's own initialisation.
func (vm *VM) start(ctx context.Context) error {
	names := []string{"_start"}
	if vm.instance.ExportedFunction("_initialize") != nil {
		names = []string{"_initialize", "main"}
		if vm.instance.ExportedFunction("main") == nil {
			names[1] = "__main_void"
		}
	}
	for _, name := range names {
		fn := vm.instance.ExportedFunction(name)
		if fn == nil {
			continue
		}
		vm.stack[0], vm.stack[1] = 0, 0
		err := vm.call(ctx, fn, name, 0, vm.stack[:2])
		if e := vm.failed; e != nil && name == "_start" && e.Failure == Exit && e.code == 0 {
			// The C libraries of commands end _start so; the instance is whole.
			vm.failed, err = nil, nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// call runs a function of the guest with its parameters in stack, where its
// result will be. id is the current and effective context meanwhile.
func (vm *VM) call(ctx context.Context, fn api.Function, export string, id uint32, stack []uint64) error {
	if vm.failed != nil || vm.linear.space == nil {
		return ErrPoisoned
	}
	if vm.busy {
		return ErrBusy
	}
	scope := &vm.scope
	if vm.module.guarded {
		// The engine's watcher may look at the scope after the call.
		scope = &callScope{vm: vm}
	}
	scope.Context = ctx
	vm.linear.refused = false
	vm.busy, vm.running, vm.current, vm.effective = true, scope, id, id
	err := fn.CallWithStack(scope, stack)
	vm.busy, vm.running, vm.current, vm.effective = false, nil, 0, 0
	vm.scope.Context = nil
	if err != nil {
		return vm.fail(ctx, export, err)
	}
	return nil
}

// fail poisons the VM.
func (vm *VM) fail(ctx context.Context, export string, err error) error {
	vm.failed = callError(export, err, ctx.Err(), vm.linear.refused)
	vm.flush()
	return vm.failed
}

// Err returns the failure that poisoned the VM; nil while it is healthy.
func (vm *VM) Err() error {
	if vm.failed == nil {
		return nil
	}
	return vm.failed
}

// MemorySize returns the size of the guest's memory in bytes, 0 after Close.
func (vm *VM) MemorySize() uint32 { return uint32(vm.linear.size) }

// Close ends the VM without a word to the guest and frees it, with its memory. It
// may be called more than once, and while it is poisoned, but not during a call;
// every call after it answers ErrPoisoned.
func (vm *VM) Close(ctx context.Context) error {
	vm.flush()
	err := vm.instance.Close(ctx)
	vm.linear.release()
	return err
}

// flush logs what the guest printed without an end of line.
func (vm *VM) flush() {
	vm.out.flush(vm.env)
	vm.err.flush(vm.env)
}

// instantiation is the context of instantiating: the scope with the values that
// the engine itself looks for.
type instantiation struct{ *callScope }

// Value implements context.Context.
func (i instantiation) Value(key any) any { return i.callScope.Context.Value(key) }
