package host

import (
	"context"
	"fmt"
	"reflect"
	"sync/atomic"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"github.com/tetratelabs/wazero/sys"

	"github.com/pdproxy/pdproxy/abi/host/meter"
)

// phase determines which host functions a guest may call.
type phase uint8

const (
	serving    phase = iota // all
	starting                // logging, clocks, randomness and WASI functions without effects
	allocating              // logging, clocks and the functions that Go's collector needs
)

// VM is one running instance of a module. It is not safe for concurrent use:
// its owner serialises all calls, including those of its hooks. A failed call
// (an *Error) poisons the VM, and every further call returns ErrPoisoned.
type VM struct {
	module   *Module
	env      Env
	instance api.Module
	memory   api.Memory
	linear   *linearMemory

	callbacks [callbackCount]*entry
	allocator *entry
	scope     callScope  // of calls, reused
	running   *callScope // scope of the running call
	callee    *entry     // function of the running call
	stack     [8]uint64  // parameters and result of a call from the host
	allocArg  [1]uint64

	contexts  map[uint32]uint32 // live context id -> its root
	root      uint32            // the first root context, 0: none
	current   uint32            // context of the running callback
	effective uint32
	phase     phase
	busy      bool
	failed    *Error

	interrupted atomic.Bool   // Interrupt was called
	woken       chan struct{} // closed when interrupted is set, for a guest that sleeps in the host
	detached    atomic.Bool   // host functions return an error status, see Detach

	answer     *callAnswer // of the HTTP call whose callback runs
	foreign    *[]byte     // arguments of the foreign function whose callback runs
	vmStarting bool        // proxy_on_vm_start runs

	out, err lineBuffer
	keeps    bool          // printed lines are kept during a call, see KeepPrinted
	kept     []printedLine // of the running call
	keptSize int           // bytes of kept

	scratchPtr, scratchSize uint32
}

// callScope is the context of a guest call. It gives the host functions access
// to the VM. It does not pass on the values of the caller's context.
type callScope struct {
	context.Context
	vm *VM
}

// Value implements context.Context. It returns nil, whatever the outer context
// holds, so that the engine's look-ups stay cheap.
func (*callScope) Value(any) any { return nil }

// NewVM makes an instance and runs its initialisation: _initialize and then
// main(0, 0) if it is exported, or _start when there is no _initialize. During
// initialisation the guest may only log, read clocks and randomness, and read
// its empty environment. ctx bounds the initialisation if the module is
// guarded. The new VM has no contexts: the next calls are ContextCreate,
// VMStart and Configure.
func (m *Module) NewVM(ctx context.Context, env Env) (*VM, error) {
	vm := &VM{module: m, env: env, contexts: make(map[uint32]uint32), woken: make(chan struct{})}
	var err error
	if vm.linear, err = newLinearMemory(uint64(m.pages)*PageSize, uint64(m.minPages)*PageSize, m.tables, &m.total); err != nil {
		return nil, fmt.Errorf("make vm: %w", err)
	}
	vm.scope.vm = vm
	vm.out = lineBuffer{level: LogInfo}
	vm.err = lineBuffer{level: LogError}
	// The scope exists before the instance, for a start function in the binary
	// itself, which the engine runs while it instantiates.
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
		vm.allocator = vm.exported(name)
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
	if vm.exported("_initialize") != nil {
		names = []string{"_initialize", "main"}
		if vm.exported("main") == nil {
			names[1] = "__main_void"
		}
	}
	if vm.module.guarded {
		names = append([]string{meter.Start}, names...)
	}
	for _, name := range names {
		fn := vm.exported(name)
		if fn == nil {
			continue
		}
		vm.stack[0], vm.stack[1] = 0, 0
		err := vm.call(ctx, fn, name, 0, vm.stack[:2])
		if e := vm.failed; e != nil && name == "_start" && e.Failure == Exit && e.code == 0 {
			// The C libraries of commands end _start with exit code 0; the
			// instance remains usable.
			vm.failed, err = nil, nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// entry is a function of the guest that the host calls. The engine gives each one a stack of its
// own, which grows and does not shrink.
type entry struct {
	api.Function
	name  string
	stack reflect.Value // field of the engine's function, which shows its size nowhere else; zero: unknown
}

// exported returns a function of the guest that the host may call; nil when
// there is none of that name.
func (vm *VM) exported(name string) *entry {
	fn := vm.instance.ExportedFunction(name)
	if fn == nil {
		return nil
	}
	e := &entry{Function: fn, name: name}
	if v := reflect.ValueOf(fn); v.Kind() == reflect.Pointer && v.Elem().Kind() == reflect.Struct {
		if stack := v.Elem().FieldByName("stack"); stack.Kind() == reflect.Slice {
			e.stack = stack
		}
	}
	return e
}

// trim frees a large stack after a call.
func (vm *VM) trim(e *entry) {
	if e.stack.IsValid() && e.stack.Len() > keepStack {
		*e = *vm.exported(e.name)
	}
}

// call runs a function of the guest. stack holds its parameters and receives
// its result. During the call id is the current and the effective context. The end of ctx
// interrupts the call if the module is guarded.
func (vm *VM) call(ctx context.Context, fn *entry, export string, id uint32, stack []uint64) error {
	if vm.failed != nil || vm.linear.space == nil {
		return ErrPoisoned
	}
	if vm.busy {
		return ErrBusy
	}
	var stop func() bool // nil: ctx is not watched
	if vm.module.guarded && ctx.Done() != nil {
		if ctx.Err() != nil {
			vm.Interrupt()
		}
		stop = context.AfterFunc(ctx, vm.Interrupt)
	}
	vm.scope.Context = ctx
	vm.linear.refused = false
	vm.busy, vm.running, vm.callee, vm.current, vm.effective = true, &vm.scope, fn, id, id
	err := errInterrupted
	if !vm.interrupted.Load() {
		err = fn.CallWithStack(&vm.scope, stack)
	}
	vm.trim(fn)
	printed := ""
	if failed := err != nil || vm.interrupted.Load(); vm.keeps && (failed || len(vm.kept) > 0) {
		printed = vm.printed(failed)
	}
	vm.busy, vm.running, vm.callee, vm.current, vm.effective = false, nil, nil, 0, 0
	vm.scope.Context = nil
	if stop != nil && !stop() && err == nil { // ctx ended too late for the call to notice
		vm.Interrupt()
	}
	if err == nil && vm.interrupted.Load() {
		err = errInterrupted
	}
	if err != nil {
		_ = vm.fail(ctx, export, err)
		vm.failed.Printed = printed
		return vm.failed
	}
	return nil
}

// printed returns the lines that the guest has printed during the running call, if the call has
// failed; else it logs them.
func (vm *VM) printed(failed bool) string {
	if failed {
		vm.flush() // while the call runs: the last lines are kept, too
		return printer{vm}.take()
	}
	printer{vm}.release()
	return ""
}

// errInterrupted is how the engine reports a call that was interrupted.
var errInterrupted error = sys.NewExitError(sys.ExitCodeDeadlineExceeded)

// fail poisons the VM.
func (vm *VM) fail(ctx context.Context, export string, err error) error {
	ended := ctx.Err()
	if ended == nil && vm.interrupted.Load() {
		ended = context.DeadlineExceeded
	}
	vm.failed = callError(export, err, ended, vm.linear.refused)
	vm.flush()
	return vm.failed
}

// Interrupt ends the running call, or the next one, with a Timeout: the guest stops within some
// milliseconds or when its host function returns, and a guest that sleeps wakes. Interrupt poisons the
// VM even when no call runs. It has no effect on a module that is not guarded.
// It is safe for concurrent use.
func (vm *VM) Interrupt() {
	if vm.module.guarded && vm.interrupted.CompareAndSwap(false, true) {
		close(vm.woken)
	}
}

// Interrupted reports that Interrupt was called on a guarded VM: then an Env should give up work that
// takes long. It is safe for concurrent use.
func (vm *VM) Interrupted() bool { return vm.interrupted.Load() }

// Detach makes all proxy-wasm functions of the host return INTERNAL_FAILURE and
// do nothing, until Attach. This includes a call that runs now. A host function
// that is already running completes. Detach is safe for concurrent use.
func (vm *VM) Detach() { vm.detached.Store(true) }

// Attach ends the effect of Detach. Only the owner of the VM calls it, between
// calls.
func (vm *VM) Attach() { vm.detached.Store(false) }

// Err returns the failure that poisoned the VM; nil while the VM is usable.
func (vm *VM) Err() error {
	switch {
	case vm.failed != nil:
		return vm.failed
	case vm.interrupted.Load():
		return vm.fail(context.Background(), "between calls", errInterrupted)
	}
	return nil
}

// MemorySize returns the size of the guest's memory in bytes, 0 after Close.
func (vm *VM) MemorySize() uint32 { return uint32(vm.linear.size) }

// Close ends the VM and frees it with its memory. It runs no code of the guest.
// It may be called more than once, and on a poisoned VM, but not during a call.
// Every call after it returns ErrPoisoned.
func (vm *VM) Close(ctx context.Context) error {
	vm.flush()
	err := vm.instance.Close(ctx)
	vm.linear.release()
	return err
}

// flush logs the guest's last lines that have no end of line.
func (vm *VM) flush() {
	vm.out.flush(printer{vm})
	vm.err.flush(printer{vm})
}

// instantiation is the context of instantiating: the scope plus the values that
// the engine itself looks up.
type instantiation struct{ *callScope }

// Value implements context.Context.
func (i instantiation) Value(key any) any { return i.callScope.Context.Value(key) }
