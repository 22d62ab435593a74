package meter

import "math"

// The weights are rough units of time: 1 is the time of a simple instruction.
const (
	weightLoad   = 4 // often waits for memory
	weightDivide = 10
	weightCall   = 32
	weightGrow   = 500 // leaves the guest's code

	// weightLeaf is the weight of a function that needs no check at its entry, because its callers
	// pay weightCall for it.
	weightLeaf = weightCall

	// weightFrame is the weight of one value that a function may keep on the stack. So the number of
	// checks bounds how fast the stack grows.
	weightFrame = 4

	// maxWeight is the largest weight of one check.
	maxWeight = 1 << 30
)

// uses are the instructions of a function that need help.
type uses uint8

const (
	usesGrow   uses = 1 << iota // memory.grow, table.grow
	usesFill                    // memory.fill
	usesCopy                    // memory.copy
	usesCharge                  // the others whose time depends on an operand
)

func usesOf(misc byte) uses {
	switch misc {
	case miscMemoryFill:
		return usesFill
	case miscMemoryCopy:
		return usesCopy
	case miscMemoryInit, miscTableInit, miscTableCopy, miscTableFill:
		return usesCharge
	case miscTableGrow:
		return usesGrow
	}
	return 0
}

// label is an open block of a function.
type label struct {
	region int // whose weight the block's instructions have
	arity  int // values that a branch to the label carries
}

// meter is the state of metering one function.
type meter struct {
	labels  []label
	weights []int // of the function and then of its loops, in their order
}

// weigh computes the weights of a function: of its entry and of each loop, without the loops
// inside.
func (m *Module) weigh(f *Function, s *meter) {
	s.labels = append(s.labels[:0], label{0, f.Results})
	s.weights = append(s.weights[:0], 1)
	r := &reader{data: f.code, pos: f.body}
	for len(s.labels) > 0 {
		in := m.instruction(r)
		region := s.labels[len(s.labels)-1].region
		s.weights[region] = min(s.weights[region]+weight(in, s.labels), maxWeight)
		switch in.op {
		case opBlock, opIf:
			s.labels = append(s.labels, label{region, in.results})
		case opLoop:
			s.labels = append(s.labels, label{len(s.weights), in.params})
			s.weights = append(s.weights, 1)
		case opEnd:
			s.labels = s.labels[:len(s.labels)-1]
		}
	}
	if f.light(s.weights[0]) {
		s.weights[0] = 0
		return
	}
	if f.Calls > 0 {
		s.weights[0] = min(s.weights[0]+weightFrame*f.frame(), maxWeight)
	}
}

// light reports whether a function needs no check.
func (f *Function) light(weight int) bool {
	return f.Calls == 0 && f.Loops == 0 && f.bulk == 0 && weight <= weightLeaf
}

// frame estimates the values that a call of the function keeps on the stack. Each value that an
// instruction makes needs another instruction that keeps or takes it. A block may have a value of
// its own for each variable.
func (f *Function) frame() int {
	variables := float64(f.Params) + float64(f.Locals)
	blocks := float64(f.Blocks + f.Loops)
	return int(min(float64(f.Instructions/2+f.Arity)+variables*(1+blocks/8), math.MaxInt32))
}

// weight returns the weight of an instruction inside labels.
func weight(in instruction, labels []label) int {
	switch op := in.op; {
	case op >= opI32Load && op <= 0x35, op == prefixVector:
		return weightLoad
	case op >= 0x6d && op <= 0x70, op >= 0x7f && op <= 0x82, // division of integers
		op == 0x91, op == 0x95, op == 0x9f, op == 0xa3: // division and square root of floats
		return weightDivide
	case op == opCall, op == opCallIndirect:
		return weightCall + in.arity
	case op == opMemoryGrow, op == prefixMisc && in.misc > 0x07:
		return weightGrow
	case op == opBr, op == opBrIf, op == opBrTable:
		if i := len(labels) - 1 - int(in.index); i >= 0 {
			return 1 + labels[i].arity
		}
	}
	return 1 + in.arity
}
