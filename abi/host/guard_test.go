package host

import (
	"context"
	"errors"
	"testing"
)

// TestInterrupt: Interrupt from another goroutine ends a guest that loops, and
// poisons a VM that is not in a call. It has no effect on a module that is not
// guarded.
func TestInterrupt(t *testing.T) {
	m := load(t, failing("0_2_1", func(*assembler) [][]byte { return [][]byte{forever} }), LoadOptions{Guarded: true, MemoryPages: 16})
	vm := start(t, m, newWorld())
	ended := make(chan error)
	go func() { ended <- vm.Tick(context.Background(), 1) }()
	vm.Interrupt()
	err := <-ended
	failure := (*Error)(nil)
	if !errors.As(err, &failure) || failure.Failure != Timeout || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a loop: %v", err)
	}

	idle := start(t, m, newWorld())
	idle.Interrupt()
	if err := idle.Err(); !errors.As(err, &failure) || failure.Failure != Timeout {
		t.Errorf("between calls: %v", err)
	}
	if err := idle.Delete(t.Context(), 1); !errors.Is(err, ErrPoisoned) {
		t.Errorf("call after the failure: %v, want ErrPoisoned", err)
	}

	trusted := start(t, load(t, failing("0_2_1", func(*assembler) [][]byte { return nil }), LoadOptions{}), newWorld())
	trusted.Interrupt()
	if err := trusted.Tick(t.Context(), 1); err != nil || trusted.Err() != nil {
		t.Errorf("a trusted module: %v", err)
	}
}

// TestDetach: a guest whose call was abandoned has no effect on the host.
func TestDetach(t *testing.T) {
	a := newAssembler()
	foreign := a.importFunc("env", "proxy_call_foreign_function", "iiiiii", "i")
	a.marker("0_2_1")
	once := join(i32(0), i32(0), i32(0), i32(0), i32(0), i32(0), call(foreign))
	a.fn("proxy_on_tick", "i", "", i32(512), once, store32, i32(516), once, store32)
	w := newWorld()
	vm := start(t, load(t, a.bytes(), LoadOptions{Guarded: true}), w)
	calls := 0
	w.foreign = func(uint32, string, []byte) ([]byte, Status) {
		calls++
		vm.Detach()
		return nil, OK
	}
	if err := vm.Tick(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	view, _ := vm.View(512, 8)
	if first, second := Status(u32(view, 0)), Status(u32(view, 4)); calls != 1 || first != OK || second != InternalFailure {
		t.Errorf("%d calls, answers %d and %d", calls, first, second)
	}
	vm.Attach()
	if err := vm.Tick(t.Context(), 1); err != nil || calls != 2 {
		t.Errorf("afterwards: %d calls, %v", calls, err)
	}
}

// TestGuardedCallsDoNotAllocate: for a call into a guarded module the engine starts no goroutine
// and makes no channel.
func TestGuardedCallsDoNotAllocate(t *testing.T) {
	vm := start(t, load(t, failing("0_2_1", func(*assembler) [][]byte { return nil }), LoadOptions{Guarded: true, MemoryPages: 16}), newWorld())
	tick := func() {
		if err := vm.Tick(context.Background(), 1); err != nil {
			t.Fatal(err)
		}
	}
	if n := testing.AllocsPerRun(100, tick); n != 0 {
		t.Errorf("%v allocations in a call", n)
	}
}
