package meter

import (
	"encoding/binary"
	"slices"
)

// A metered module imports two functions from ImportModule. No other module may import from it.
const (
	ImportModule = "(meter)"
	// Pause is the function that a guest calls when its budget is used up: () -> i32. Its result is
	// the new budget, see Budget. It ends the call by a panic.
	Pause = "pause"
	// Room is the function that a guest calls before a table grows: (entries, size, max i32) -> i32.
	// Its result is the number of entries, or -1 when the table may not grow.
	Room = "room"
	// Start is the name under which a metered module exports its start function. The host calls it
	// once after it has made an instance. The engine would call it before the host can.
	Start = "(start)"
)

// Budget is the weight of the instructions that a guest executes between two calls of Pause. It
// takes 0.1 to 0.3 ms, and some milliseconds if each load waits for memory.
const Budget = 400_000

// imports is the number of functions that a metered module imports in addition.
const imports = 2

// chunk is the number of bytes that memory.fill and memory.copy write at once.
const chunk = 1 << 20

// weightShift: so many bytes of a bulk operation weigh 1, as a power of 2.
const weightShift = 4

// More instructions, for the code that the package adds.
const (
	opI32LtS       = 0x48
	opI32GtU       = 0x4b
	opI32LeU       = 0x4d
	opI64LeU       = 0x58
	opI32Add       = 0x6a
	opI32Sub       = 0x6b
	opI32ShrU      = 0x76
	opI64Add       = 0x7c
	opI64Shl       = 0x86
	opI64ExtendU   = 0xad
	typeI32        = 0x7f
	typeEmpty      = 0x40
	typeOfFunction = 0x60
)

// Meter returns the module with meters. Each function and each loop subtracts the weight of its
// instructions from a budget at its beginning, and calls Pause when the budget is used up. So Pause
// runs after a bounded time, whatever the guest does, and also before the stack has grown by more
// than some bytes for each unit of weight. Operations on large parts of memory happen in pieces.
// Indices of functions change, names of functions stay. Debug information of compilers, which
// refers to places in the code, is removed.
func (m *Module) Meter() []byte {
	w := &rewriter{Module: m, budget: m.globals}
	w.addHelpers()
	bodies := w.bodies()
	out := slices.Clone(preamble)
	for _, id := range []byte{sectionType, sectionImport, sectionFunction, sectionTable, sectionMemory, sectionGlobal,
		sectionExport, sectionElement, sectionDataCount, sectionCode, sectionData} {
		old := w.section(id)
		switch id {
		case sectionType:
			old = extend(old, w.types())
		case sectionImport:
			old = extend(old, w.imports())
		case sectionFunction:
			old = extend(old, w.functions())
		case sectionGlobal:
			// mutable i32, i32.const 0: the first check calls Pause
			old = extend(old, [][]byte{{typeI32, 1, opI32Const, 0, opEnd}})
		case sectionExport:
			old = extend(old, w.exports())
		case sectionCode:
			old = extend([]byte{0}, bodies)
		}
		if len(old) > 0 {
			out = appendSection(out, id, old)
		}
	}
	for _, s := range m.sections {
		if s.id == sectionCustom {
			if data := w.custom(s.data); data != nil {
				out = appendSection(out, sectionCustom, data)
			}
		}
	}
	return out
}

// rewriter makes a metered module.
type rewriter struct {
	*Module
	budget  int // index of the global variable
	meter   meter
	helpers []helper
	fill    int // index of a helper in the new module, if there is one
	copy    int
	charge  int
}

// helper is a function that the package adds.
type helper struct {
	name string
	kind int // type: index after the module's own types
	code []byte
}

// The types that the package adds.
const (
	kindPause  = iota // () -> i32
	kindRoom          // (i32, i32, i32) -> i32
	kindBulk          // (i32, i32, i32) -> ()
	kindCharge        // (i32) -> i32
)

func (w *rewriter) types() [][]byte {
	return [][]byte{
		kindPause:  {typeOfFunction, 0, 1, typeI32},
		kindRoom:   {typeOfFunction, 3, typeI32, typeI32, typeI32, 1, typeI32},
		kindBulk:   {typeOfFunction, 3, typeI32, typeI32, typeI32, 0},
		kindCharge: {typeOfFunction, 1, typeI32, 1, typeI32},
	}
}

func (w *rewriter) imports() [][]byte {
	one := func(name string, kind int) []byte {
		return appendUint(append(appendName(appendName(nil, ImportModule), name), kindFunction), len(w.Module.types)+kind)
	}
	return [][]byte{one(Pause, kindPause), one(Room, kindRoom)}
}

func (w *rewriter) functions() (list [][]byte) {
	for _, h := range w.helpers {
		list = append(list, appendUint(nil, len(w.Module.types)+h.kind))
	}
	return list
}

func (w *rewriter) exports() [][]byte {
	if w.start < 0 {
		return nil
	}
	return [][]byte{appendUint(append(appendName(nil, Start), kindFunction), w.shift(uint32(w.start)))}
}

// shift returns the new index of a function.
func (w *rewriter) shift(index uint32) int {
	if int(index) < w.Imports {
		return int(index)
	}
	return int(index) + imports
}

// section returns a section with the new indices of functions; nil: there is none.
func (w *rewriter) section(id byte) []byte {
	i := slices.IndexFunc(w.sections, func(s section) bool { return s.id == id })
	if i < 0 {
		return nil
	}
	old := w.sections[i].data
	first, _ := slices.BinarySearchFunc(w.references, i, func(r reference, i int) int { return r.section - i })
	var out []byte
	from := 0
	for _, r := range w.references[first:] {
		if r.section != i {
			break
		}
		out = appendUint(append(out, old[from:r.at]...), w.shift(r.index))
		from = r.end
	}
	return append(out, old[from:]...)
}

// custom returns a custom section for the new module; nil: it is dropped.
func (w *rewriter) custom(data []byte) []byte {
	r := &reader{data: data}
	name := r.bytes()
	switch {
	case r.err != nil || len(name) >= 7 && string(name[:7]) == ".debug_":
		return nil
	case string(name) == "name":
		return w.names(r)
	}
	return data
}

// extend adds entries to a list of a section.
func extend(old []byte, entries [][]byte) []byte {
	if len(entries) == 0 {
		return old
	}
	r := &reader{data: old}
	n := 0
	if len(old) > 0 {
		n = int(r.u32())
	}
	size := len(old) + 5
	for _, e := range entries {
		size += len(e)
	}
	out := append(appendUint(make([]byte, 0, size), n+len(entries)), old[r.pos:]...)
	for _, e := range entries {
		out = append(out, e...)
	}
	return out
}

func appendSection(out []byte, id byte, data []byte) []byte {
	return append(appendUint(append(out, id), len(data)), data...)
}

func appendName(out []byte, name string) []byte {
	return append(appendUint(out, len(name)), name...)
}

func appendUint(out []byte, n int) []byte { return binary.AppendUvarint(out, uint64(n)) }

// appendConst appends i32.const.
func appendConst(out []byte, n int32) []byte {
	out = append(out, opI32Const)
	for n >= 0x40 || n < -0x40 {
		out = append(out, byte(n)|0x80)
		n >>= 7
	}
	return append(out, byte(n)&0x7f)
}
