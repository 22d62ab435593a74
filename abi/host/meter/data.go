package meter

import (
	"cmp"
	"slices"
)

// maxGap is the largest number of zeros between two data segments that JoinData joins. So many zeros
// take less memory than one more segment in the engine.
const maxGap = 64

var zeros [maxGap]byte

// JoinData joins data segments that are near each other. Go's linker leaves out all runs of zeros,
// so a module has 30,000 segments for one megabyte of data. For each segment the engine keeps about
// 130 bytes, and 24 more in each instance. The module must define its memory itself: only then are
// the bytes between two segments zero.
func (m *Module) JoinData() {
	i := slices.IndexFunc(m.sections, func(s section) bool { return s.id == sectionData })
	counted := slices.ContainsFunc(m.sections, func(s section) bool { return s.id == sectionDataCount })
	if i < 0 || counted { // counted: the code may name a segment by its index
		return
	}
	if joined := joinData(&reader{data: m.sections[i].data}); joined != nil {
		m.sections[i].data, m.joined = joined, true
	}
}

// Encode returns the binary of the module. wasm is the binary from which the module was read, and the
// result unless JoinData has changed the module.
func (m *Module) Encode(wasm []byte) []byte {
	if !m.joined {
		return wasm
	}
	out := append(make([]byte, 0, len(wasm)), preamble...)
	for _, s := range m.sections {
		out = appendSection(out, s.id, s.data)
	}
	return out
}

// segment is a data segment at a constant address.
type segment struct {
	at   int
	data []byte
}

func (s segment) end() int { return s.at + len(s.data) }

// joinData returns the section with joined segments. It returns nil if there is nothing to join, or
// if a segment overlaps another or has no constant address.
func joinData(r *reader) []byte {
	list := make([]segment, r.count())
	for i := range list {
		kind, op, at := r.u32(), r.byte(), r.pos
		address := int(r.leb(5))
		if kind != 0 || op != opI32Const || r.pos-at > 4 || r.data[r.pos-1]&0x40 != 0 { // an address of at most 4 bytes is below 2^27 or negative
			return nil
		}
		if r.byte() != opEnd {
			return nil
		}
		list[i] = segment{address, r.bytes()}
	}
	slices.SortStableFunc(list, func(a, b segment) int { return cmp.Compare(a.at, b.at) })
	var groups [][]segment
	for i, s := range list {
		switch {
		case i > 0 && s.at < list[i-1].end():
			return nil
		case i > 0 && s.at <= list[i-1].end()+maxGap:
			last := &groups[len(groups)-1]
			*last = (*last)[:len(*last)+1] // s follows the group in list
		default:
			groups = append(groups, list[i:i+1])
		}
	}
	if r.err != nil || len(groups) == len(list) {
		return nil
	}
	size := 5
	for _, g := range groups {
		size += 12 + g[len(g)-1].end() - g[0].at
	}
	out := appendUint(make([]byte, 0, size), len(groups))
	for _, g := range groups {
		out = append(appendConst(append(out, 0), int32(g[0].at)), opEnd)
		end := g[0].at
		out = appendUint(out, g[len(g)-1].end()-end)
		for _, s := range g {
			out = append(append(out, zeros[:s.at-end]...), s.data...)
			end = s.end()
		}
	}
	return out
}
