package meter

import (
	"errors"
	"fmt"
)

// reader reads one section. The first error stays: later reads return zero, so that a caller
// may check once. Every count that it returns is at most the number of bytes that are left.
type reader struct {
	data []byte
	pos  int
	err  error
}

var errEnd = errors.New("unexpected end")

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
		r.pos = len(r.data)
	}
}

func (r *reader) more() bool { return r.pos < len(r.data) }

func (r *reader) byte() byte {
	if !r.more() {
		r.fail(errEnd)
		return 0
	}
	r.pos++
	return r.data[r.pos-1]
}

// leb reads an integer of at most size bytes in LEB128, unsigned. The engine checks the unused
// bits of the last byte.
func (r *reader) leb(size int) uint64 {
	var v uint64
	for i := range size {
		c := r.byte()
		v |= uint64(c&0x7f) << (7 * i)
		if c < 0x80 {
			return v
		}
	}
	r.fail(errors.New("an integer is too long"))
	return 0
}

func (r *reader) u32() uint32 { return uint32(r.leb(5)) }

// count reads the length of a list whose elements have at least one byte.
func (r *reader) count() int {
	n := r.u32()
	if uint64(n) > uint64(len(r.data)-r.pos) {
		r.fail(errEnd)
		return 0
	}
	return int(n)
}

// index reads an index of a list with n elements.
func (r *reader) index(what string, n int) uint32 {
	i := r.u32()
	if r.err == nil && uint64(i) >= uint64(n) {
		r.fail(fmt.Errorf("%s %d does not exist", what, i))
	}
	return i
}

func (r *reader) skip(n int) {
	if n > len(r.data)-r.pos {
		r.fail(errEnd)
		return
	}
	r.pos += n
}

// bytes reads a length and as many bytes.
func (r *reader) bytes() []byte {
	n := r.count()
	r.skip(n)
	return r.data[r.pos-n : r.pos]
}

// valueType reads the type of a value. The engine understands more of them with features that
// the host does not enable.
func (r *reader) valueType() byte {
	t := r.byte()
	switch t {
	case 0x7f, 0x7e, 0x7d, 0x7c, 0x7b, 0x70, 0x6f: // i32, i64, f32, f64, v128, funcref, externref
	default:
		r.fail(fmt.Errorf("unknown value type %#x", t))
	}
	return t
}

// referenceType reads the type of a reference.
func (r *reader) referenceType() {
	if t := r.byte(); r.err == nil && t != 0x70 && t != 0x6f { // funcref, externref
		r.fail(fmt.Errorf("unknown type of reference %#x", t))
	}
}

// limits reads the limits of a table or a memory.
func (r *reader) limits() (l Limits) {
	switch flag := r.byte(); flag {
	case 0:
		l.Min = r.u32()
	case 1:
		l.Min, l.HasMax = r.u32(), true
		l.Max = r.u32()
	default:
		r.fail(fmt.Errorf("unknown kind of limits %#x", flag))
	}
	return l
}
