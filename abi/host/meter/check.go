package meter

import (
	"errors"
	"fmt"
	"strconv"
)

// The limits of one function. The time and the memory of the engine's compiler grow with the square
// of some of these numbers. The largest functions of programs of 15 MB have a tenth to a third.
const (
	maxVariables = 5_000 // parameters and local variables
	maxEdges     = 25_000
	maxLoops     = 100       // nested in each other
	maxMemory    = 256 << 20 // see size.memory
	maxEach      = 4_000_000 // see size.work
)

// The limits of a module. maxWork bounds the time of compilation, the others the memory of the
// module's description.
const (
	maxWork      = 30_000_000 // see size.work
	maxTypes     = 20_000
	maxArity     = 1_000 // parameters and results of one type
	maxValues    = 200_000
	maxFunctions = 100_000
	maxLocals    = 10_000_000 // local variables of all functions
	maxTables    = 1_000
	maxGlobals   = 50_000
	maxExports   = 10_000
	maxImports   = 10_000
	maxElements  = 500_000
	maxSegments  = 100_000
	maxNames     = 4 << 20 // bytes of the name section
)

// ErrTooLarge is the error of a module whose compilation would take too much time or memory.
var ErrTooLarge = errors.New("the module is too large to compile")

// work estimates the time of a function's compilation at most: 1 is about a microsecond. The
// divisors come from measurements of the shapes in the tests.
func (s *size) work() int {
	return s.instructions + s.edges*s.edges/512 + s.live/16 + s.merges/32768*(8+s.loops) +
		s.phis/2048*s.copies + s.lookups/40 + s.bounds/16
}

// memory estimates the bytes that the compilation of a function takes at most, in the same way.
func (s *size) memory() int { return 600*s.instructions + 2500*s.edges + 80*s.live + 26*s.bounds }

// Check returns the number of goroutines that may compile the module at the same time, from 1 to
// workers, so that their memory stays below the limit of one function. The error, with ErrTooLarge,
// says that the compilation would take too much time or memory. It names the function and the limit.
func (m *Module) Check(workers int) (allowed int, err error) {
	if err := m.checkLists(); err != nil {
		return 0, err
	}
	globals := m.mutableGlobals()
	work, memory, locals := 0, 1, uint64(0)
	for i := range m.Functions {
		f := &m.Functions[i]
		if n := uint64(f.Params) + f.Locals; n > maxVariables {
			return 0, m.tooLarge(i, "variables", n, maxVariables)
		}
		if locals += f.Locals; locals > maxLocals {
			return 0, m.tooLarge(i, "local variables, with the functions before it", locals, maxLocals)
		}
		s := m.sizeOf(f, globals)
		for _, l := range []struct {
			what    string
			n, most int
		}{
			{"branches between blocks", s.edges, maxEdges}, {"nested loops", s.loops, maxLoops},
			{"bytes of estimated memory for its compilation", s.memory(), maxMemory},
			{"microseconds of estimated work", s.work(), maxEach},
		} {
			if l.n > l.most {
				return 0, m.tooLarge(i, l.what, uint64(l.n), l.most)
			}
		}
		memory = max(memory, s.memory())
		if work += s.work() + (m.globals+int(f.Locals))/16; work > maxWork { // the compiler declares all variables in each function
			return 0, m.tooLarge(i, "microseconds of estimated work, with the functions before it", uint64(work), maxWork)
		}
	}
	return max(1, min(workers, maxMemory/memory)), nil
}

// checkLists checks the parts of a module outside of its functions.
func (m *Module) checkLists() error {
	values, segments := 0, 0
	for _, t := range m.types {
		if t.arity() > maxArity {
			return fmt.Errorf("%w: a type has %d parameters and results, the limit is %d", ErrTooLarge, t.arity(), maxArity)
		}
		values += t.arity()
	}
	for _, s := range m.sections {
		if s.id == sectionData {
			segments = (&reader{data: s.data}).count()
		}
	}
	for _, l := range []struct {
		what    string
		n, most int
	}{
		{"types", len(m.types), maxTypes}, {"parameters and results of types", values, maxValues}, {"functions", len(m.Functions), maxFunctions},
		{"imported functions", m.Imports, maxImports}, {"tables", len(m.Tables), maxTables}, {"globals", m.globals, maxGlobals},
		{"exports", m.Exports, maxExports}, {"elements", m.Elements, maxElements}, {"data segments", segments, maxSegments},
		{"bytes of names", len(m.nameSection()), maxNames},
	} {
		if l.n > l.most {
			return fmt.Errorf("%w: it has %d %s, the limit is %d", ErrTooLarge, l.n, l.what, l.most)
		}
	}
	return nil
}

// tooLarge returns the error of a function beyond a limit.
func (m *Module) tooLarge(function int, what string, n uint64, most int) error {
	name := strconv.Itoa(m.Imports + function)
	if text := m.nameOf(uint32(m.Imports + function)); text != "" {
		name += fmt.Sprintf(" (%.80q)", text)
	}
	return fmt.Errorf("%w: function %s has %d %s, the limit is %d", ErrTooLarge, name, n, what, most)
}

// mutableGlobals returns the number of globals that may be mutable. All imported ones may.
func (m *Module) mutableGlobals() int {
	n := m.globals
	for _, s := range m.sections {
		if s.id != sectionGlobal {
			continue
		}
		r := &reader{data: s.data}
		for range r.count() {
			r.valueType()
			if r.byte() == 0 {
				n--
			}
			m.constant(r, func(int, int, uint32) {})
		}
	}
	return n
}

// nameSection returns the content of the name section behind its own name; nil: there is none.
// The engine reads only the first one, and does not accept a second one.
func (m *Module) nameSection() []byte {
	for _, s := range m.sections {
		if s.id == sectionCustom {
			if r := (&reader{data: s.data}); string(r.bytes()) == "name" {
				return s.data[r.pos:]
			}
		}
	}
	return nil
}

// nameOf returns the name of a function; "" when it has none.
func (m *Module) nameOf(function uint32) string {
	r := &reader{data: m.nameSection()}
	for r.more() {
		id := r.byte()
		if body := (&reader{data: r.bytes()}); id == namesFunctions {
			for range body.count() {
				if i, name := body.u32(), body.bytes(); i == function {
					return string(name)
				}
			}
		}
	}
	return ""
}
