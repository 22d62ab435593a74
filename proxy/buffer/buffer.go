// Package buffer owns the memory that the data path holds: pooled buffers, and
// the budget that counts the bytes of those that hold requests and answers.
package buffer

import (
	"errors"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
)

// Buffers come in size classes so that a stream's 4 KiB piece never carries the
// resident pages of a 1 MiB prompt.
const (
	minBits = 12 // 4 KiB: the read buffer of a stream
	maxBits = 22 // 4 MiB: larger buffers are left to the garbage collector
)

// ErrFull says that the budget has no room for the bytes that were asked for.
var ErrFull = errors.New("the memory for buffers is used up")

// owner is who counts the memory of buffers: a Budget, or a request's Share of one.
type owner interface {
	take(n int64) error
	add(n int64) // whatever the limits
}

var pools [maxBits - minBits + 1]sync.Pool

// Buffer is a pooled byte slice with one owner. The owner appends to B within
// its capacity, and calls Grow for more. A buffer that has several holders is not
// written to.
type Buffer struct {
	B       []byte
	owner   owner        // who counts the buffer; nil: nobody
	counted int64        // bytes that the owner counts for it
	holders atomic.Int32 // besides the owner
}

// Get returns an empty buffer with room for n bytes, which no budget counts.
func Get(n int) *Buffer {
	class := sizeClass(n)
	if class < 0 {
		return &Buffer{B: make([]byte, 0, n)}
	}
	if v := pools[class].Get(); v != nil {
		return v.(*Buffer)
	}
	return &Buffer{B: make([]byte, 0, Room(n))}
}

// Get returns an empty buffer with room for n bytes, which g counts until the
// buffer is freed. The error is ErrFull.
func (g *Budget) Get(n int) (*Buffer, error) { return get(g, n) }

// get returns an empty buffer with room for n bytes, which o counts.
func get(o owner, n int) (*Buffer, error) {
	size := int64(Room(n))
	if err := o.take(size); err != nil {
		return nil, err
	}
	b := Get(n)
	if c := int64(cap(b.B)); c != size { // the pool had one with more room
		o.add(c - size)
		size = c
	}
	b.owner, b.counted = o, size
	return b, nil
}

// Counted is how many bytes are counted for b; 0 for nil.
func (b *Buffer) Counted() int64 {
	if b == nil {
		return 0
	}
	return b.counted
}

// Hold makes another holder of the buffer, who calls Free too.
func (b *Buffer) Hold() *Buffer {
	b.holders.Add(1)
	return b
}

// Free gives the buffer back when its last holder calls it; nil is allowed.
// Nothing of the caller's may alias the buffer afterwards.
func (b *Buffer) Free() {
	if b == nil || b.holders.Load() > 0 && b.holders.Add(-1) >= 0 {
		return
	}
	b.holders.Store(0)
	if b.owner != nil {
		b.owner.add(-b.counted)
		b.owner, b.counted = nil, 0
	}
	c := cap(b.B)
	if c > 1<<maxBits {
		leave(int64(c))
	}
	if c < 1<<minBits || c > 1<<maxBits {
		return
	}
	class := bits.Len(uint(c)) - 1 - minBits // the largest class it can serve
	b.B = b.B[:0]
	pools[class].Put(b)
}

// mostGarbage is how many bytes of buffers that no pool takes may wait for the garbage
// collector. The collector by itself would let the heap double, whatever the budget.
const mostGarbage = 64 << 20

var garbage atomic.Int64 // bytes of such buffers since the last collection that they caused

// leave leaves n bytes to the garbage collector.
func leave(n int64) {
	if garbage.Add(n) >= mostGarbage && garbage.Swap(0) >= mostGarbage {
		go runtime.GC()
	}
}

// Grow gives a full buffer more room: room for want bytes where that is at most eight
// times what the buffer has, four times what it has where want is more than that, and
// twice where want is 0. Want is the number of bytes that a peer announced. Most is the
// largest room and must be greater than the present one. The budget counts the old and
// the new memory while the bytes are copied. The error is ErrFull or ErrShare, and
// leaves the buffer as it was.
func (b *Buffer) Grow(want, most int) error {
	n := 2 * cap(b.B)
	switch {
	case want > cap(b.B) && want-1 <= 4*n: // the byte beyond is the one that finds the end
		n = want
	case want > n:
		n = 2 * n
	}
	if n >= most-1 { // likewise
		n = most
	}
	next := (*Buffer)(nil)
	if b.owner == nil {
		next = Get(n)
	} else {
		var err error
		if next, err = get(b.owner, n); err != nil {
			return err
		}
	}
	next.B = append(next.B, b.B...)
	b.B, next.B = next.B, b.B
	b.counted, next.counted = next.counted, b.counted
	next.Free()
	return nil
}

// Set makes p, which append made of b.B, the bytes of b. What append took beyond
// the buffer's room is counted, also where the budget is used up by that.
func (b *Buffer) Set(p []byte) {
	if more := int64(cap(p)) - b.counted; b.owner != nil && more > 0 {
		b.owner.add(more)
		b.counted += more
	}
	b.B = p
}

// Room is how many bytes a buffer for n bytes takes.
func Room(n int) int {
	if class := sizeClass(n); class >= 0 {
		return 1 << (class + minBits)
	}
	return n
}

func sizeClass(n int) int {
	if n <= 1<<minBits {
		return 0
	}
	class := bits.Len(uint(n-1)) - minBits
	if class >= len(pools) {
		return -1
	}
	return class
}
