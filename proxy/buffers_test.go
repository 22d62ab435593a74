package proxy

import (
	"bytes"
	"sync"
	"testing"
)

func TestBufferClasses(t *testing.T) {
	for _, n := range []int{0, 1, 4095, 4096, 4097, 8192, 100_000, 1 << 20, 1<<22 - 1, 1 << 22, 1<<22 + 1, 1 << 24} {
		b := getBuffer(n)
		if len(b.b) != 0 || cap(b.b) < n {
			t.Errorf("getBuffer(%d): length %d, room %d", n, len(b.b), cap(b.b))
		}
		if n > 1<<maxBufferBits && cap(b.b) != n {
			t.Errorf("getBuffer(%d): room %d for one that is not kept", n, cap(b.b))
		}
		if n <= 1<<maxBufferBits && n > 4096 && cap(b.b) >= 4*n {
			t.Errorf("getBuffer(%d): room %d", n, cap(b.b))
		}
		b.free()
	}
}

// What comes out of the pools always has the room that was asked for, however
// odd the buffers are that were put in.
func TestBufferRoomAfterFree(t *testing.T) {
	for c := 1; c < 3<<22; c = c*3/2 + 1 {
		b := &buffer{b: make([]byte, c/2, c)}
		b.free()
		for _, n := range []int{c, c / 2, c/2 + 1, c * 2} {
			if got := getBuffer(n); len(got.b) != 0 || cap(got.b) < n {
				t.Fatalf("after a free of %d: getBuffer(%d) has length %d, room %d", c, n, len(got.b), cap(got.b))
			}
		}
	}
}

// A buffer that several hold comes back to its pool with the last of them, once.
func TestBufferHeld(t *testing.T) {
	const n = 3 << 20 // a class that nothing else here uses
	for range 1000 {
		b := getBuffer(n)
		b.b = append(b.b, "whole"...)
		var wg sync.WaitGroup
		for range 3 {
			b.hold()
			wg.Go(func() {
				if string(b.b) != "whole" {
					t.Error("given back before its time")
				}
				b.free()
			})
		}
		b.free()
		wg.Wait()
		x, y := getBuffer(n), getBuffer(n)
		if x == y {
			t.Fatal("given back twice")
		}
		x.free()
		y.free()
	}
}

func TestBufferGrown(t *testing.T) {
	b := getBuffer(1)
	want := []byte("what was read so far")
	b.b = append(b.b, want...)
	room := cap(b.b)
	b = b.grown()
	if !bytes.Equal(b.b, want) || cap(b.b) < 2*room {
		t.Errorf("%q with room for %d, want twice %d", b.b, cap(b.b), room)
	}
	b.free()
	(*buffer)(nil).free() // allowed
}
