package host

import (
	"encoding/binary"
	"strings"
	"testing"
)

func TestHook(t *testing.T) {
	ctx := t.Context()
	a := newAssembler()
	// The next buffer begins at the end of the last one; the address is 0 for
	// more than a page.
	a.fn("pdproxy_v1_scratch", "i", "i", i32(64), i32(64), load32, i32(1), add, store32, i32(4096))
	a.fn("pdproxy_v1_on_mint", "ii", "I", i64(-2))
	a.fn("pdproxy_v1_on_finish", "ii", "", i32(128), local(1), store32)
	a.fn("pdproxy_v1_needs", "", "I", i64(9))
	a.fn("pdproxy_v1_policies", "", "I", i64(256<<32|9))
	a.fn("pdproxy_v1_outside", "", "I", i64(-1))
	a.data = append(make([]byte, 256), "mint four"...)
	vm, err := load(t, a.bytes(), LoadOptions{}).NewVM(ctx, newWorld())
	if err != nil {
		t.Fatal(err)
	}
	mint, ok := vm.Hook("pdproxy_v1_on_mint")
	if !ok {
		t.Fatal("no hook")
	}
	if id, err := mint.Call(ctx, 0, 0); id != -2 || err != nil {
		t.Errorf("mint: %d, %v", id, err)
	}
	finish, _ := vm.Hook("pdproxy_v1_on_finish")
	if v, err := finish.Call(ctx, 4096, 77); v != 0 || err != nil {
		t.Errorf("finish: %d, %v", v, err)
	}
	if v, _ := vm.memory.ReadUint32Le(128); v != 77 {
		t.Errorf("finish got %d", v)
	}
	for _, name := range []string{"pdproxy_v1_on_plan", "pdproxy_v1_needs", "pdproxy_v1_scratch"} {
		if _, ok := vm.Hook(name); ok {
			t.Errorf("%s is a hook", name)
		}
	}
	if v, ok, err := vm.Value(ctx, "pdproxy_v1_needs"); v != 9 || !ok || err != nil {
		t.Errorf("needs: %d, %v, %v", v, ok, err)
	}
	if _, ok, err := vm.Value(ctx, "pdproxy_v1_absent"); ok || err != nil {
		t.Errorf("absent: %v, %v", ok, err)
	}
	if _, ok, err := vm.Value(ctx, "pdproxy_v1_on_mint"); ok || err == nil {
		t.Errorf("not a value: %v, %v", ok, err)
	}
	if text, ok, err := vm.Text(ctx, "pdproxy_v1_policies"); text != "mint four" || !ok || err != nil {
		t.Errorf("policies: %q, %v, %v", text, ok, err)
	}
	if _, _, err := vm.Text(ctx, "pdproxy_v1_outside"); err == nil {
		t.Error("a text outside memory was read")
	}

	// The host requests a buffer from the guest once, and again only if it needs a larger buffer.
	for _, size := range []uint32{100, 50, 100, 8192, 100} {
		view, ptr, err := vm.Scratch(ctx, size)
		if err != nil || ptr != 4096 || uint32(len(view)) < size {
			t.Errorf("scratch %d: %d bytes at %d, %v", size, len(view), ptr, err)
		}
	}
	if asked, _ := vm.memory.ReadUint32Le(64); asked != 2 {
		t.Errorf("the guest got %d requests for a buffer", asked)
	}
	if _, _, err := vm.Scratch(ctx, PageSize); err == nil || !strings.Contains(err.Error(), "outside") {
		t.Errorf("scratch beyond memory: %v", err)
	}
}

func TestScratchRefused(t *testing.T) {
	for ptr, want := range map[int32]string{0: "refused 64 bytes", 4: "not a multiple of 8", PageSize - 8: "outside"} {
		a := newAssembler()
		a.fn("pdproxy_v1_scratch", "i", "i", i32(ptr))
		a.fn("pdproxy_v1_on_mint", "ii", "I", i64(1))
		vm, err := load(t, a.bytes(), LoadOptions{}).NewVM(t.Context(), newWorld())
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := vm.Scratch(t.Context(), 64); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("address %d: %v", ptr, err)
		}
	}
}

// The caller takes a new view after the guest's memory has grown and moved.
func TestScratchAfterGrowth(t *testing.T) {
	ctx := t.Context()
	a := policyModule()
	a.fn("pdproxy_v1_on_place", "ii", "I",
		i32(8), growMemory, drop, local(0), i32(7), store32, i64(1))
	vm, err := load(t, a.bytes(), LoadOptions{}).NewVM(ctx, newWorld())
	if err != nil {
		t.Fatal(err)
	}
	place, _ := vm.Hook("pdproxy_v1_on_place")
	for range 3 {
		view, ptr, err := vm.Scratch(ctx, 64)
		if err != nil {
			t.Fatal(err)
		}
		view[0] = 1
		if _, err := place.Call(ctx, ptr, 64); err != nil {
			t.Fatal(err)
		}
		if view, _, _ = vm.Scratch(ctx, 64); view[0] != 7 {
			t.Errorf("the view holds %d", view[0])
		}
	}
	if vm.MemorySize() != 25*PageSize {
		t.Errorf("memory is %d bytes", vm.MemorySize())
	}
}

// decide fills a frame of rows and calls the hook, as the owner of a policy does.
func decide(tb testing.TB, vm *VM, place *Hook, rows int) func() int64 {
	size := uint32(64 + 64*rows)
	ctx := tb.Context()
	return func() int64 {
		view, ptr, err := vm.Scratch(ctx, size)
		if err != nil {
			tb.Fatal(err)
		}
		for i := range rows {
			binary.LittleEndian.PutUint64(view[64+64*i+24:], uint64((i+7)*31%rows+1))
		}
		answer, err := place.Call(ctx, ptr, size)
		if err != nil {
			tb.Fatal(err)
		}
		return answer
	}
}

// A decision allocates nothing in the host and nothing in the guest.
func TestDecisionsDoNotAllocate(t *testing.T) {
	vm := start(t, load(t, goGuest(t), LoadOptions{}), newWorld())
	place, ok := vm.Hook("pdproxy_v1_on_place")
	if !ok {
		t.Fatal("no hook")
	}
	run := decide(t, vm, place, 64)
	if got := run(); got < 0 || (got+7)*31%64 != 0 {
		t.Errorf("row %d was chosen", got)
	}
	size := vm.MemorySize()
	if n := testing.AllocsPerRun(1000, func() { run() }); n != 0 {
		t.Errorf("%v allocations a decision", n)
	}
	if vm.MemorySize() != size {
		t.Error("the guest's memory grew")
	}
}

func BenchmarkDecision(b *testing.B) {
	for _, guarded := range []bool{false, true} {
		name := "trusted"
		if guarded {
			name = "guarded"
		}
		b.Run(name, func(b *testing.B) {
			vm := start(b, load(b, goGuest(b), LoadOptions{Guarded: guarded}), newWorld())
			place, _ := vm.Hook("pdproxy_v1_on_place")
			run := decide(b, vm, place, 64)
			b.ReportAllocs()
			for b.Loop() {
				run()
			}
		})
	}
}

// BenchmarkStream measures the minimum that a filter costs a request: a
// context, one callback that reads a header and adds one, and the end of the
// context.
func BenchmarkStream(b *testing.B) {
	for _, guarded := range []bool{false, true} {
		name := "trusted"
		if guarded {
			name = "guarded"
		}
		b.Run(name, func(b *testing.B) {
			w := newWorld()
			w.level = LogError
			vm := start(b, load(b, goGuest(b), LoadOptions{Guarded: guarded}), w)
			s := w.newStream(2)
			ctx := b.Context()
			b.ReportAllocs()
			for b.Loop() {
				s.maps[0].pairs = append(s.maps[0].pairs[:0], Pair{":path", "/v1/models"})
				if err := vm.ContextCreate(ctx, 2, 1); err != nil {
					b.Fatal(err)
				}
				if _, err := vm.RequestHeaders(ctx, 2, 1, true); err != nil {
					b.Fatal(err)
				}
				if err := vm.Delete(ctx, 2); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
