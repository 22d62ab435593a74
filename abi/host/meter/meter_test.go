package meter

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// machine runs a module without imports of its own.
type machine struct {
	runtime  wazero.Runtime
	instance api.Module
	pauses   int // that are left
}

// errPauses ends a call that pauses too often.
var errPauses = errors.New("too many pauses")

// run starts a module, with the functions of the meter. It returns nil if the module cannot start.
func run(t testing.TB, wasm []byte) *machine {
	t.Helper()
	ctx := t.Context()
	m := &machine{runtime: newRuntime(ctx)}
	t.Cleanup(func() { _ = m.runtime.Close(context.Background()) })
	_, err := m.runtime.NewHostModuleBuilder(ImportModule).
		NewFunctionBuilder().WithFunc(func() int32 {
		if m.pauses--; m.pauses < 0 {
			panic(errPauses)
		}
		return Budget
	}).Export(Pause).
		NewFunctionBuilder().WithFunc(func(entries, size, limit uint32) uint32 {
		if uint64(size)+uint64(entries) > 10_000 {
			return 1<<32 - 1
		}
		return entries
	}).Export(Room).Instantiate(ctx)
	if err != nil {
		t.Fatal(err)
	}
	m.pauses = 1000
	m.instance, err = m.runtime.InstantiateWithConfig(ctx, wasm, wazero.NewModuleConfig().WithName("").WithStartFunctions())
	if err != nil {
		m.instance = nil
	}
	return m
}

func newRuntime(ctx context.Context) wazero.Runtime {
	return wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithCoreFeatures(api.CoreFeaturesV2).WithMemoryLimitPages(100))
}

// call calls an export and returns its results, or its error without the stack.
func (m *machine) call(name string, args ...uint64) (results []uint64, trap string) {
	results, err := m.instance.ExportedFunction(name).Call(context.Background(), args...)
	if err != nil {
		trap, _, _ = strings.Cut(err.Error(), "\n")
		if errors.Is(err, errPauses) {
			trap = errPauses.Error()
		}
	}
	return results, trap
}

// memory returns the content of the exported memory.
func (m *machine) memory() []byte {
	memory := m.instance.Memory()
	if memory == nil {
		return nil
	}
	view, _ := memory.Read(0, memory.Size())
	return view
}

// metered returns the metered form of a module.
func metered(t testing.TB, wasm []byte) []byte {
	t.Helper()
	m, err := Read(wasm)
	if err != nil {
		t.Fatal(err)
	}
	return m.Meter()
}

// build assembles a module with three pages of types: () -> (), (i32, i32, i32) -> () and (i32) -> i32.
func build(sections ...[]byte) []byte {
	types := appendSection(nil, sectionType, []byte{3, 0x60, 0, 0, 0x60, 3, 0x7f, 0x7f, 0x7f, 0, 0x60, 1, 0x7f, 1, 0x7f})
	return slices.Concat(append([][]byte{preamble, types}, sections...)...)
}

// body encodes a function without locals.
func body(code ...byte) []byte {
	code = append([]byte{0}, append(code, opEnd)...)
	return append(appendUint(nil, len(code)), code...)
}

// bulkModule exports fill and copy, which execute one instruction on a memory of 80 pages.
func bulkModule() []byte {
	return build(
		appendSection(nil, sectionFunction, []byte{2, 1, 1}),
		appendSection(nil, sectionMemory, []byte{1, 0, 80}),
		appendSection(nil, sectionExport, slices.Concat([]byte{3}, appendName(nil, "fill"), []byte{0, 0},
			appendName(nil, "copy"), []byte{0, 1}, appendName(nil, "memory"), []byte{2, 0})),
		appendSection(nil, sectionCode, slices.Concat([]byte{2},
			body(opLocalGet, 0, opLocalGet, 1, opLocalGet, 2, prefixMisc, miscMemoryFill, 0),
			body(opLocalGet, 0, opLocalGet, 1, opLocalGet, 2, prefixMisc, miscMemoryCopy, 0, 0))),
	)
}

// TestBulk: memory.fill and memory.copy in pieces write the same as at once, also where source and
// target overlap, and write nothing where they fail.
func TestBulk(t *testing.T) {
	const size = 80 << 16
	plain, guarded := run(t, bulkModule()), run(t, metered(t, bulkModule()))
	random := rand.New(rand.NewPCG(1, 2))
	for _, m := range []*machine{plain, guarded} {
		view := m.memory()
		for i := range view {
			view[i] = byte(i*7 + i>>11)
		}
	}
	place := func() uint64 {
		near := []uint64{0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 3*chunk + 7, size - chunk, size - 1, size, size + 1, 1<<32 - 1}
		if random.IntN(3) == 0 {
			return random.Uint64N(size)
		}
		return near[random.IntN(len(near))]
	}
	for range 300 {
		name, args := "copy", []uint64{place(), place(), place()}
		if random.IntN(3) == 0 {
			name = "fill"
		}
		_, want := plain.call(name, args...)
		guarded.pauses = 1000
		if _, got := guarded.call(name, args...); got != want {
			t.Fatalf("%s %v: %q, want %q", name, args, got, want)
		}
		if !bytes.Equal(plain.memory(), guarded.memory()) {
			t.Fatalf("%s %v: the memories differ", name, args)
		}
	}
}

// TestPausesAreRegular: the number of pauses follows the instructions and bytes, whatever their form.
func TestPausesAreRegular(t *testing.T) {
	tests := []struct {
		name        string
		code        []byte
		least, most int
	}{
		{"nothing", nil, 0, 1},
		{"a loop of 100,000", []byte{ // param 0 is the count
			opLoop, typeEmpty, opLocalGet, 0, opI32Const, 1, opI32Sub, opLocalSet, 0, opLocalGet, 0, opBrIf, 0, opEnd}, 1, 4},
		{"fill of 5 MiB", []byte{opI32Const, 0, opI32Const, 1, opI32Const, 0x80, 0x80, 0xc0, 0x02, prefixMisc, miscMemoryFill, 0}, 1, 3},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			wasm := build(
				appendSection(nil, sectionFunction, []byte{1, 2}),
				appendSection(nil, sectionMemory, []byte{1, 0, 80}),
				appendSection(nil, sectionExport, slices.Concat([]byte{1}, appendName(nil, "f"), []byte{0, 0})),
				appendSection(nil, sectionCode, append([]byte{1}, body(append(tt.code, opI32Const, 0)...)...)))
			m := run(t, metered(t, wasm))
			before := m.pauses
			if _, trap := m.call("f", 100_000); trap != "" {
				t.Fatal(trap)
			}
			if n := before - m.pauses; n < tt.least || n > tt.most {
				t.Errorf("%d pauses", n)
			}
		})
	}
}

// TestNames: functions keep their names, and the debug information of compilers is gone.
func TestNames(t *testing.T) {
	for path, wasm := range guests(t) {
		if !strings.Contains(path, "examples") {
			continue
		}
		ctx := t.Context()
		runtime := newRuntime(ctx)
		defer func() { _ = runtime.Close(ctx) }()
		before, err := runtime.CompileModule(ctx, wasm)
		if err != nil {
			t.Fatal(err)
		}
		changed := metered(t, wasm)
		after, err := runtime.CompileModule(ctx, changed)
		if err != nil {
			t.Fatal(err)
		}
		for name, f := range before.ExportedFunctions() {
			if got := after.ExportedFunctions()[name]; got == nil || got.Name() != f.Name() {
				t.Errorf("%s: function %s has the name %q, want %q", path, name, got.Name(), f.Name())
			}
		}
		if bytes.Contains(changed, []byte(".debug_")) {
			t.Errorf("%s: debug information is left", path)
		}
	}
}

// FuzzMeter: a module that the engine compiles has a metered form, unless Read refuses it, which
// compiles too, and which computes the same.
func FuzzMeter(f *testing.F) {
	for _, wasm := range guests(f) {
		if len(wasm) < 64<<10 {
			f.Add(wasm)
		}
	}
	f.Add(bulkModule())
	f.Fuzz(func(t *testing.T, wasm []byte) {
		m, err := Read(wasm)
		if err != nil {
			return
		}
		locals := uint64(0)
		for _, fn := range m.Functions {
			locals += fn.Locals
		}
		for _, table := range m.Tables {
			locals += uint64(table.Min)
		}
		if locals > 10_000 {
			return
		}
		ctx := t.Context()
		runtime := newRuntime(ctx)
		defer func() { _ = runtime.Close(ctx) }()
		_, before := runtime.CompileModule(ctx, wasm)
		changed := m.Meter()
		_, after := runtime.CompileModule(ctx, changed)
		if before == nil && after != nil {
			t.Fatalf("the engine refuses the metered form: %v", after)
		}
		// The specification says that a custom section cannot make a module invalid.
		if before != nil && after == nil && !strings.Contains(before.Error(), "section custom") {
			t.Fatalf("the engine accepts the metered form only: %v", before)
		}
		if before != nil || m.Imports > 0 || m.start >= 0 {
			return
		}
		compare(t, wasm, changed)
	})
}

// compare calls the exports of a module and of its metered form, the latter first, which ends.
func compare(t *testing.T, wasm, changed []byte) {
	guarded := run(t, changed)
	if guarded.instance == nil {
		return
	}
	plain := run(t, wasm)
	if plain.instance == nil {
		t.Fatal("only the metered form starts")
	}
	definitions := guarded.instance.ExportedFunctionDefinitions()
	for i, name := range slices.Sorted(func(yield func(string) bool) {
		for name := range definitions {
			if !yield(name) {
				return
			}
		}
	}) {
		if i == 8 {
			return
		}
		args := make([]uint64, len(definitions[name].ParamTypes()))
		for i := range args {
			args[i] = uint64(i + 1)
		}
		guarded.pauses = 20
		got, trap := guarded.call(name, args...)
		if trap == errPauses.Error() || strings.Contains(trap, "stack overflow") {
			return
		}
		want, wantTrap := plain.call(name, args...)
		if !slices.Equal(got, want) || trap != wantTrap {
			t.Fatalf("%s: %v %q, want %v %q", name, got, trap, want, wantTrap)
		}
		if !bytes.Equal(guarded.memory(), plain.memory()) {
			t.Fatalf("%s: the memories differ", name)
		}
	}
}
