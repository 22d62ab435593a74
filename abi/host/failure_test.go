package host

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

// failing is a module whose tick runs the given instructions. Its delete
// callback must never run afterwards.
func failing(version string, imports func(a *assembler) [][]byte) []byte {
	a := newAssembler()
	body := imports(a)
	a.marker(version)
	a.fn("proxy_on_tick", "i", "", body...)
	a.fn("proxy_on_delete", "i", "", i32(512), i32(1), store32)
	return a.bytes()
}

func TestFailuresPoison(t *testing.T) {
	body := func(code ...[]byte) func(*assembler) [][]byte {
		return func(*assembler) [][]byte { return code }
	}
	// grow requests 16 pages and traps if they are refused.
	grow := join([]byte{0x03, 0x40}, i32(1), growMemory, i32(-1), notEqual, branchIf, endBlock, unreachable)
	tests := []struct {
		name    string
		body    func(*assembler) [][]byte
		failure Failure
		reason  string
	}{
		{"unreachable", body(unreachable), Trap, "unreachable"},
		{"bad address", body(i32(-4), load32, drop), Trap, "out of bounds memory access"},
		{"recursion", func(a *assembler) [][]byte { return [][]byte{local(0), call(a.importCount + 2)} }, Trap, "stack overflow"},
		{"exit", func(a *assembler) [][]byte {
			return [][]byte{i32(3), call(a.importFunc("wasi_snapshot_preview1", "proc_exit", "i", ""))}
		}, Exit, "exit code 3"},
		{"memory bomb", body(grow), OutOfMemory, "memory limit reached, then unreachable"},
		{"endless loop", body(forever), Timeout, "context deadline exceeded"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := load(t, failing("0_2_1", tt.body), LoadOptions{Guarded: true, MemoryPages: 16})
			w := newWorld()
			vm := start(t, m, w)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			if tt.failure != Timeout {
				cancel()
				ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
			}
			defer cancel()
			err := vm.Tick(ctx, 1)
			failure := (*Error)(nil)
			if !errors.As(err, &failure) || failure.Failure != tt.failure || failure.Reason != tt.reason {
				t.Fatalf("got %v, want %v: %s", err, tt.failure, tt.reason)
			}
			if got, want := err.Error(), "call proxy_on_tick: "+tt.failure.String()+": "+tt.reason; got != want {
				t.Errorf("got %q, want %q", got, want)
			}
			if (tt.failure == Timeout) != errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("errors.Is(%v, context.DeadlineExceeded) is wrong", err)
			}
			if !errors.Is(vm.Err(), err) {
				t.Errorf("Err is %v", vm.Err())
			}
			// No further call enters the VM.
			if err := vm.Delete(t.Context(), 1); !errors.Is(err, ErrPoisoned) {
				t.Errorf("delete: %v", err)
			}
			if err := vm.ContextCreate(t.Context(), 2, 0); !errors.Is(err, ErrPoisoned) {
				t.Errorf("create: %v", err)
			}
			if _, _, err := vm.Scratch(t.Context(), 8); !errors.Is(err, ErrPoisoned) {
				t.Errorf("scratch: %v", err)
			}
			if view, ok := vm.View(512, 1); ok && view[0] != 0 {
				t.Error("the guest was called again")
			}
			// Another VM of the module still works.
			if err := start(t, m, newWorld()).Delete(t.Context(), 1); err != nil {
				t.Error(err)
			}
			for range 2 {
				if err := vm.Close(context.Background()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// The end of the context interrupts only guarded guests, also while they sleep.
func TestUnguardedIsNotInterrupted(t *testing.T) {
	a := newAssembler().marker("0_2_1")
	a.fn("proxy_on_tick", "i", "")
	wasm := a.bytes()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := start(t, load(t, wasm, LoadOptions{}), newWorld()).Tick(ended, 1); err != nil {
		t.Errorf("unguarded: %v", err)
	}
	err := start(t, load(t, wasm, LoadOptions{Guarded: true}), newWorld()).Tick(ended, 1)
	if failure := (*Error)(nil); !errors.As(err, &failure) || failure.Failure != Timeout || !errors.Is(err, context.Canceled) {
		t.Errorf("guarded: %v", err)
	}
}

func TestTrapNamesFunctions(t *testing.T) {
	a := newAssembler()
	a.marker("0_2_1")
	inner := a.fn("inner", "", "", unreachable)
	a.fn("proxy_on_tick", "i", "", call(inner))
	err := start(t, load(t, a.bytes(), LoadOptions{}), newWorld()).Tick(t.Context(), 1)
	failure := (*Error)(nil)
	if !errors.As(err, &failure) {
		t.Fatal(err)
	}
	if lines := strings.Split(failure.Stack, "\n"); len(lines) != 2 || !strings.HasSuffix(lines[1], "(i32)") {
		t.Errorf("stack %q", failure.Stack)
	}
}

// A host function that panics poisons the VM but does not end the process. The
// error does not contain the panic's value.
func TestPanickingEnv(t *testing.T) {
	a := newAssembler()
	foreign := a.importFunc("env", "proxy_call_foreign_function", "iiiiii", "i")
	a.marker("0_2_1")
	a.fn("proxy_on_tick", "i", "", i32(0), i32(0), i32(0), i32(0), i32(0), i32(0), call(foreign), drop)
	for _, what := range []any{"secret", errors.New("secret")} {
		w := newWorld()
		w.foreign = func(uint32, string, []byte) ([]byte, Status) { panic(what) }
		err := start(t, load(t, a.bytes(), LoadOptions{}), w).Tick(t.Context(), 1)
		failure := (*Error)(nil)
		if !errors.As(err, &failure) || failure.Reason != "host function panicked" || strings.Contains(failure.Stack, "secret") {
			t.Errorf("got %v, stack %q", err, failure.Stack)
		}
	}
}

// A trap inside the allocator ends the callback that made the host allocate.
func TestAllocatorTraps(t *testing.T) {
	a := newAssembler()
	get := a.importFunc("env", "proxy_get_buffer_bytes", "iiiii", "i")
	a.fn("proxy_abi_version_0_2_1", "", "")
	a.fn("malloc", "i", "i", unreachable)
	a.fn("proxy_on_tick", "i", "", i32(7), i32(0), i32(100), i32(64), i32(68), call(get), drop)
	w := newWorld()
	vm := start(t, load(t, a.bytes(), LoadOptions{}), w)
	if err := vm.Tick(t.Context(), 1); err != nil {
		t.Fatalf("an empty value must not allocate: %v", err)
	}
	w.config = "abc"
	err := vm.Tick(t.Context(), 1)
	if failure := (*Error)(nil); !errors.As(err, &failure) || failure.Failure != Trap || failure.Reason != "unreachable" {
		t.Errorf("got %v", err)
	}
	if err := vm.Tick(t.Context(), 1); !errors.Is(err, ErrPoisoned) {
		t.Errorf("got %v", err)
	}
}

// reentrant calls back into its VM from a host function, which is forbidden.
func TestBusy(t *testing.T) {
	a := newAssembler()
	foreign := a.importFunc("env", "proxy_call_foreign_function", "iiiiii", "i")
	a.marker("0_2_1")
	a.fn("proxy_on_tick", "i", "", i32(0), i32(0), i32(0), i32(0), i32(0), i32(0), call(foreign), drop)
	w := newWorld()
	vm := start(t, load(t, a.bytes(), LoadOptions{}), w)
	var inner error
	w.foreign = func(uint32, string, []byte) ([]byte, Status) {
		inner = vm.Tick(t.Context(), 1)
		return nil, OK
	}
	if err := vm.Tick(t.Context(), 1); err != nil || !errors.Is(inner, ErrBusy) {
		t.Errorf("outer %v, inner %v", err, inner)
	}
}
