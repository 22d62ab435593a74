package host

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// fibonacci is the body of a function that calls itself twice through again, without a loop.
func fibonacci(again []byte) []byte {
	less := func(n int32) []byte { return join(local(0), i32(n), subtract, again) }
	return join(local(0), i32(2), lessThan, []byte{0x04, 0x7f}, local(0), []byte{0x05}, less(1), less(2), add, endBlock)
}

var (
	subtract = []byte{0x6b}
	lessThan = []byte{0x48}
	multiply = []byte{0x6c}
	fill     = []byte{0xfc, 0x0b, 0}
	copyOf   = []byte{0xfc, 0x0a, 0, 0}
	fillRefs = []byte{0xfc, 0x11, 0}
	copyRefs = []byte{0xfc, 0x0e, 0, 0}
	growRefs = []byte{0xfc, 0x0f, 0}
	nullRef  = []byte{0xd0, 0x70}
)

// hostile are guests that use much time without a loop. Each one gives the body of a callback.
var hostile = map[string]func(a *assembler) [][]byte{
	"recursion": func(a *assembler) [][]byte {
		return [][]byte{i32(70), call(a.fn("", "i", "i", fibonacci(call(a.next())))), drop}
	},
	"recursion through a table": func(a *assembler) [][]byte {
		again := join(i32(0), a.callTable("i", "i"))
		f := a.fn("", "i", "i", fibonacci(again))
		a.table(1, f)
		return [][]byte{i32(70), call(f), drop}
	},
	"mutual recursion": func(a *assembler) [][]byte {
		first := a.next()
		a.fn("", "i", "i", fibonacci(call(first+1)))
		a.fn("", "i", "i", fibonacci(call(first)))
		return [][]byte{i32(70), call(first), drop}
	},
	"calls without a cycle": func(a *assembler) [][]byte {
		f := a.fn("", "", "")
		for range 60 {
			f = a.fn("", "", "", call(f), call(f))
		}
		return [][]byte{call(f)}
	},
	"calls without a cycle of long leaves": func(a *assembler) [][]byte {
		f := a.fn("", "", "", bytes.Repeat(join(i32(1), drop), 100))
		for range 50 {
			f = a.fn("", "", "", call(f), call(f))
		}
		return [][]byte{call(f)}
	},
	"filled memory": func(a *assembler) [][]byte {
		f := a.fn("", "", "", bytes.Repeat(join(i32(0), i32(1), i32(16*PageSize), fill), 2000))
		return [][]byte{bytes.Repeat(call(f), 10)}
	},
	"copied memory": func(a *assembler) [][]byte {
		f := a.fn("", "", "", bytes.Repeat(join(i32(0), i32(1), i32(16*PageSize-1), copyOf), 2000))
		return [][]byte{bytes.Repeat(call(f), 10)}
	},
	"filled table": func(a *assembler) [][]byte {
		a.table(400_000)
		return [][]byte{bytes.Repeat(join(i32(0), nullRef, i32(400_000), fillRefs), 2000)}
	},
	"copied table": func(a *assembler) [][]byte {
		a.table(400_000)
		return [][]byte{bytes.Repeat(join(i32(0), i32(1), i32(399_999), copyRefs), 2000)}
	},
	"a long loop": func(*assembler) [][]byte {
		return [][]byte{{0x03, 0x40}, bytes.Repeat(join(local(0), i32(3), multiply, drop), 5000), {0x0c, 0}, endBlock}
	},
	"calls of a long function": func(a *assembler) [][]byte {
		f := a.fn("", "", "", bytes.Repeat(join(local(0), i32(3), multiply, drop), 40_000)) // 200 KB
		return [][]byte{{0x03, 0x40}, call(f), {0x0c, 0}, endBlock}
	},
	"floats of little precision": func(*assembler) [][]byte { // f64.const of the least number, f64.mul, f64.sqrt, f64.div
		least := []byte{0x44, 1, 0, 0, 0, 0, 0, 0, 0}
		return [][]byte{{0x03, 0x40}, least, bytes.Repeat(join(least, []byte{0xa2, 0x9f}, least, []byte{0xa3}), 5000), drop, {0x0c, 0}, endBlock}
	},
	"memory that does not grow": func(*assembler) [][]byte {
		return [][]byte{{0x03, 0x40}, bytes.Repeat(join(i32(1), []byte{0x40, 0}, drop), 1000), {0x0c, 0}, endBlock}
	},
	"grown tables": func(a *assembler) [][]byte {
		a.table(1)
		return [][]byte{{0x03, 0x40}, bytes.Repeat(join(nullRef, i32(1), growRefs, drop), 100), {0x0c, 0}, endBlock}
	},
	"host functions": func(*assembler) [][]byte { // see TestHostileGuestsEnd: import 0 is random_get
		return [][]byte{bytes.Repeat(join(i32(0), i32(PageSize), call(0), drop), 20_000)}
	},
}

// next is the index of the next function.
func (a *assembler) next() int { return a.importCount + len(a.funcs) }

// hostileGuest is a module whose export calls a hostile body: a callback, the allocator, a function
// that the start runs, or the start function.
func hostileGuest(body func(*assembler) [][]byte, where string) []byte {
	a := newAssembler()
	a.memoryMin = 16
	a.importFunc("wasi_snapshot_preview1", "random_get", "ii", "i")
	read := a.importFunc("env", "proxy_get_buffer_bytes", "iiiii", "i")
	code := join(body(a)...)
	a.fn("proxy_abi_version_0_2_1", "", "")
	a.fn("pdproxy_v1_scratch", "i", "i", i32(4096))
	switch where {
	case "start":
		a.startFunc = a.fn("", "", "", code)
	case "_initialize":
		a.fn(where, "", "", code)
	case "malloc":
		a.fn(where, "i", "i", code, i32(1024))
		a.fn("proxy_on_tick", "i", "", i32(7), i32(0), i32(100), i32(64), i32(68), call(read), drop)
		return a.bytes()
	case "proxy_on_tick":
		a.fn(where, "i", "", code)
	case "pdproxy_v1_on_mint":
		a.fn(where, "ii", "I", code, i64(1))
	}
	a.fn("malloc", "i", "i", i32(1024))
	return a.bytes()
}

// endsInTime calls a guest and collects garbage meanwhile, for which the guest has to stop.
func endsInTime(t *testing.T, guest func(ctx context.Context) error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- guest(ctx) }()
	for {
		select {
		case err := <-ended:
			return err
		default:
			runtime.GC()
		}
	}
}

// TestHostileGuestsEnd: whatever a guarded guest does, its call ends after the end of the context,
// and the process can collect garbage before.
func TestHostileGuestsEnd(t *testing.T) {
	for name, body := range hostile {
		for _, where := range []string{"proxy_on_tick", "malloc", "_initialize", "start", "pdproxy_v1_on_mint"} {
			if where != "proxy_on_tick" && name != "recursion" && name != "filled memory" {
				continue
			}
			t.Run(name+" in "+where, func(t *testing.T) {
				m := load(t, hostileGuest(body, where), LoadOptions{Guarded: true, MemoryPages: 200})
				w := newWorld()
				w.config = "abc"
				err := endsInTime(t, func(ctx context.Context) error {
					vm, err := m.NewVM(ctx, w)
					if err != nil {
						return err
					}
					defer func() { _ = vm.Close(context.Background()) }()
					if hook, ok := vm.Hook("pdproxy_v1_on_mint"); ok {
						_, err := hook.Call(ctx, 0, 0)
						return err
					}
					if err := vm.ContextCreate(ctx, 1, 0); err != nil {
						return err
					}
					return vm.Tick(ctx, 1)
				})
				if failure := (*Error)(nil); !errors.As(err, &failure) || failure.Failure != Timeout {
					t.Errorf("got %v, want a timeout", err)
				}
			})
		}
	}
}

// TestTablesCount: tables are inside the limit of memory, from their start and when they grow.
func TestTablesCount(t *testing.T) {
	grow := func(entries int32) func(*assembler) {
		return func(a *assembler) {
			a.table(1)
			a.fn("proxy_on_tick", "i", "", nullRef, i32(entries), growRefs, tee(1), i32(-1), notEqual,
				[]byte{0x45, 0x04, 0x40}, unreachable, endBlock) // if it is -1, unreachable
		}
	}
	tables := func(n int, least uint32) func(*assembler) {
		return func(a *assembler) {
			for range n {
				a.table(least)
			}
		}
	}
	tests := []struct {
		name  string
		build func(*assembler)
		load  string // error of Load
		tick  Failure
	}{
		{"small", tables(3, 1000), "", 0},
		{"large", tables(1, 100_000), "bytes of memory and tables at least", 0},
		{"too large at all", tables(1, maxTable+1), "table 0 has 10000001 entries, the limit is 10000000", 0},
		{"many", tables(10, 134217728), "table 0 has 134217728 entries", 0},
		{"many small ones", tables(1000, 1000), "bytes of memory and tables at least", 0},
		{"grows a little", grow(1000), "", 0},
		{"grows much", grow(100_000), "", OutOfMemory},
		{"grows to the end", grow(0x7ffffff0), "", OutOfMemory},
		{"grows beyond the end", grow(-16), "", OutOfMemory},
		{"many globals", func(a *assembler) {
			for range 20_000 {
				a.globals = append(a.globals, join([]byte{0x7f, 1}, i32(0), endBlock))
			}
		}, "bytes of memory and tables at least", 0},
		{"many elements", func(a *assembler) {
			a.table(1)
			a.elements = append(a.elements, join([]byte{1, 0}, uleb(100_000), make([]byte, 100_000)))
		}, "bytes of memory and tables at least", 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := newAssembler().marker("0_2_1")
			tt.build(a)
			m, err := Load(t.Context(), a.bytes(), LoadOptions{Guarded: true, MemoryPages: 16})
			if tt.load != "" {
				if err == nil || !strings.Contains(err.Error(), tt.load) {
					t.Fatalf("got %v, want %q", err, tt.load)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = m.Close(context.Background()) }()
			failure := (*Error)(nil)
			vm := start(t, m, newWorld())
			if err := vm.Tick(t.Context(), 1); tt.tick == 0 && err != nil || tt.tick != 0 && (!errors.As(err, &failure) || failure.Failure != tt.tick) {
				t.Errorf("got %v, want %v", err, tt.tick)
			}
			if err := vm.Close(t.Context()); err != nil || m.total.used.Load() != 0 {
				t.Errorf("%v, %d bytes are left", err, m.total.used.Load())
			}
		})
	}
}

// TestTotalCountsTables: a table that grows takes from the memory of all VMs.
func TestTotalCountsTables(t *testing.T) {
	a := newAssembler().marker("0_2_1")
	a.table(1)
	a.fn("proxy_on_tick", "i", "", i32(512), nullRef, i32(10_000), growRefs, store32)
	m := load(t, a.bytes(), LoadOptions{Guarded: true, MemoryPages: 16, TotalMemory: 2*PageSize + 200_000})
	first, second := start(t, m, newWorld()), start(t, m, newWorld())
	for i, vm := range []*VM{first, second} {
		if err := vm.Tick(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		view, _ := vm.View(512, 4)
		if got, want := int32(u32(view, 0)), []int32{1, -1}[i]; got != want {
			t.Errorf("vm %d: table.grow returned %d, want %d", i, got, want)
		}
	}
}

// deep are functions that call themselves for ever and keep much on the stack.
var deep = map[string]func(a *assembler) []byte{
	"nothing": func(a *assembler) []byte { return join(local(0), call(a.next())) },
	"many values": func(a *assembler) []byte {
		var code []byte
		for i := range 100 {
			code = join(code, local(0), i32(int32(i+3)), multiply)
		}
		return join(code, local(0), call(a.next()), bytes.Repeat(add, 100))
	},
	"variables of nested loops": func(a *assembler) []byte {
		// Each loop may have its own value of each variable.
		const depth = 30
		var code, set, sum []byte
		for i := range 100 {
			v := byte(1 + i)
			set = join(set, []byte{0x20, v, 0x20, 0, 0x6a, 0x21, v})
			sum = join(sum, []byte{0x20, v, 0x6a})
		}
		for range depth {
			code = join(code, []byte{0x03, 0x40}, set)
		}
		code = join(code, local(0), call(a.next()), []byte{0x21, 0})
		for range depth {
			code = join(code, set, []byte{0x20, 0, 0x45, 0x0d, 0}, endBlock)
		}
		return join(code, local(0), sum)
	},
	"a value of many blocks": func(a *assembler) []byte {
		// Each block gives a value that is live during the call.
		var code []byte
		for i := range 40 {
			code = join(code, local(0), []byte{0x04, 0x7f}, local(0), i32(int32(i)), multiply, []byte{0x05}, i32(int32(i)), endBlock)
		}
		return join(code, local(0), call(a.next()), bytes.Repeat(add, 40))
	},
}

// TestStackIsBounded: endless recursion ends before the stack needs much memory.
func TestStackIsBounded(t *testing.T) {
	for name, body := range deep {
		t.Run(name, func(t *testing.T) {
			m := load(t, failing("0_2_1", func(a *assembler) [][]byte {
				f := a.locals(120).fn("", "i", "i", body(a))
				return [][]byte{i32(5), call(f), drop}
			}), LoadOptions{Guarded: true, MemoryPages: 16})
			vm := start(t, m, newWorld())
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			err := vm.Tick(t.Context(), 1)
			runtime.ReadMemStats(&after)
			if failure := (*Error)(nil); !errors.As(err, &failure) || failure.Failure != Trap || failure.Reason != "stack overflow" {
				t.Errorf("got %v, want a stack overflow", err)
			} else if strings.Contains(failure.Stack, "(meter)") {
				t.Errorf("the stack shows the meter: %s", failure.Stack)
			}
			// Each doubling allocates a new stack, so that the largest is about half of the sum.
			if size := after.TotalAlloc - before.TotalAlloc; size < maxStack || size > 8*maxStack {
				t.Errorf("the stacks had %d bytes together", size)
			}
			if size := vm.callbacks[OnTick].stack.Len(); size > keepStack {
				t.Errorf("%d bytes of stack are left", size)
			}
		})
	}
}

// TestDepth: a guest may recurse as deep as half of the limit of its stack.
func TestDepth(t *testing.T) {
	a := newAssembler().marker("0_2_1")
	f := a.next()
	a.fn("", "i", "i", local(0), []byte{0x04, 0x7f}, local(0), i32(1), subtract, call(f), i32(1), add, []byte{0x05}, i32(0), endBlock)
	a.fn("proxy_on_tick", "i", "", i32(512), i32(15_000), call(f), store32)
	vm := start(t, load(t, a.bytes(), LoadOptions{Guarded: true}), newWorld())
	for range 3 {
		if err := vm.Tick(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	if view, _ := vm.View(512, 4); u32(view, 0) != 15_000 {
		t.Errorf("got %d", u32(view, 0))
	}
}

// TestMeterIsOutOfReach: a guest cannot name the variable, the functions and the types that the
// meter adds behind its own.
func TestMeterIsOutOfReach(t *testing.T) {
	tests := []struct {
		name string
		body func(a *assembler) [][]byte
		want string
	}{
		{"variable", func(*assembler) [][]byte { return [][]byte{i32(1), {0x24, 0}} }, "global 0 does not exist"},
		{"function", func(a *assembler) [][]byte { return [][]byte{call(a.next() + 4)} }, "function 4 does not exist"},
		{"type", func(a *assembler) [][]byte {
			a.table(1)
			return [][]byte{i32(0), {0x11}, uleb(uint64(len(a.types) + 20)), {0}}
		}, "does not exist"},
		{"import", func(a *assembler) [][]byte {
			a.importFunc("(meter)", "pause", "", "i")
			return nil
		}, "the name of the module (meter) is reserved"},
		{"tail call", func(*assembler) [][]byte { return [][]byte{{0x12, 0}} }, "unknown instruction 0x12"},
		{"tail call through a table", func(*assembler) [][]byte { return [][]byte{{0x13, 0, 0}} }, "unknown instruction 0x13"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Load(t.Context(), failing("0_2_1", tt.body), LoadOptions{Guarded: true, MemoryPages: 16})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// TestGuardedKeepsTraps: a guarded module fails as the same module without guards, with the same
// functions in its stack.
func TestGuardedKeepsTraps(t *testing.T) {
	a := newAssembler()
	a.marker("0_2_1")
	inner := a.fn("inner", "", "", i32(0), i32(1), i32(1), i32(0), []byte{0x6d}, drop, drop, drop) // i32.div_s by 0
	a.fn("proxy_on_tick", "i", "", call(inner))
	var got []*Error
	for _, guarded := range []bool{false, true} {
		err := start(t, load(t, a.bytes(), LoadOptions{Guarded: guarded}), newWorld()).Tick(t.Context(), 1)
		failure := (*Error)(nil)
		if !errors.As(err, &failure) {
			t.Fatal(err)
		}
		got = append(got, failure)
	}
	names := func(stack string) (list []string) {
		for _, line := range strings.Split(stack, "\n") {
			_, after, _ := strings.Cut(line, "(")
			list = append(list, after)
		}
		return list
	}
	if got[0].Reason != got[1].Reason || !slices.Equal(names(got[0].Stack), names(got[1].Stack)) {
		t.Errorf("%v\n%s\nguarded: %v\n%s", got[0], got[0].Stack, got[1], got[1].Stack)
	}
}
