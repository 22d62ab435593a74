package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"

	"github.com/pdproxy/pdproxy/abi/host/meter"
)

// hostFunction is one function that a guest can import.
type hostFunction struct {
	params string                             // i: i32, I: i64
	void   bool                               // without a result; else it is an i32
	until  phase                              // the last phase in which it may be called
	call   func(vm *VM, args []uint64) Status // of WASI functions, an errno
}

// The modules that guests import from. Old emscripten guests know WASI under
// its older name.
const (
	moduleEnv          = "env"
	moduleWASI         = "wasi_snapshot_preview1"
	moduleWASIUnstable = "wasi_unstable"
)

// hostFunctionNamed finds the function that a guest imports.
func hostFunctionNamed(module, name string) (f hostFunction, ok bool) {
	switch module {
	case moduleEnv:
		f, ok = envFunctions[name]
	case moduleWASI:
		f, ok = wasiFunctions[name]
	case moduleWASIUnstable:
		if f, ok = unstableFunctions[name]; !ok {
			f, ok = wasiFunctions[name]
		}
	}
	return f, ok
}

// link gives the module the host functions that it imports, and no others. A
// function that is not allowed is linked too, but returns an error status.
func (m *Module) link(ctx context.Context, allowed []string) error {
	builders := map[string]wazero.HostModuleBuilder{}
	linked := map[string]bool{}
	var problems []error
	for _, def := range m.compiled.ImportedFunctions() {
		module, name, _ := def.Import()
		if m.guarded && module == meter.ImportModule {
			continue // see linkMeter
		}
		full := module + "." + name
		if linked[full] {
			continue
		}
		linked[full] = true
		m.info.Imports = append(m.info.Imports, full)
		f, ok := hostFunctionNamed(module, name)
		if !ok {
			problems = append(problems, fmt.Errorf("unknown import %s", full))
			continue
		}
		if !f.fits(def) {
			problems = append(problems, fmt.Errorf("import %s has the wrong type %s", full, typeText(def.ParamTypes(), def.ResultTypes())))
			continue
		}
		if !permitted(allowed, module, name) {
			f.call = refusal(module)
		}
		if builders[module] == nil {
			builders[module] = m.runtime.NewHostModuleBuilder(module)
		}
		builders[module].NewFunctionBuilder().
			WithGoModuleFunction(f.bind(module, name, len(def.ResultTypes()) > 0), def.ParamTypes(), def.ResultTypes()).
			Export(name)
	}
	slices.Sort(m.info.Imports)
	if err := errors.Join(problems...); err != nil {
		return fmt.Errorf("load module: %w", err)
	}
	for module, builder := range builders {
		if _, err := builder.Instantiate(ctx); err != nil {
			return fmt.Errorf("link module %s: %w", module, err)
		}
	}
	return nil
}

// permitted reports whether a host function is in the allow-list. The list does
// not apply to the functions of a C library in env.
func permitted(allowed []string, module, name string) bool {
	return allowed == nil || slices.Contains(allowed, "*") || slices.Contains(allowed, name) ||
		module == moduleEnv && !isCapability(module, name)
}

// isCapability reports whether a host function is one of proxy-wasm's.
func isCapability(module, name string) bool {
	return module == moduleEnv && strings.HasPrefix(name, "proxy_")
}

// fits reports whether a guest's import has the function's type. The import may
// lack the result: for some 0.1.0 functions the specification has no result,
// while hosts have one.
func (f hostFunction) fits(def api.FunctionDefinition) bool {
	results := def.ResultTypes()
	return sameTypes(def.ParamTypes(), valueTypes(f.params)) &&
		(len(results) == 0 || !f.void && sameTypes(results, []api.ValueType{api.ValueTypeI32}))
}

// bind makes the function callable by the engine.
func (f hostFunction) bind(module, name string, result bool) api.GoModuleFunc {
	capability := isCapability(module, name)
	return func(ctx context.Context, mod api.Module, stack []uint64) {
		vm := vmOf(ctx, mod)
		if vm.phase > f.until {
			panic(&forbiddenCall{name})
		}
		answer := InternalFailure
		if !capability || !vm.detached.Load() {
			answer = f.call(vm, stack)
		}
		if vm.interrupted.Load() { // perhaps the function gave up its work
			panic(errInterrupted)
		}
		if result {
			stack[0] = uint64(answer)
		}
	}
}

// vmOf returns the VM that is calling.
func vmOf(ctx context.Context, mod api.Module) *VM {
	if scope, ok := ctx.(*callScope); ok {
		return scope.vm
	}
	// The binary's own start function runs before NewVM has the instance.
	vm := ctx.(instantiation).vm
	vm.memory = mod.Memory()
	return vm
}

// refusal returns the body of a function that is not allowed: it only returns
// an error status.
func refusal(module string) func(*VM, []uint64) Status {
	answer := InternalFailure
	if module != moduleEnv {
		answer = errnoNotCapable
	}
	return func(*VM, []uint64) Status { return answer }
}

// valueTypes spells out the parameters of a hostFunction.
func valueTypes(params string) []api.ValueType {
	types := make([]api.ValueType, len(params))
	for i, c := range params {
		types[i] = api.ValueTypeI32
		if c == 'I' {
			types[i] = api.ValueTypeI64
		}
	}
	return types
}

// sameTypes compares lists of types.
func sameTypes(a, b []api.ValueType) bool { return slices.Equal(a, b) }

// typeText writes a function type for an error.
func typeText(params, results []api.ValueType) string {
	list := func(types []api.ValueType) string {
		names := make([]string, len(types))
		for i, t := range types {
			names[i] = api.ValueTypeName(t)
		}
		return "(" + strings.Join(names, ", ") + ")"
	}
	return list(params) + " -> " + list(results)
}
