package epp

import (
	"math/bits"
	"sync"

	"google.golang.org/grpc/experimental"
)

// The sizes of pooled buffers, as powers of two: 256 bytes to 8 MB.
const (
	leastBuffer = 8
	maxBuffer   = 23
)

// buffers is the pool of grpc-go's message buffers. grpc-go's own pool has no size between 32 KB
// and 1 MB, and sets each buffer to zero before its use, so that a part of a body of 62 KB costs
// the clearing of 1 MB. Each buffer here has the next power of two, and old content: grpc-go
// writes each byte that it reads. Safe for concurrent use. The zero value is empty.
type buffers struct {
	sizes [maxBuffer + 1]sync.Pool // of *[]byte
}

func init() { experimental.SetDefaultBufferPool(&buffers{}) } // grpc-go: before the first server

// Get implements mem.BufferPool.
func (p *buffers) Get(length int) *[]byte {
	size := max(leastBuffer, bits.Len(uint(max(length, 1)-1)))
	if size > maxBuffer {
		b := make([]byte, length)
		return &b
	}
	b, ok := p.sizes[size].Get().(*[]byte)
	if !ok {
		fresh := make([]byte, 1<<size)
		b = &fresh
	}
	*b = (*b)[:length]
	return b
}

// Put implements mem.BufferPool. Buffers of other origin are left to the garbage collector.
func (p *buffers) Put(b *[]byte) {
	size := bits.Len(uint(cap(*b))) - 1
	if size < leastBuffer || size > maxBuffer || cap(*b) != 1<<size {
		return
	}
	*b = (*b)[:cap(*b)]
	p.sizes[size].Put(b)
}
