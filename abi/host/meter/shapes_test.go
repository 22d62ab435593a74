package meter

import (
	"encoding/binary"
	"slices"
)

// A shape is a kind of module that costs the compiler much. Its function returns the module with
// n units.
type shape struct {
	name string
	make func(n int) []byte
}

func leb(n int) []byte { return binary.AppendUvarint(nil, uint64(n)) }

func joined(parts ...[]byte) []byte { return slices.Concat(parts...) }

// repeat returns n times the bytes of f(i).
func repeat(n int, f func(i int) []byte) (out []byte) {
	for i := range n {
		out = append(out, f(i)...)
	}
	return out
}

func same(code ...byte) func(int) []byte { return func(int) []byte { return code } }

func part(id byte, entries int, data []byte) []byte {
	data = joined(leb(entries), data)
	return joined([]byte{id}, leb(len(data)), data)
}

// blueprint is a module with one large function, or n equal ones, of type (i32) -> i32.
type blueprint struct {
	functions int // 0: 1
	types     []byte
	nTypes    int // further types, from index 2
	locals    int
	globals   int
	tables    int
	code      []byte // without the end; the stack holds one i32 at the end
	extra     []byte // sections after the code
}

func (b blueprint) module() []byte {
	functions := max(b.functions, 1)
	locals := []byte{0}
	if b.locals > 0 {
		locals = joined([]byte{1}, leb(b.locals), []byte{0x7f})
	}
	body := joined(locals, b.code, []byte{opEnd})
	body = joined(leb(len(body)), body)
	allocate := []byte{4, 0, opLocalGet, 0, opEnd}
	out := joined(preamble,
		part(sectionType, 2+b.nTypes, joined([]byte{0x60, 0, 0, 0x60, 1, 0x7f, 1, 0x7f}, b.types)),
		part(sectionFunction, 2+functions, joined([]byte{0, 1}, repeat(functions, same(1)))),
		part(sectionTable, 1+b.tables, repeat(1+b.tables, same(0x70, 0, 0))),
		part(sectionMemory, 1, []byte{0, 2}),
		part(sectionGlobal, b.globals, repeat(b.globals, same(0x7f, 1, opI32Const, 0, opEnd))),
		part(sectionExport, 3, joined(
			leb(23), []byte("proxy_abi_version_0_2_1"), []byte{kindFunction, 0},
			leb(24), []byte("proxy_on_memory_allocate"), []byte{kindFunction, 1},
			leb(6), []byte("memory"), []byte{kindMemory, 0})),
		part(sectionCode, 2+functions, joined([]byte{2, 0, opEnd}, allocate, repeat(functions, same(body...)))))
	return joined(out, b.extra)
}

var shapes = []shape{
	{"additions", func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, same(opI32Const, 1, opI32Add)))}.module()
	}},
	{"loads", func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, same(opI32Load, 2, 0)))}.module()
	}},
	{"live constants", func(n int) []byte {
		return blueprint{code: joined(repeat(n+1, same(opLocalGet, 0, 0x67)), repeat(n, same(opI32Add)))}.module()
	}},
	{"blocks", func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, same(opBlock, typeEmpty, opLocalGet, 0, opBrIf, 0, opEnd)))}.module()
	}},
	{"loops", func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, same(opLoop, typeEmpty, opLocalGet, 0, opBrIf, 0, opEnd)))}.module()
	}},
	{"deep blocks", func(n int) []byte {
		return blueprint{code: joined(repeat(n, same(opBlock, typeEmpty)), repeat(n, same(opLocalGet, 0, opBrIf, 0, opEnd)), []byte{opLocalGet, 0})}.module()
	}},
	{"deep loops", func(n int) []byte {
		return blueprint{code: joined(repeat(n, same(opLoop, typeEmpty)), repeat(n, same(opLocalGet, 0, opBrIf, 0, opEnd)), []byte{opLocalGet, 0})}.module()
	}},
	{"deep loops with variables", func(n int) []byte {
		return blueprint{locals: 30, code: joined(repeat(n, same(opLoop, typeEmpty)),
			repeat(n, func(i int) []byte {
				return []byte{opLocalGet, byte(i % 30), opI32Const, 1, opI32Add, 0x21, byte(i*7%30) + 1, opLocalGet, byte(i*3%30) + 1, opBrIf, 0, opEnd}
			}), repeat(30, func(i int) []byte { return []byte{opLocalGet, byte(i), 0x1a} }), []byte{opLocalGet, 0})}.module()
	}},
	{"deep ifs", func(n int) []byte {
		return blueprint{locals: 10, code: joined(repeat(n, same(opLocalGet, 0, opIf, typeEmpty)),
			repeat(n, func(i int) []byte { return []byte{opI32Const, 5, 0x21, byte(i%10) + 1, opElse, opEnd} }), repeat(10, func(i int) []byte { return []byte{opLocalGet, byte(i), 0x1a} }), []byte{opLocalGet, 0})}.module()
	}},
	{"br_table", func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, func(int) []byte {
			return joined([]byte{opBlock, typeEmpty, opLocalGet, 0, opBrTable}, leb(1000), make([]byte, 1001), []byte{opEnd})
		}))}.module()
	}},
	{"br_table to many blocks", func(n int) []byte {
		return blueprint{code: joined(repeat(n, same(opBlock, typeEmpty)), []byte{opLocalGet, 0, opBrTable}, leb(n-1), repeat(n, func(i int) []byte { return leb(i) }), repeat(n, same(opEnd)), []byte{opLocalGet, 0})}.module()
	}},
	{"br_table with variables", func(n int) []byte {
		// Each variable differs on each way.
		return blueprint{locals: 50, code: joined(repeat(n, same(opBlock, typeEmpty)), []byte{opLocalGet, 0, opBrTable}, leb(n-1), repeat(n, func(i int) []byte { return leb(i) }),
			repeat(n, func(i int) []byte { return []byte{opEnd, opLocalGet, 0, opI32Const, 1, opI32Add, 0x21, byte(1 + i%50)} }),
			repeat(50, func(i int) []byte { return []byte{opLocalGet, byte(i), 0x1a} }), []byte{opLocalGet, 0})}.module()
	}},
	{"br_table with values", func(n int) []byte {
		// The label takes 50 values.
		return blueprint{nTypes: 1, types: joined([]byte{0x60, 0, 50}, repeat(50, same(0x7f))), code: joined(repeat(n, func(int) []byte {
			return joined([]byte{opBlock, 2}, repeat(50, same(opLocalGet, 0)), []byte{opLocalGet, 0, opBrTable}, leb(100), make([]byte, 101), []byte{opEnd}, repeat(50, same(0x1a)))
		}), []byte{opLocalGet, 0})}.module()
	}},
	{"variables and blocks", func(n int) []byte {
		return blueprint{locals: 100, code: joined(repeat(n, func(i int) []byte {
			return []byte{opLocalGet, 0, opIf, typeEmpty, opLocalGet, byte(i % 100), opI32Const, 3, opI32Add, 0x21, byte(i*7%100) + 1, opEnd}
		}), repeat(100, func(i int) []byte { return []byte{opLocalGet, byte(i), 0x1a} }), []byte{opLocalGet, 0})}.module()
	}},
	{"800 variables and blocks", func(n int) []byte {
		return blueprint{locals: 800, code: joined(repeat(n, func(i int) []byte {
			return joined([]byte{opLocalGet, 0, opIf, typeEmpty, opLocalGet}, leb(i%800), []byte{opI32Const, 3, opI32Add, 0x21}, leb(i*7%800+1), []byte{opEnd})
		}), repeat(800, func(i int) []byte { return joined([]byte{opLocalGet}, leb(i), []byte{0x1a}) }), []byte{opLocalGet, 0})}.module()
	}},
	{"800 variables in loops", func(n int) []byte {
		return blueprint{locals: 800, code: joined(repeat(n, func(i int) []byte {
			return joined([]byte{opLoop, typeEmpty, opLocalGet}, leb(i%800), []byte{opI32Const, 3, opI32Add, 0x21}, leb(i*7%800+1), []byte{opLocalGet, 0, opBrIf, 0, opEnd})
		}), repeat(800, func(i int) []byte { return joined([]byte{opLocalGet}, leb(i), []byte{0x1a}) }), []byte{opLocalGet, 0})}.module()
	}},
	{"800 variables in nested loops", func(n int) []byte {
		n = min(n, 90)
		return blueprint{locals: 800, code: joined(repeat(n, same(opLoop, typeEmpty)), repeat(800, func(i int) []byte {
			return joined([]byte{opLocalGet}, leb(i), []byte{opI32Const, 3, opI32Add, 0x21}, leb(i*7%800+1))
		}), repeat(n, func(i int) []byte {
			return joined([]byte{opLocalGet}, leb(i*3%800), []byte{opBrIf, 0, opEnd})
		}), repeat(800, func(i int) []byte { return joined([]byte{opLocalGet}, leb(i), []byte{0x1a}) }), []byte{opLocalGet, 0})}.module()
	}},
	{"br_table with 800 variables", func(n int) []byte {
		return blueprint{locals: 800, code: joined(repeat(n, same(opBlock, typeEmpty)), []byte{opLocalGet, 0, opBrTable}, leb(n-1), repeat(n, func(i int) []byte { return leb(i) }),
			repeat(n, func(i int) []byte {
				return joined([]byte{opEnd, opLocalGet, 0, opI32Const, 1, opI32Add, 0x21}, leb(1+i%800))
			}),
			repeat(800, func(i int) []byte { return joined([]byte{opLocalGet}, leb(i), []byte{0x1a}) }), []byte{opLocalGet, 0})}.module()
	}},
	{"many variables in loops", func(n int) []byte {
		return blueprint{locals: 120, code: joined(repeat(n, func(i int) []byte {
			return joined([]byte{opLoop, typeEmpty}, repeat(120, func(j int) []byte {
				return []byte{opLocalGet, byte(j), opI32Const, 3, opI32Add, 0x21, byte((j*7+i)%120) + 1}
			}), []byte{opLocalGet, 0, opBrIf, 0, opEnd})
		}), []byte{opLocalGet, 0})}.module()
	}},
	{"values across blocks", func(n int) []byte {
		return blueprint{code: joined(repeat(n, same(opLocalGet, 0, 0x67)), repeat(n, same(opLocalGet, 0, opIf, typeEmpty, opEnd)), repeat(n-1, same(opI32Add)))}.module()
	}},
	{"globals and calls", func(n int) []byte {
		return blueprint{globals: n, code: joined([]byte{opLocalGet, 0}, repeat(n, same(opCall, 1)))}.module()
	}},
	{"calls with long lists", func(n int) []byte {
		return blueprint{nTypes: 1, types: joined([]byte{0x60, 100}, repeat(100, same(0x7f)), []byte{100}, repeat(100, same(0x7f))),
			code: joined(repeat(100, same(opLocalGet, 0)), repeat(n, same(opI32Const, 0, opCallIndirect, 2, 0)), repeat(99, same(0x1a)))}.module()
	}},
	{"blocks with long lists", func(n int) []byte {
		return blueprint{nTypes: 1, types: joined([]byte{0x60, 100}, repeat(100, same(0x7f)), []byte{100}, repeat(100, same(0x7f))),
			code: joined(repeat(100, same(opLocalGet, 0)), repeat(n, same(opBlock, 2, opLocalGet, 0, opBrIf, 0, opEnd)), repeat(99, same(0x1a)))}.module()
	}},
	{"long functions type", func(n int) []byte {
		return blueprint{nTypes: 1, types: joined([]byte{0x60}, leb(n), repeat(n, same(0x7f)), leb(n), repeat(n, same(0x7f))),
			code: joined(repeat(n, same(opLocalGet, 0)), []byte{opI32Const, 0, opCallIndirect, 2, 0}, repeat(n-1, same(0x1a)))}.module()
	}},
	{"locals", func(n int) []byte { return blueprint{locals: n, code: []byte{opLocalGet, 0}}.module() }},
	{"functions", func(n int) []byte { return blueprint{functions: n, code: []byte{opLocalGet, 0}}.module() }},
	{"functions with loops", func(n int) []byte {
		return blueprint{functions: n, code: []byte{opLoop, typeEmpty, opLocalGet, 0, opBrIf, 0, opEnd, opLocalGet, 0, opCall, 1}}.module()
	}},
	{"functions with locals", func(n int) []byte { return blueprint{functions: n, locals: 900, code: []byte{opLocalGet, 0}}.module() }},
	{"types", func(n int) []byte {
		return blueprint{nTypes: n, types: repeat(n, func(i int) []byte {
			return joined([]byte{0x60, 16}, repeat(16, func(j int) []byte { return []byte{0x7f - byte(i>>(2*j)&3)} }), []byte{0})
		}), code: []byte{opLocalGet, 0}}.module()
	}},
	{"globals", func(n int) []byte { return blueprint{globals: n, code: []byte{opLocalGet, 0}}.module() }},
	{"tables", func(n int) []byte { return blueprint{tables: n, code: []byte{opLocalGet, 0}}.module() }},
	{"custom sections", func(n int) []byte {
		return blueprint{code: []byte{opLocalGet, 0}, extra: repeat(n, same(sectionCustom, 3, 1, 'x', 0))}.module()
	}},
	{"data segments", func(n int) []byte {
		return blueprint{code: []byte{opLocalGet, 0}, extra: part(sectionData, n, repeat(n, same(0, opI32Const, 0, opEnd, 0)))}.module()
	}},
}
