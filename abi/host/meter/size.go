package meter

// size is the measure of a function for the engine's compiler, with the checks that Meter adds.
type size struct {
	// instructions counts instructions, the values that calls and blocks take and give, and more for
	// instructions of which the compiler makes many, see extra.
	instructions int
	// edges counts the ways from one basic block to another.
	edges int
	// live is the sum over all edges of the values that may live there: variables and operands.
	live int
	// merges is the sum over all edges of the square of the variables. A variable may need a new
	// value in each block, which the compiler compares with those of all edges to the block.
	merges int
	// loops is the deepest nesting of loops.
	loops int
	// phis is the work of one round in which the compiler looks for superfluous values at blocks with
	// several predecessors: the square of the values, for each predecessor. copies counts copies of a
	// variable to another one, for each loop around them: there are as many rounds at most.
	phis, copies int
	// lookups is the sum of the blocks in which the compiler looks for the value of a variable.
	lookups int
	// bounds is the sum over all blocks of the addresses whose bounds have been checked before.
	bounds int
}

// checkInstructions and checkEdges are the size of a check that Meter adds, without the globals
// that the compiler loads again after a call.
const (
	checkInstructions = 20
	checkEdges        = 3
	bulkEdges         = 8 // of an operation on a range of memory or of a table, which may be a loop
)

// engineVariables are variables of the compiler's own, such as the place of the memory.
const engineVariables = 4

// frame is an open block.
type frame struct {
	height  int // of the operand stack below its parameters
	params  int
	results int
	loop    bool
	half    bool // an if without else, as yet
	flow         // at its beginning
	sets    int  // before its beginning
	joint   joint
}

// measure is the state of measuring one function.
type measure struct {
	size
	flow
	blocks    []frame
	height    int // of the operand stack, at most
	variables int
	locals    int  // variables of the function itself
	globals   int  // mutable ones, which are variables, too
	nested    int  // open loops
	sets      int  // assignments to variables
	computed  bool // the operand on top of the stack is the result of a computation
}

func (s *measure) edge(n int) {
	s.edges += n
	s.live += n * (s.height + s.variables)
	s.merges += n * s.variables * s.variables
}

func (s *measure) check() {
	s.instructions += checkInstructions + s.globals
	s.edge(checkEdges)
	s.enter()
	s.enter()
	s.chain = 0
}

// sizeOf measures a function in a module with that many mutable globals. f.Locals is at most
// maxVariables.
func (m *Module) sizeOf(f *Function, globals int) size {
	// A variable that no instruction uses costs nothing in blocks.
	used := min(f.Params+int(f.Locals)+globals, f.Instructions)
	s := &measure{variables: used + engineVariables, locals: min(f.Params+int(f.Locals), f.Instructions), globals: globals}
	s.check()
	s.blocks = append(s.blocks, frame{results: f.Results, joint: joint{tables: -1}})
	r := &reader{data: f.code, pos: f.body}
	for len(s.blocks) > 0 && r.err == nil {
		m.add(s, m.instruction(r))
	}
	return s.size
}

// add counts an instruction.
func (m *Module) add(s *measure, in instruction) {
	s.instructions += 1 + in.arity
	switch in.op {
	case opBlock, opLoop, opIf:
		m.open(s, in)
	case opElse:
		b := &s.blocks[len(s.blocks)-1]
		s.height = b.height + b.params
		s.edge(2)
		s.enter()
		s.leave(b)
		s.flow, b.half = b.flow, false
	case opEnd:
		b := s.blocks[len(s.blocks)-1]
		s.blocks = s.blocks[:len(s.blocks)-1]
		s.height = b.height + b.results
		s.edge(1)
		s.arrive(&b)
		if b.loop {
			s.nested--
		}
	case opBr, opBrIf:
		s.edge(2)
		s.instructions += m.carried(s, in)
		s.height -= int(in.op - opBr) // br_if takes a condition
		if i := len(s.blocks) - 1 - int(in.index); i >= 0 {
			s.leave(&s.blocks[i])
		}
		s.enter()
		s.dead = s.dead || in.op == opBr
	case opBrTable:
		s.edge(in.targets)
		s.instructions += in.targets * m.carried(s, in)
		s.height--
		s.leaveTable(in)
		s.dead = true
	default:
		m.addPlain(s, in)
	}
	s.height = max(s.height, 0)
	s.computed = m.computes(s, in)
}

// open counts the beginning of a block.
func (m *Module) open(s *measure, in instruction) {
	if in.op == opIf {
		s.height--
		s.enter()
	}
	params := in.arity - in.results
	s.edge(2)
	b := frame{height: max(s.height-params, 0), params: params, results: in.results, loop: in.op == opLoop, half: in.op == opIf, flow: s.flow, sets: s.sets, joint: joint{tables: -1}}
	if in.op == opIf {
		s.leave(&b) // or else, whose condition is the same
	}
	s.blocks = append(s.blocks, b)
	if in.op == opLoop {
		s.enter()
		s.nested++
		s.loops = max(s.loops, s.nested)
		s.copies += params
		s.check()
	}
}

// addPlain counts an instruction that is no block and no branch.
func (m *Module) addPlain(s *measure, in instruction) {
	switch op := in.op; {
	case op == 0x00 || op == 0x0f: // unreachable, return
		s.dead = true
	case op == opCall || op == opCallIndirect:
		s.instructions += s.globals
		s.edge(1)
	case op == opLocalGet || op == opGlobalGet:
		s.find(1)
	case op == opLocalSet || op == opLocalTee:
		s.sets++
		if !s.computed {
			s.copies += s.nested
		}
	case accesses(in):
		s.find(2) // the place and the size of the memory
		s.known++
	case op == prefixMisc && in.misc >= miscMemoryInit:
		s.edge(bulkEdges)
	}
	s.instructions += extra(in)
	s.height += m.delta(in)
}

// accesses reports whether an instruction loads or stores memory at an address.
func accesses(in instruction) bool {
	return in.op >= opI32Load && in.op <= opI64Store32 || in.op == prefixVector && (in.misc <= 0x0b || in.misc >= 0x54 && in.misc <= 0x5d)
}

// computes reports whether the operand on top of the stack behind an instruction is a new value. A
// copy of such a value is never superfluous.
func (m *Module) computes(s *measure, in instruction) bool {
	switch op := in.op; {
	case op == opLocalTee:
		return s.computed
	case op == opCall:
		return m.types[m.functionTypes[in.index]].results > 0
	case op == opCallIndirect:
		return m.types[in.index].results > 0
	case op == prefixMisc:
		return in.misc < miscMemoryInit
	}
	return in.op >= opI32Load && in.op <= 0x35 || in.op >= opMemorySize && in.op <= opI64Extend32 || in.op == opGlobalGet
}

// carried returns the most values that a branch carries: those of a label of br_table are as many
// as those of its other labels.
func (m *Module) carried(s *measure, in instruction) int {
	i := len(s.blocks) - 1 - int(in.index)
	switch {
	case i < 0:
		return 0
	case s.blocks[i].loop:
		return s.blocks[i].params
	}
	return s.blocks[i].results
}

// extra returns how many more instructions the compiler makes of an instruction.
func extra(in instruction) int {
	switch op := in.op; {
	case op == opCallIndirect, op == 0x96, op == 0x97, op == 0xa4, op == 0xa5, // smaller or larger float
		op >= 0xa8 && op <= 0xb1: // floats to integers, which may trap in three ways
		return 16
	case op == prefixMisc && in.misc >= miscMemoryInit:
		return 32
	case op >= opI32Load && op <= opMemoryGrow, op == opTableGet, op == opTableSet,
		op >= 0x6d && op <= 0x70, op >= 0x7f && op <= 0x82, // division of integers
		op == prefixMisc, op == prefixVector:
		return 8
	}
	return 0
}

// delta returns by how much an instruction that is no block and no branch changes the height of
// the operand stack, at most.
func (m *Module) delta(in instruction) int {
	switch op := in.op; {
	case op == opCall:
		t := m.types[m.functionTypes[in.index]]
		return t.results - t.params
	case op == opCallIndirect:
		t := m.types[in.index]
		return t.results - t.params - 1
	case op == opLocalGet, op == opGlobalGet, op == opMemorySize, op >= opI32Const && op <= opF64Const,
		op == opRefNull, op == opRefFunc, op == prefixMisc && in.misc == miscTableSize:
		return 1
	case op == prefixVector:
		return 1 // v128.const makes a value, no other instruction makes more than it takes
	case op == opLocalSet, op == opGlobalSet, op == 0x1a, // drop
		op >= 0x46 && op <= 0x4f, op >= 0x51 && op <= 0x66, // comparisons
		op >= 0x6a && op <= 0x78, op >= 0x7c && op <= 0x8a, // integers
		op >= 0x92 && op <= 0x98, op >= 0xa0 && op <= 0xa6: // floats
		return -1
	case op == 0x1b, op == opSelectTyped, op == opTableSet, op >= 0x36 && op <= opI64Store32: // select, stores
		return -2
	case op == prefixMisc && in.misc == miscTableGrow:
		return -1
	case op == prefixMisc && in.misc >= miscMemoryInit && in.misc != miscDataDrop && in.misc != miscElemDrop:
		return -3
	}
	return 0
}
