package host

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"github.com/tetratelabs/wazero/sys"
)

// gates makes the gates of a guarded module's VMs. A gate is an instance of a
// small module that imports every function of the guest that the host calls, and
// exports a function of the same type that calls it. The host enters a guarded
// guest through the gate only.
//
// The engine starts a goroutine and a channel for each call into a guarded module, to
// watch the context of the call. The gate's module is not guarded, so calls through the
// gate have no such goroutine. The guest's loops check whether the called instance has
// been closed. The called instance is the gate. So any goroutine can interrupt the guest
// at its next loop by closing the gate.
//
// The two modules have different runtimes, because a runtime guards all of its modules or
// none. Each runtime numbers the types of functions in the order in which it meets them,
// and the engine links functions by these numbers. So both runtimes first compile the
// same list of types. If the numbers still differed, the engine could not link the
// modules, and no VM would start.
type gates struct {
	runtime  wazero.Runtime
	compiled wazero.CompiledModule
}

// gateTypes are the types of all functions of guests that the host calls, in the
// notation of hostFunction: parameters, then results.
var gateTypes = []struct{ params, results string }{
	{"", ""}, {"i", ""}, {"ii", ""}, {"iii", ""}, {"iiii", ""}, {"iiiii", ""},
	{"", "i"}, {"i", "i"}, {"ii", "i"}, {"iii", "i"},
	{"", "I"}, {"ii", "I"},
}

// gateType returns the index of a function's type in gateTypes, or -1. The host
// does not call a function whose type is not in gateTypes.
func gateType(def api.FunctionDefinition) int {
	for i, t := range gateTypes {
		if sameTypes(def.ParamTypes(), valueTypes(t.params)) && sameTypes(def.ResultTypes(), valueTypes(t.results)) {
			return i
		}
	}
	return -1
}

// gateGuest is the name of the guest in the gate's imports.
const gateGuest = "guest"

// newGates compiles the gate for a guest with these exports.
func newGates(ctx context.Context, exports map[string]api.FunctionDefinition) (*gates, error) {
	g := &gates{runtime: wazero.NewRuntime(ctx)}
	var err error
	if g.compiled, err = g.runtime.CompileModule(ctx, gateBinary(exports)); err != nil {
		_ = g.runtime.Close(ctx)
		return nil, fmt.Errorf("compile gate: %w", err)
	}
	return g, nil
}

// open makes the gate of one instance of the guest.
func (g *gates) open(ctx context.Context, guest api.Module) (api.Module, error) {
	ctx = experimental.WithImportResolver(ctx, func(name string) api.Module {
		if name == gateGuest {
			return guest
		}
		return nil
	})
	return g.runtime.InstantiateModule(ctx, g.compiled, wazero.NewModuleConfig().WithName("").WithStartFunctions())
}

// closeGate closes a gate. This interrupts the call that runs through it.
func closeGate(gate api.Module) {
	// The gate has no resources whose release could fail.
	_ = gate.CloseWithExitCode(context.Background(), sys.ExitCodeDeadlineExceeded)
}

// The sections of a module, and the encodings of types and instructions that the
// gate needs (WebAssembly core specification, chapter 5).
const (
	sectionType     = 1
	sectionImport   = 2
	sectionFunction = 3
	sectionExport   = 7
	sectionCode     = 10

	typeI32, typeI64, typeFunc   = 0x7f, 0x7e, 0x60
	opLocalGet, opCall, opEndFun = 0x20, 0x10, 0x0b
)

// gateBinary returns the gate's module; without exports it contains only the
// types.
func gateBinary(exports map[string]api.FunctionDefinition) []byte {
	var types, imports, functions, exported, code [][]byte
	for _, t := range gateTypes {
		types = append(types, slices.Concat([]byte{typeFunc}, gateTypeList(t.params), gateTypeList(t.results)))
	}
	var names []string
	for _, name := range slices.Sorted(maps.Keys(exports)) {
		if gateType(exports[name]) >= 0 {
			names = append(names, name)
		}
	}
	for i, name := range names {
		kind := gateType(exports[name])
		imports = append(imports, slices.Concat(wasmName(gateGuest), wasmName(name), []byte{0}, uvarint(kind)))
		functions = append(functions, uvarint(kind))
		exported = append(exported, slices.Concat(wasmName(name), []byte{0}, uvarint(len(names)+i)))
		body := []byte{0} // no locals
		for p := range gateTypes[kind].params {
			body = append(body, opLocalGet, byte(p))
		}
		body = append(append(append(body, opCall), uvarint(i)...), opEndFun)
		code = append(code, append(uvarint(len(body)), body...))
	}
	return slices.Concat([]byte("\x00asm\x01\x00\x00\x00"),
		section(sectionType, types), section(sectionImport, imports), section(sectionFunction, functions),
		section(sectionExport, exported), section(sectionCode, code))
}

// section encodes a section that is a list.
func section(id byte, items [][]byte) []byte {
	body := append(uvarint(len(items)), slices.Concat(items...)...)
	return slices.Concat([]byte{id}, uvarint(len(body)), body)
}

// gateTypeList encodes a list of value types.
func gateTypeList(types string) []byte {
	return append(uvarint(len(types)), strings.NewReplacer("i", string(rune(typeI32)), "I", string(rune(typeI64))).Replace(types)...)
}

// wasmName encodes a name with its length.
func wasmName(name string) []byte { return append(uvarint(len(name)), name...) }

func uvarint(n int) []byte { return binary.AppendUvarint(nil, uint64(n)) }
