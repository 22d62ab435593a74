package epp

import (
	"testing"

	"google.golang.org/grpc/mem"
)

func TestBuffers(t *testing.T) {
	p := &buffers{}
	for _, tt := range []struct{ length, capacity int }{
		{0, 256}, {1, 256}, {256, 256}, {257, 512}, {62_000, 1 << 16}, {1 << 20, 1 << 20}, {1<<20 + 1, 1 << 21}, {8 << 20, 8 << 20}, {8<<20 + 1, 8<<20 + 1},
	} {
		b := p.Get(tt.length)
		if len(*b) != tt.length || cap(*b) < tt.length || tt.length <= 8<<20 && cap(*b) != tt.capacity {
			t.Errorf("Get(%d) has length %d and capacity %d, want capacity %d", tt.length, len(*b), cap(*b), tt.capacity)
		}
		p.Put(b)
	}
	for _, other := range [][]byte{nil, make([]byte, 100), make([]byte, 300), make([]byte, 16<<20)} {
		p.Put(&other) // of no size of the pool
	}
	for range 100 {
		if b := p.Get(200); len(*b) != 200 || cap(*b) != 256 {
			t.Fatalf("Get(200) has length %d and capacity %d", len(*b), cap(*b))
		}
	}
}

// grpc-go returns a shorter prefix of a buffer than it got.
func TestBufferOfPrefix(t *testing.T) {
	p := &buffers{}
	b := p.Get(1000)
	*b = (*b)[:10]
	p.Put(b)
	if b := p.Get(1024); len(*b) != 1024 || cap(*b) != 1024 {
		t.Errorf("Get(1024) has length %d and capacity %d", len(*b), cap(*b))
	}
}

func TestBuffersAreGRPCs(t *testing.T) {
	if _, ok := mem.DefaultBufferPool().(*buffers); !ok {
		t.Errorf("grpc-go uses %T", mem.DefaultBufferPool())
	}
}
