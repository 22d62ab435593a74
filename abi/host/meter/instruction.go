package meter

import "fmt"

// The instructions that the package has to know (WebAssembly core specification 2.0, chapter 5.4).
const (
	opBlock        = 0x02
	opLoop         = 0x03
	opIf           = 0x04
	opElse         = 0x05
	opEnd          = 0x0b
	opBr           = 0x0c
	opBrIf         = 0x0d
	opBrTable      = 0x0e
	opCall         = 0x10
	opCallIndirect = 0x11
	opSelectTyped  = 0x1c
	opLocalGet     = 0x20
	opLocalSet     = 0x21
	opLocalTee     = 0x22
	opGlobalGet    = 0x23
	opGlobalSet    = 0x24
	opTableGet     = 0x25
	opTableSet     = 0x26
	opI32Load      = 0x28
	opI64Store32   = 0x3e
	opMemorySize   = 0x3f
	opMemoryGrow   = 0x40
	opI32Const     = 0x41
	opI64Const     = 0x42
	opF32Const     = 0x43
	opF64Const     = 0x44
	opI32Eqz       = 0x45
	opI64Extend32  = 0xc4
	opRefNull      = 0xd0
	opRefIsNull    = 0xd1
	opRefFunc      = 0xd2
	prefixMisc     = 0xfc
	prefixVector   = 0xfd
)

// The instructions after prefixMisc that have immediates.
const (
	miscMemoryInit = 0x08
	miscDataDrop   = 0x09
	miscMemoryCopy = 0x0a
	miscMemoryFill = 0x0b
	miscTableInit  = 0x0c
	miscElemDrop   = 0x0d
	miscTableCopy  = 0x0e
	miscTableGrow  = 0x0f
	miscTableSize  = 0x10
	miscTableFill  = 0x11
)

// instruction is one instruction of a function. The zero values of its fields mean that the
// instruction has no such immediate.
type instruction struct {
	op      byte
	misc    byte   // the instruction after prefixMisc or prefixVector
	index   uint32 // function, type, label, local, global, table or data segment: the first index
	targets int    // labels of br_table, with the default
	arity   int    // values that a block or a callee takes and gives
	params  int    // values that a loop takes: the label of a loop carries them
	results int    // values that another block gives: its label carries them
}

// instruction reads one instruction as the engine with the features of WebAssembly 2.0 does. It
// checks only what the engine cannot check after the module has been changed: that indices exist.
func (m *Module) instruction(r *reader) (in instruction) {
	in.op = r.byte()
	switch op := in.op; {
	case op == opBlock || op == opLoop || op == opIf:
		m.blockType(r, &in)
	case op == opBr || op == opBrIf:
		in.index = r.u32()
	case op == opBrTable:
		in.targets = r.count() + 1
		for i := 0; i < in.targets && r.err == nil; i++ {
			in.index = max(in.index, r.u32())
		}
	case op == opCall:
		in.index = r.index("function", len(m.functionTypes))
		if r.err == nil {
			in.arity = m.types[m.functionTypes[in.index]].arity()
		}
	case op == opCallIndirect:
		in.index = r.index("type", len(m.types))
		r.index("table", len(m.Tables))
		if r.err == nil {
			in.arity = m.types[in.index].arity()
		}
	case op == opSelectTyped:
		if r.byte() != 1 {
			r.fail(fmt.Errorf("select has not one type"))
		}
		r.valueType()
	case op >= opLocalGet && op <= opLocalTee:
		in.index = r.u32()
	case op == opGlobalGet || op == opGlobalSet:
		in.index = r.index("global", m.globals)
	case op == opTableGet || op == opTableSet:
		in.index = r.index("table", len(m.Tables))
	case op >= opI32Load && op <= opI64Store32:
		r.u32()
		r.u32()
	case op == opMemorySize || op == opMemoryGrow:
		r.skip(1)
	case op == opI32Const:
		r.leb(5)
	case op == opI64Const:
		r.leb(10)
	case op == opF32Const:
		r.skip(4)
	case op == opF64Const:
		r.skip(8)
	case op == opRefNull:
		r.referenceType()
	case op == opRefFunc:
		in.index = r.index("function", len(m.functionTypes))
	case op == prefixMisc:
		m.miscellaneous(r, &in)
	case op == prefixVector:
		in.misc = vector(r)
	case op <= 0x01 || op == opElse || op == opEnd || op == 0x0f || // unreachable, nop, else, end, return
		op == 0x1a || op == 0x1b || // drop, select
		op >= opI32Eqz && op <= opI64Extend32 || op == opRefIsNull:
	default:
		r.fail(fmt.Errorf("unknown instruction %#x", op))
	}
	return in
}

// blockType reads the type of a block: empty, one value, or the index of a function type.
func (m *Module) blockType(r *reader, in *instruction) {
	if !r.more() {
		r.fail(errEnd)
		return
	}
	switch c := r.data[r.pos]; {
	case c == 0x40:
		r.pos++
	case c >= 0x40 && c < 0x80: // a negative number of one byte
		r.valueType()
		in.arity, in.results = 1, 1
	default:
		if i := r.index("type", len(m.types)); r.err == nil {
			in.params, in.results = m.types[i].params, m.types[i].results
			in.arity = m.types[i].arity()
		}
	}
}

// miscellaneous reads an instruction after prefixMisc.
func (m *Module) miscellaneous(r *reader, in *instruction) {
	in.misc = r.byte()
	switch in.misc {
	case miscMemoryInit, miscDataDrop:
		in.index = r.u32()
	case miscTableInit, miscElemDrop:
		in.index = r.u32()
	case miscTableCopy, miscTableGrow, miscTableSize, miscTableFill:
		in.index = r.index("table", len(m.Tables))
	}
	switch in.misc {
	case miscTableInit:
		// The table follows the segment.
		in.index = r.index("table", len(m.Tables))
	case miscTableCopy:
		r.index("table", len(m.Tables))
	case miscMemoryInit, miscMemoryFill:
		r.skip(1)
	case miscMemoryCopy:
		r.skip(2)
	}
	if in.misc > miscTableFill {
		r.fail(fmt.Errorf("unknown instruction %#x %#x", prefixMisc, in.misc))
	}
}

// vector reads an instruction after prefixVector. Its code has one byte in the engine: the second
// byte of a longer code is 1, which the engine reads as nop.
func vector(r *reader) (code byte) {
	switch code = r.byte(); {
	case code <= 0x0b, code == 0x5c, code == 0x5d: // loads and stores
		r.u32()
		r.u32()
	case code == 0x0c, code == 0x0d: // v128.const, i8x16.shuffle
		r.skip(16)
	case code >= 0x15 && code <= 0x22: // lanes
		r.skip(1)
	case code >= 0x54 && code <= 0x5b: // loads and stores of a lane
		r.u32()
		r.u32()
		r.skip(1)
	}
	return code
}

// constant reads a constant expression up to its end. It calls function for each index of a
// function with the place of the index.
func (m *Module) constant(r *reader, function func(at, end int, index uint32)) {
	for r.err == nil {
		switch op := r.byte(); op {
		case opEnd:
			return
		case opI32Const:
			r.leb(5)
		case opI64Const:
			r.leb(10)
		case opF32Const:
			r.skip(4)
		case opF64Const:
			r.skip(8)
		case opGlobalGet:
			r.index("global", m.globals)
		case opRefNull:
			r.referenceType()
		case opRefFunc:
			at := r.pos
			index := r.index("function", len(m.functionTypes))
			if r.err == nil {
				function(at, r.pos, index)
			}
		case prefixVector:
			if r.byte() != 0x0c { // v128.const
				r.fail(fmt.Errorf("unknown instruction in a constant"))
			}
			r.skip(16)
		default:
			r.fail(fmt.Errorf("unknown instruction %#x in a constant", op))
		}
	}
}
