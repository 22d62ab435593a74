package abi

import "unsafe"

// A row of the place frame has the layout that Go gives to Candidate on every 64-bit little-endian
// machine and on wasm. So the host copies a table in one move, and a Go guest
// reads the rows where the host wrote them. Hosts of the other byte order, and
// guests that get rows of another stride, copy field by field.

// RowSize is the size of a candidate row in version 1 of the contract.
const RowSize = 80

// The compiler checks the layout: an index out of range does not build.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(Candidate{})-RowSize]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Instance)-rowInstance]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Rank)-rowRank]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Group)-rowGroup]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Roles)-rowRoles]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Trial)-rowTrial]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Pair)-rowPair]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Home)-rowHome]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Requests)-rowRequests]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Score)-rowScore]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Tokens)-rowTokens]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Queued)-rowQueued]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.BlocksGPU)-rowBlocksGPU]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.BlocksCPU)-rowBlocksCPU]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.BlocksDisk)-rowBlocksDisk]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.BlockTokens)-rowBlockTokens]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Usage)-rowUsage]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.TokenMicros)-rowTokenMicros]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.RecentTokens)-rowRecentTokens]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.RecentRequests)-rowRecentCount]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Busy)-rowBusy]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Adapter)-rowAdapter]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.Media)-rowMedia]
	_ = [1]struct{}{}[unsafe.Offsetof(Candidate{}.MediaSent)-rowMediaSent]
)

// littleEndian is the byte order of this machine.
var littleEndian = func() bool {
	one := uint16(1)
	return *(*byte)(unsafe.Pointer(&one)) == 1
}()

// ReadRows appends to rows the complete rows in b, which AppendRows wrote.
func ReadRows(rows []Candidate, b []byte) []Candidate {
	return decodeRows(b, len(b)/RowSize, RowSize, rows)
}

// aligned reports whether the byte at an offset of b can begin a row in memory.
func aligned(b []byte, from int) bool { return uintptr(unsafe.Pointer(&b[from]))%8 == 0 }

// rowsView returns the n rows of b that begin at an aligned offset, without a
// copy: a score written into a row is written into the frame. Trial must be 0
// or 1, as the host writes it, because Go reads its byte as a bool.
func rowsView(b []byte, from, n int) []Candidate {
	b = b[from : from+n*RowSize]
	return unsafe.Slice((*Candidate)(unsafe.Pointer(&b[0])), n)
}

// textView returns b as a string that shares its memory.
func textView(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
