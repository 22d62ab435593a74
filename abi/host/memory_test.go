package host

import (
	"errors"
	"strings"
	"testing"
)

// TestMemoryOfAllInstances: the instances of a module share a limit, and the
// memory of a closed instance is available to the others at once.
func TestMemoryOfAllInstances(t *testing.T) {
	// The tick requests 10 pages and traps if they are refused; delete requests none.
	grow := join(i32(10), growMemory, i32(-1), notEqual, []byte{0x04, 0x40, 0x05}, unreachable, endBlock)
	m := load(t, failing("0_2_1", func(*assembler) [][]byte { return [][]byte{grow} }), LoadOptions{Guarded: true, MemoryPages: 64, TotalMemory: 24 * PageSize})
	first, second := start(t, m, newWorld()), start(t, m, newWorld())
	least := m.total.used.Load() / 2
	if err := first.Tick(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if used := m.total.used.Load(); used != 2*least+10*PageSize || first.MemorySize() != uint32(least+10*PageSize) {
		t.Fatalf("%d bytes are counted, %d are in the first", used, first.MemorySize())
	}
	if err := second.Tick(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	err := first.Tick(t.Context(), 1)
	failure := (*Error)(nil)
	if !errors.As(err, &failure) || failure.Failure != OutOfMemory {
		t.Fatalf("beyond the limit of all: %v", err)
	}
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if used := m.total.used.Load(); used != least+10*PageSize {
		t.Errorf("%d bytes are counted after the end of the first", used)
	}
	if err := second.Tick(t.Context(), 1); err != nil {
		t.Errorf("the memory of the first is not free: %v", err)
	}
	m.total.limit = m.total.used.Load() + least - 1
	if vm, err := m.NewVM(t.Context(), newWorld()); err == nil || vm != nil || !strings.Contains(err.Error(), "reached their memory limit") {
		t.Errorf("an instance without memory: %v", err)
	}
}

// TestNothingAfterClose: a closed VM has no memory, and no call, view or
// scratch buffer reaches its old memory.
func TestNothingAfterClose(t *testing.T) {
	m := load(t, failing("0_2_1", func(*assembler) [][]byte { return nil }), LoadOptions{Guarded: true, MemoryPages: 16})
	vm := start(t, m, newWorld())
	if _, ok := vm.View(0, 8); !ok {
		t.Fatal("View of a running VM fails")
	}
	for range 2 {
		if err := vm.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := vm.View(0, 8); ok || vm.MemorySize() != 0 {
		t.Error("a closed VM has memory")
	}
	if err := vm.Tick(t.Context(), 1); !errors.Is(err, ErrPoisoned) {
		t.Errorf("tick: %v", err)
	}
	if _, _, err := vm.Scratch(t.Context(), 8); !errors.Is(err, ErrPoisoned) {
		t.Errorf("scratch: %v", err)
	}
	if used := m.total.used.Load(); used != 0 {
		t.Errorf("got %d counted bytes", used)
	}
}

// TestMemoryStartsEmpty: memory that is mapped at the place of an earlier one
// contains none of its data.
func TestMemoryStartsEmpty(t *testing.T) {
	var total memoryTotal
	for range 20 {
		l, err := newLinearMemory(4*PageSize, PageSize, 0, &total)
		if err != nil {
			t.Fatal(err)
		}
		b := l.Reallocate(3 * PageSize)
		for i, v := range b {
			if v != 0 {
				t.Fatalf("byte %d is %d", i, v)
			}
		}
		for i := range b {
			b[i] = byte(i)
		}
		if again := l.Reallocate(4 * PageSize); &again[0] != &b[0] || len(again) != 4*PageSize || again[77] != 77 {
			t.Fatal("the memory moved when it grew")
		}
		if l.Reallocate(5*PageSize) != nil || !l.refused {
			t.Fatal("the memory grew beyond its limit")
		}
		l.release()
	}
	if total.used.Load() != 0 {
		t.Errorf("got %d counted bytes", total.used.Load())
	}
}
