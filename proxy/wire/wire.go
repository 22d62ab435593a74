// Package wire appends values to binary messages between pdproxy's own processes,
// and reads them back with one cursor.
//
// Unsigned numbers are varints, signed numbers are zigzag varints. A text or a list
// has its length, an unsigned varint, before it. Numbers of a fixed width are little
// endian.
//
// The decisions behind this package are in docs/design/fleet.md.
package wire

import "encoding/binary"

// AppendUint appends an unsigned varint. A negative int becomes a number that Uint
// reads as 2^64 plus v.
func AppendUint[T ~uint8 | ~uint32 | ~uint64 | ~int](dst []byte, v T) []byte {
	return binary.AppendUvarint(dst, uint64(v))
}

// AppendInt appends a zigzag varint.
func AppendInt[T ~int32 | ~int64](dst []byte, v T) []byte {
	return binary.AppendVarint(dst, int64(v))
}

// AppendText appends the length of v, and v.
func AppendText[T string | []byte](dst []byte, v T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(v))), v...)
}

// Reader reads values from the front of a message. A value that is missing or
// malformed reads as zero and makes the Reader fail: it drops the rest of the
// message, so that each later value is zero too. A caller can therefore read a whole
// message and look at Done or Failed once. The zero Reader has an empty message.
// A Reader allocates nothing. It is for one goroutine.
type Reader struct {
	rest   []byte
	failed bool
}

// Read returns a Reader of message, which must not change while it is read.
func Read(message []byte) Reader { return Reader{rest: message} }

// Fail drops the rest of the message and makes Failed true. Callers use it for a
// value that is well formed and out of range.
func (r *Reader) Fail() { r.rest, r.failed = nil, true }

// Failed reports whether a value was missing or malformed.
func (r *Reader) Failed() bool { return r.failed }

// Done reports whether all values were present and no byte follows them.
func (r *Reader) Done() bool { return !r.failed && len(r.rest) == 0 }

// Len returns the number of unread bytes.
func (r *Reader) Len() int { return len(r.rest) }

// Rest reads all remaining bytes. The result aliases the message.
func (r *Reader) Rest() []byte {
	b := r.rest
	r.rest = nil
	return b
}

// Uint reads an unsigned varint.
func (r *Reader) Uint() uint64 {
	if len(r.rest) > 0 && r.rest[0] < 0x80 { // most are
		v := r.rest[0]
		r.rest = r.rest[1:]
		return uint64(v)
	}
	v, n := binary.Uvarint(r.rest)
	if n <= 0 {
		r.Fail()
		return 0
	}
	r.rest = r.rest[n:]
	return v
}

// UintUpTo reads an unsigned varint and fails if it is above limit.
func (r *Reader) UintUpTo(limit uint64) uint64 {
	v := r.Uint()
	if v > limit {
		r.Fail()
		return 0
	}
	return v
}

// Int reads a zigzag varint.
func (r *Reader) Int() int64 {
	v, n := binary.Varint(r.rest)
	if n <= 0 {
		r.Fail()
		return 0
	}
	r.rest = r.rest[n:]
	return v
}

// Bytes reads n bytes, which alias the message. It returns nil if fewer bytes remain.
func (r *Reader) Bytes(n uint64) []byte {
	if n > uint64(len(r.rest)) {
		r.Fail()
		return nil
	}
	b := r.rest[:n:n]
	r.rest = r.rest[n:]
	return b
}

// Text reads a text, which aliases the message. It returns nil if the text is incomplete.
func (r *Reader) Text() []byte { return r.Bytes(r.Uint()) }

// List reads the length of a list. size is the smallest size of a member in bytes, at
// least 1. List fails if the remaining message is too short for that many members. So a
// caller may allocate memory for the returned length.
func (r *Reader) List(size int) int {
	n := r.Uint()
	if n > uint64(len(r.rest)/size) {
		r.Fail()
		return 0
	}
	return int(n)
}

// Uint8 reads one byte.
func (r *Reader) Uint8() uint8 {
	if b := r.Bytes(1); b != nil {
		return b[0]
	}
	return 0
}

// Uint16 reads two bytes.
func (r *Reader) Uint16() uint16 {
	if b := r.Bytes(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

// Uint32 reads four bytes.
func (r *Reader) Uint32() uint32 {
	if b := r.Bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

// Uint64 reads eight bytes.
func (r *Reader) Uint64() uint64 {
	if b := r.Bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}
