// Package buffer manages the memory of the data path: pooled buffers, and the budget
// that counts the bytes of buffers with requests and answers.
//
// The decisions behind this package are in docs/design/edge.md.
package buffer

import (
	"errors"
	"io"
	"math/bits"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Buffers have size classes, so that a stream's 4 KiB piece never occupies the resident
// pages of a 1 MiB prompt.
const (
	minBits = 12 // 4 KiB: the read buffer of a stream
	maxBits = 22 // 4 MiB: the garbage collector frees larger buffers
)

const (
	// MaxAnswer limits an answer of an engine that is held whole, in bytes: the token ids
	// of a very long prompt and an opaque state fit.
	MaxAnswer = 64 << 20
	// MaxErrorAnswer limits the first event of a stream that may be an error, and the
	// answer to a clean-up, in bytes.
	MaxErrorAnswer = 64 << 10
	// FirstRead is the memory in bytes that a body gets before its bytes have arrived,
	// if its sender announces more than WholeRead.
	FirstRead = 16 << 10
	// WholeRead is the announced length in bytes up to which a body gets all its memory
	// at once: most prompts are not copied then.
	WholeRead = 64 << 10
)

// ErrTooLarge reports that a body is larger than its limit.
var ErrTooLarge = errors.New("the answer is too large")

var pools [maxBits - minBits + 1]sync.Pool

// Buffer is a pooled byte slice with one owner. The owner appends to B within its
// capacity, and calls Grow for more. A buffer with several holders must not be written
// to.
type Buffer struct {
	B       []byte
	owner   owner        // counts the buffer; nil: not counted
	counted int64        // bytes that the owner counts for the buffer
	holders atomic.Int32 // in addition to the owner
}

// owner counts the memory of buffers: a Budget, or a request's Share of one.
type owner interface {
	take(n int64) error
	Release(n int64) // a negative n counts bytes regardless of the limits
}

// Get returns an empty buffer with room for n bytes, which g counts until the
// buffer is freed. The error is ErrFull.
func (g *Budget) Get(n int) (*Buffer, error) { return get(g, n) }

// Get returns an empty buffer with room for n bytes, which counts until it is freed.
// The error is ErrFull or ErrShare.
func (s *Share) Get(n int) (*Buffer, error) { return get(s, n) }

// get returns an empty buffer with room for n bytes, which o counts.
func get(o owner, n int) (*Buffer, error) {
	size := int64(Room(n))
	if err := o.take(size); err != nil {
		return nil, err
	}
	b := Get(n)
	if c := int64(cap(b.B)); c != size { // the pooled buffer had more room
		o.Release(size - c)
		size = c
	}
	b.owner, b.counted = o, size
	return b, nil
}

// Get returns an empty buffer with room for n bytes. No budget counts the buffer.
func Get(n int) *Buffer {
	room := Room(n)
	if room > 1<<maxBits {
		return &Buffer{B: make([]byte, 0, n)}
	}
	if v := pools[bits.Len(uint(room))-1-minBits].Get(); v != nil {
		return v.(*Buffer)
	}
	return &Buffer{B: make([]byte, 0, room)}
}

// Room returns the number of bytes that a buffer for n bytes occupies.
func Room(n int) int {
	switch {
	case n <= 1<<minBits:
		return 1 << minBits
	case n <= 1<<maxBits:
		return 1 << bits.Len(uint(n-1))
	}
	return n
}

// TimedReader is a body whose reads have a limit of time.
type TimedReader interface {
	io.Reader
	// SetIdleTimeout limits the time of each read from now on.
	SetIdleTimeout(d time.Duration)
}

// ReadAll reads a body of at most limit bytes to its end, into a buffer that g counts.
// Announced is the length that the sender announced, not positive if there is none. The
// end must have been read at the time by; zero sets no limit but that of each read. The
// error is ErrFull, ErrTooLarge, os.ErrDeadlineExceeded or that of r. The caller frees
// the buffer also after an error; it may then be nil.
func (g *Budget) ReadAll(r TimedReader, announced int64, limit int, by time.Time) (*Buffer, error) {
	if announced > int64(limit) {
		return nil, ErrTooLarge
	}
	first, want := 4<<10, 0
	if announced > 0 {
		want = int(announced) + 1 // room for the read that finds the end
		if first = want; want > WholeRead {
			first = FirstRead
		}
	}
	b, err := g.Get(first)
	if err != nil {
		return nil, err
	}
	for {
		if len(b.B) == cap(b.B) {
			if err := b.Grow(want, limit+1); err != nil {
				return b, err
			}
		}
		if !by.IsZero() {
			left := time.Until(by)
			if left <= 0 {
				return b, os.ErrDeadlineExceeded
			}
			r.SetIdleTimeout(left)
		}
		n, err := r.Read(b.B[len(b.B):cap(b.B)])
		b.B = b.B[:len(b.B)+n]
		if err == io.EOF {
			return b, nil
		}
		if err == nil && len(b.B) > limit {
			err = ErrTooLarge
		}
		if err != nil {
			return b, err
		}
	}
}

// Grow gives a full buffer more room. want is the number of bytes that a peer announced,
// 0 if unknown. If want is at most eight times the present room, the new room is for want
// bytes. If want is larger, the room grows to four times its size. If want is 0, the room
// doubles. most is the largest room and must be greater than the present one. The budget
// counts the old and the new memory during the copy. On ErrFull or ErrShare the buffer is
// unchanged.
func (b *Buffer) Grow(want, most int) error {
	n := 2 * cap(b.B)
	switch {
	case want > cap(b.B) && want-1 <= 4*n: // one more byte is needed to find the end
		n = want
	case want > n:
		n = 2 * n
	}
	if n >= most-1 { // one more byte is needed to find the end
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

// Set replaces b.B by p, the result of appending to b.B. Memory that append allocated
// beyond the buffer's room is counted, even if the budget is then exceeded.
func (b *Buffer) Set(p []byte) {
	if more := int64(cap(p)) - b.counted; b.owner != nil && more > 0 {
		b.owner.Release(-more)
		b.counted += more
	}
	b.B = p
}

// Counted returns the bytes that are counted for b; 0 for nil.
func (b *Buffer) Counted() int64 {
	if b == nil {
		return 0
	}
	return b.counted
}

// Uncount makes b a buffer that no budget counts. Uncount returns the bytes that the budget of b
// still counts; the caller must release them.
func (b *Buffer) Uncount() int64 {
	n := b.counted
	b.owner, b.counted = nil, 0
	return n
}

// Hold adds another holder of the buffer, which must call Free too.
func (b *Buffer) Hold() *Buffer {
	b.holders.Add(1)
	return b
}

// Free releases the buffer when its last holder calls it; nil is allowed. The caller
// must not use memory of the buffer afterwards.
func (b *Buffer) Free() {
	if b == nil || b.holders.Load() > 0 && b.holders.Add(-1) >= 0 {
		return
	}
	b.holders.Store(0)
	if b.owner != nil {
		b.owner.Release(b.counted)
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

// maxGarbage bounds the bytes of unpooled buffers that wait for the garbage collector.
// The collector alone would let the heap double, regardless of the budget.
const maxGarbage = 64 << 20

var garbage atomic.Int64 // bytes of unpooled buffers since Buffer last started a garbage collection

// leave leaves n bytes to the garbage collector.
func leave(n int64) {
	if garbage.Add(n) >= maxGarbage && garbage.Swap(0) >= maxGarbage {
		go runtime.GC()
	}
}
