// Package meter reads WebAssembly modules and adds meters to them: checks that give the host the
// control back after a number of instructions.
//
// The decisions behind this package are in docs/design/plugins.md.
package meter

import (
	"bytes"
	"errors"
	"fmt"
)

// The sections of a module.
const (
	sectionCustom    = 0
	sectionType      = 1
	sectionImport    = 2
	sectionFunction  = 3
	sectionTable     = 4
	sectionMemory    = 5
	sectionGlobal    = 6
	sectionExport    = 7
	sectionStart     = 8
	sectionElement   = 9
	sectionCode      = 10
	sectionData      = 11
	sectionDataCount = 12
)

var sectionNames = []string{"custom", "type", "import", "function", "table", "memory", "global", "export",
	"start", "element", "code", "data", "data count"}

// sectionOrder gives the order of the sections in a module.
var sectionOrder = []int{sectionType: 1, sectionImport: 2, sectionFunction: 3, sectionTable: 4, sectionMemory: 5,
	sectionGlobal: 6, sectionExport: 7, sectionStart: 8, sectionElement: 9, sectionDataCount: 10, sectionCode: 11, sectionData: 12}

// The kinds of imports and exports.
const (
	kindFunction = 0
	kindTable    = 1
	kindMemory   = 2
	kindGlobal   = 3
)

var preamble = []byte("\x00asm\x01\x00\x00\x00")

// Module is the structure of a module. It refers to the module's bytes.
type Module struct {
	// Functions are the functions that the module defines, without its imports.
	Functions []Function
	// Tables are all tables, imported ones first.
	Tables []Limits
	// Types, Globals, Elements and Exports are the numbers of function types, of globals with the
	// imported ones, of references in all element segments, and of exports.
	Types, Globals, Elements, Exports int
	// Imports is the number of imported functions.
	Imports       int
	types         []functionType
	functionTypes []uint32 // of all functions, imported ones first
	globals       int
	codes         int
	start         int // -1: none
	sections      []section
	references    []reference
	joined        bool // JoinData has changed a section
}

// Function is the size of one function.
type Function struct {
	// Bytes is the size of the code.
	Bytes int
	// Params and Results are the numbers of values in its type.
	Params, Results int
	// Locals is the number of local variables without parameters.
	Locals uint64
	// Instructions counts all instructions, with the ends of blocks.
	Instructions int
	// Blocks counts blocks and ifs, Loops the loops. Depth is the deepest nesting of both.
	Blocks, Loops, Depth int
	// Targets is the number of labels in all br_table instructions.
	Targets int
	// Branches counts br, br_if and br_table, Calls direct and indirect calls.
	Branches, Calls int
	// Arity is the number of values that all blocks and calls take and give.
	Arity int

	bulk uses   // instructions whose time depends on an operand
	code []byte // locals and instructions
	body int    // place of the instructions in code
}

// Limits are the limits of a table, in entries, or of a memory, in pages.
type Limits struct {
	Min, Max uint32
	HasMax   bool
}

type functionType struct{ params, results int }

func (t functionType) arity() int { return t.params + t.results }

type section struct {
	id   byte
	data []byte
}

// reference is the index of a function outside the code: in a global, an export, the start
// section or an element segment.
type reference struct {
	section int // index in sections
	at, end int // place of the index in the section
	index   uint32
}

// Read reads a module with the features of WebAssembly 2.0. It checks the structure and that
// the indices of functions, types, tables and globals exist; the engine checks the rest. Its memory
// is in proportion to the size of the module.
func Read(wasm []byte) (*Module, error) {
	rest, ok := bytes.CutPrefix(wasm, preamble)
	if !ok {
		return nil, errors.New("the file is not a WebAssembly module of version 1")
	}
	m := &Module{start: -1}
	outer := &reader{data: rest}
	last := 0
	for outer.more() {
		id := outer.byte()
		data := outer.bytes()
		if outer.err != nil {
			return nil, outer.err
		}
		if int(id) >= len(sectionNames) {
			return nil, fmt.Errorf("unknown section %d", id)
		}
		if id != sectionCustom {
			if sectionOrder[id] <= last {
				return nil, fmt.Errorf("section %s is out of order", sectionNames[id])
			}
			last = sectionOrder[id]
		}
		m.sections = append(m.sections, section{id, data})
		r := &reader{data: data}
		m.section(r, id)
		if r.err == nil && r.more() {
			r.err = errors.New("bytes after the end")
		}
		if r.err != nil {
			return nil, fmt.Errorf("section %s: %w", sectionNames[id], r.err)
		}
	}
	if m.codes != len(m.functionTypes)-m.Imports {
		return nil, fmt.Errorf("%d functions have %d bodies", len(m.functionTypes)-m.Imports, m.codes)
	}
	m.Types, m.Globals = len(m.types), m.globals
	return m, nil
}

// section reads a section.
func (m *Module) section(r *reader, id byte) {
	if id == sectionStart {
		m.start = int(m.functionReference(r))
		if r.err == nil && m.types[m.functionTypes[m.start]].arity() != 0 {
			r.fail(errors.New("the start function has parameters or results"))
		}
		return
	}
	if id == sectionCustom || id == sectionDataCount || id == sectionMemory {
		r.pos = len(r.data) // the engine reads them
		return
	}
	n := r.count()
	if id == sectionGlobal {
		m.globals += n
	}
	for i := 0; i < n && r.err == nil; i++ {
		switch id {
		case sectionType:
			m.functionType(r)
		case sectionImport:
			m.importOne(r)
		case sectionFunction:
			m.functionTypes = append(m.functionTypes, r.index("type", len(m.types)))
		case sectionTable:
			m.table(r)
		case sectionGlobal:
			r.valueType()
			r.byte()
			m.constant(r, m.refer)
		case sectionExport:
			m.export(r)
		case sectionElement:
			m.element(r)
		case sectionCode:
			m.code(r)
		case sectionData:
			m.datum(r)
		}
	}
}

func (m *Module) functionType(r *reader) {
	if form := r.byte(); r.err == nil && form != 0x60 {
		r.fail(fmt.Errorf("unknown form of type %#x", form))
	}
	var counts [2]int
	for i := range counts {
		counts[i] = r.count()
		for j := 0; j < counts[i] && r.err == nil; j++ {
			r.valueType()
		}
	}
	m.types = append(m.types, functionType{counts[0], counts[1]})
}

func (m *Module) importOne(r *reader) {
	module := r.bytes()
	r.bytes()
	if string(module) == ImportModule {
		r.fail(fmt.Errorf("the name of the module %s is reserved", ImportModule))
	}
	switch kind := r.byte(); kind {
	case kindFunction:
		m.functionTypes = append(m.functionTypes, r.index("type", len(m.types)))
		m.Imports++
	case kindTable:
		m.table(r)
	case kindMemory:
		r.limits()
	case kindGlobal:
		r.valueType()
		r.byte()
		m.globals++
	default:
		r.fail(fmt.Errorf("unknown kind of import %#x", kind))
	}
}

func (m *Module) table(r *reader) {
	r.valueType()
	m.Tables = append(m.Tables, r.limits())
}

func (m *Module) export(r *reader) {
	r.bytes()
	m.Exports++
	switch kind := r.byte(); kind {
	case kindFunction:
		m.functionReference(r)
	case kindTable:
		r.index("table", len(m.Tables))
	case kindMemory:
		r.u32()
	case kindGlobal:
		r.index("global", m.globals)
	default:
		r.fail(fmt.Errorf("unknown kind of export %#x", kind))
	}
}

// element reads an element segment. The bits of its kind: passive or declarative, with a table or
// declarative, with expressions.
func (m *Module) element(r *reader) {
	kind := r.u32()
	if kind > 7 {
		r.fail(fmt.Errorf("unknown kind of element segment %d", kind))
	}
	active, explicit, expressions := kind&1 == 0, kind&2 != 0, kind&4 != 0
	if active {
		if explicit {
			r.index("table", len(m.Tables))
		}
		m.constant(r, m.refer)
	}
	switch {
	case active && !explicit: // functions
	case expressions:
		r.referenceType()
	case r.byte() != 0:
		r.fail(errors.New("unknown kind of elements"))
	}
	n := r.count()
	m.Elements += n
	for i := 0; i < n && r.err == nil; i++ {
		if expressions {
			m.constant(r, m.refer)
		} else {
			m.functionReference(r)
		}
	}
}

// datum reads a data segment.
func (m *Module) datum(r *reader) {
	switch kind := r.u32(); kind {
	case 0:
		m.constant(r, m.refer)
	case 1: // passive
	case 2:
		r.u32()
		m.constant(r, m.refer)
	default:
		r.fail(fmt.Errorf("unknown kind of data segment %d", kind))
	}
	r.bytes()
}

// functionReference reads the index of a function.
func (m *Module) functionReference(r *reader) uint32 {
	at := r.pos
	index := r.index("function", len(m.functionTypes))
	if r.err == nil {
		m.refer(at, r.pos, index)
	}
	return index
}

func (m *Module) refer(at, end int, index uint32) {
	m.references = append(m.references, reference{len(m.sections) - 1, at, end, index})
}

// code reads the body of a function.
func (m *Module) code(r *reader) {
	i := m.Imports + m.codes
	m.codes++
	if i >= len(m.functionTypes) {
		r.fail(errors.New("more bodies than functions"))
		return
	}
	t := m.types[m.functionTypes[i]]
	f := Function{Params: t.params, Results: t.results, code: r.bytes()}
	f.Bytes = len(f.code)
	body := &reader{data: f.code}
	for range body.count() {
		f.Locals += uint64(body.u32())
		body.valueType()
	}
	f.body = body.pos
	m.walk(body, &f)
	if body.err != nil {
		r.fail(fmt.Errorf("function %d: %w", i, body.err))
		return
	}
	m.Functions = append(m.Functions, f)
}

// walk reads the instructions of a function.
func (m *Module) walk(r *reader, f *Function) {
	depth := 1
	for depth > 0 && r.err == nil {
		in := m.instruction(r)
		f.Instructions++
		f.Arity += in.arity
		switch in.op {
		case opBlock, opIf, opLoop:
			if in.op == opLoop {
				f.Loops++
			} else {
				f.Blocks++
			}
			f.Depth = max(f.Depth, depth)
			depth++
		case opEnd:
			depth--
		case opBr, opBrIf, opBrTable:
			f.Branches++
			f.Targets += in.targets
		case opCall, opCallIndirect:
			f.Calls++
		case opMemoryGrow:
			f.bulk |= usesGrow
		case prefixMisc:
			f.bulk |= usesOf(in.misc)
		}
	}
	if r.err == nil && r.more() {
		r.fail(errors.New("bytes after the end"))
	}
}
