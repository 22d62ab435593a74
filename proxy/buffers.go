package proxy

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// Buffers come in size classes so that a stream's 4 KiB piece never carries the
// resident pages of somebody's 1 MiB prompt.
const (
	minBufferBits = 12 // 4 KiB: a stream's read buffer
	maxBufferBits = 22 // 4 MiB: larger ones are left to the collector
)

var bufferPools [maxBufferBits - minBufferBits + 1]sync.Pool

// buffer is a pooled byte slice with one owner. Append to b; b may grow past
// its class. One that several hold is not written to.
type buffer struct {
	b       []byte
	holders atomic.Int32 // besides the owner
}

// getBuffer returns an empty buffer with room for n bytes.
func getBuffer(n int) *buffer {
	class := sizeClass(n)
	if class < 0 {
		return &buffer{b: make([]byte, 0, n)}
	}
	if v := bufferPools[class].Get(); v != nil {
		return v.(*buffer)
	}
	return &buffer{b: make([]byte, 0, 1<<(class+minBufferBits))}
}

// hold makes another owner of the buffer, which has a free of its own.
func (b *buffer) hold() *buffer {
	b.holders.Add(1)
	return b
}

// free gives the buffer back when its last owner does; nil is allowed. Nothing
// of the caller's may alias it any more.
func (b *buffer) free() {
	if b == nil || b.holders.Load() > 0 && b.holders.Add(-1) >= 0 {
		return
	}
	b.holders.Store(0)
	c := cap(b.b)
	if c < 1<<minBufferBits || c > 1<<maxBufferBits {
		return
	}
	class := bits.Len(uint(c)) - 1 - minBufferBits // the largest class it can serve
	b.b = b.b[:0]
	bufferPools[class].Put(b)
}

func sizeClass(n int) int {
	if n <= 1<<minBufferBits {
		return 0
	}
	class := bits.Len(uint(n-1)) - minBufferBits
	if class >= len(bufferPools) {
		return -1
	}
	return class
}

// grown returns a buffer of twice the room with b's bytes, and frees b.
func (b *buffer) grown() *buffer {
	n := getBuffer(2 * cap(b.b))
	n.b = append(n.b, b.b...)
	b.free()
	return n
}
