package meter

import (
	"encoding/binary"
	"slices"
)

// A shape is a kind of module that costs the compiler much. Its function returns the module with
// n units.
type shape struct {
	name  string
	make  func(n int) []byte
	limit int // of n; 0: none
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

// chains are instructions that take and give an i32.
var chains = map[string][]byte{
	"divisions":        {opI32Const, 3, 0x6d},
	"conversions":      {0xb2, 0xa8},       // f32.convert_i32_s, i32.trunc_f32_s
	"saturating":       {0xb7, 0xfc, 0x02}, // f64.convert_i32_s, i32.trunc_sat_f64_s
	"growth":           {opMemoryGrow, 0},
	"stores":           {0x22, 0, opLocalGet, 0, 0x36, 2, 0, opLocalGet, 0}, // local.tee, i32.store
	"selects":          {opI32Const, 1, opLocalGet, 0, 0x1b},
	"indirect calls":   {opI32Const, 0, opCallIndirect, 1, 0},
	"table reads":      {0x25, 0, opRefIsNull},
	"functions":        {0x1a, opRefFunc, 1, opRefIsNull},
	"fills":            {0x1a, opI32Const, 0, opI32Const, 0, opI32Const, 0, 0xfc, 11, 0, opLocalGet, 0},
	"copies":           {0x1a, opI32Const, 0, opI32Const, 0, opI32Const, 0, 0xfc, 10, 0, 0, opLocalGet, 0},
	"float maxima":     {0xb7, 0x44, 0, 0, 0, 0, 0, 0, 0, 0, 0xa5, 0xaa}, // f64.const, f64.max, i32.trunc_f64_s
	"returns":          {opBlock, typeEmpty, opLocalGet, 0, opLocalGet, 0, opBrIf, 1, 0x1a, opEnd},
	"tees":             {0x22, 0},
	"vectors":          {0xfd, 0x0f, 0xfd, 0x62, 0xfd, 0x15, 0},                                                                 // i8x16.splat, popcnt, extract_lane_s
	"vector shifts":    {0xfd, 0x0f, opI32Const, 3, 0xfd, 0x6b, 0xfd, 0x15, 0},                                                  // i8x16.shl
	"vector products":  {0xac, 0xfd, 0x12, opI64Const, 3, 0xfd, 0x12, 0xfd, 0xd5, 1, 0xfd, 0x1d, 0, 0xa7},                       // i64x2.mul
	"vector constants": {0xfd, 0x0f, 0xfd, 0x0c, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0xfd, 0x51, 0xfd, 0x53}, // v128.xor, any_true
	"vector bytes":     {0xfd, 0x0f, 0xfd, 0x0c, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 0xfd, 0x0e, 0xfd, 0x53}, // i8x16.swizzle
}

// allShapes returns shapes, searches and one shape of each chain.
func allShapes() []shape {
	all := slices.Clone(shapes)
	for _, s := range searches {
		all = append(all, s.shape)
	}
	for name, code := range chains {
		all = append(all, shape{name: "chain of " + name, make: func(n int) []byte {
			return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, same(code...)))}.module()
		}})
	}
	return all
}

var shapes = []shape{
	{name: "functions of loads", limit: 3, make: func(n int) []byte {
		return blueprint{functions: n, code: joined([]byte{opLocalGet, 0}, repeat(45_000, same(opI32Load, 2, 0)))}.module()
	}},
	{name: "functions of additions", limit: 3, make: func(n int) []byte {
		return blueprint{functions: n, code: joined([]byte{opLocalGet, 0}, repeat(200_000, same(opI32Const, 1, opI32Add)))}.module()
	}},
	{name: "additions", make: func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, same(opI32Const, 1, opI32Add)))}.module()
	}},
	{name: "loads", make: func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, same(opI32Load, 2, 0)))}.module()
	}},
	{name: "live constants", make: func(n int) []byte {
		return blueprint{code: joined(repeat(n+1, same(opLocalGet, 0, 0x67)), repeat(n, same(opI32Add)))}.module()
	}},
	{name: "blocks", make: func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, same(opBlock, typeEmpty, opLocalGet, 0, opBrIf, 0, opEnd)))}.module()
	}},
	{name: "loops", make: func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, same(opLoop, typeEmpty, opLocalGet, 0, opBrIf, 0, opEnd)))}.module()
	}},
	{name: "deep blocks", make: func(n int) []byte {
		return blueprint{code: joined(repeat(n, same(opBlock, typeEmpty)), repeat(n, same(opLocalGet, 0, opBrIf, 0, opEnd)), []byte{opLocalGet, 0})}.module()
	}},
	{name: "deep loops", make: func(n int) []byte {
		return blueprint{code: joined(repeat(n, same(opLoop, typeEmpty)), repeat(n, same(opLocalGet, 0, opBrIf, 0, opEnd)), []byte{opLocalGet, 0})}.module()
	}},
	{name: "deep loops with variables", make: func(n int) []byte {
		return blueprint{locals: 30, code: joined(repeat(n, same(opLoop, typeEmpty)),
			repeat(n, func(i int) []byte {
				return []byte{opLocalGet, byte(i % 30), opI32Const, 1, opI32Add, 0x21, byte(i*7%30) + 1, opLocalGet, byte(i*3%30) + 1, opBrIf, 0, opEnd}
			}), repeat(30, func(i int) []byte { return []byte{opLocalGet, byte(i), 0x1a} }), []byte{opLocalGet, 0})}.module()
	}},
	{name: "deep ifs", make: func(n int) []byte {
		return blueprint{locals: 10, code: joined(repeat(n, same(opLocalGet, 0, opIf, typeEmpty)),
			repeat(n, func(i int) []byte { return []byte{opI32Const, 5, 0x21, byte(i%10) + 1, opElse, opEnd} }), repeat(10, func(i int) []byte { return []byte{opLocalGet, byte(i), 0x1a} }), []byte{opLocalGet, 0})}.module()
	}},
	{name: "br_table", make: func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0}, repeat(n, func(int) []byte {
			return joined([]byte{opBlock, typeEmpty, opLocalGet, 0, opBrTable}, leb(1000), make([]byte, 1001), []byte{opEnd})
		}))}.module()
	}},
	{name: "br_table to many blocks", make: func(n int) []byte {
		return blueprint{code: joined(repeat(n, same(opBlock, typeEmpty)), []byte{opLocalGet, 0, opBrTable}, leb(n-1), repeat(n, func(i int) []byte { return leb(i) }), repeat(n, same(opEnd)), []byte{opLocalGet, 0})}.module()
	}},
	{name: "br_table with variables", make: func(n int) []byte {
		// Each variable differs on each way.
		return blueprint{locals: 50, code: joined(repeat(n, same(opBlock, typeEmpty)), []byte{opLocalGet, 0, opBrTable}, leb(n-1), repeat(n, func(i int) []byte { return leb(i) }),
			repeat(n, func(i int) []byte { return []byte{opEnd, opLocalGet, 0, opI32Const, 1, opI32Add, 0x21, byte(1 + i%50)} }),
			repeat(50, func(i int) []byte { return []byte{opLocalGet, byte(i), 0x1a} }), []byte{opLocalGet, 0})}.module()
	}},
	{name: "br_table with values", make: func(n int) []byte {
		// The label takes 50 values.
		return blueprint{nTypes: 1, types: joined([]byte{0x60, 0, 50}, repeat(50, same(0x7f))), code: joined(repeat(n, func(int) []byte {
			return joined([]byte{opBlock, 2}, repeat(50, same(opLocalGet, 0)), []byte{opLocalGet, 0, opBrTable}, leb(100), make([]byte, 101), []byte{opEnd}, repeat(50, same(0x1a)))
		}), []byte{opLocalGet, 0})}.module()
	}},
	{name: "variables and blocks", make: func(n int) []byte {
		return blueprint{locals: 100, code: joined(repeat(n, func(i int) []byte {
			return []byte{opLocalGet, 0, opIf, typeEmpty, opLocalGet, byte(i % 100), opI32Const, 3, opI32Add, 0x21, byte(i*7%100) + 1, opEnd}
		}), repeat(100, func(i int) []byte { return []byte{opLocalGet, byte(i), 0x1a} }), []byte{opLocalGet, 0})}.module()
	}},
	{name: "800 variables and blocks", make: func(n int) []byte {
		return blueprint{locals: 800, code: joined(repeat(n, func(i int) []byte {
			return joined([]byte{opLocalGet, 0, opIf, typeEmpty, opLocalGet}, leb(i%800), []byte{opI32Const, 3, opI32Add, 0x21}, leb(i*7%800+1), []byte{opEnd})
		}), repeat(800, func(i int) []byte { return joined([]byte{opLocalGet}, leb(i), []byte{0x1a}) }), []byte{opLocalGet, 0})}.module()
	}},
	{name: "800 variables in loops", make: func(n int) []byte {
		return blueprint{locals: 800, code: joined(repeat(n, func(i int) []byte {
			return joined([]byte{opLoop, typeEmpty, opLocalGet}, leb(i%800), []byte{opI32Const, 3, opI32Add, 0x21}, leb(i*7%800+1), []byte{opLocalGet, 0, opBrIf, 0, opEnd})
		}), repeat(800, func(i int) []byte { return joined([]byte{opLocalGet}, leb(i), []byte{0x1a}) }), []byte{opLocalGet, 0})}.module()
	}},
	{name: "800 variables in nested loops", make: func(n int) []byte {
		n = min(n, 90)
		return blueprint{locals: 800, code: joined(repeat(n, same(opLoop, typeEmpty)), repeat(800, func(i int) []byte {
			return joined([]byte{opLocalGet}, leb(i), []byte{opI32Const, 3, opI32Add, 0x21}, leb(i*7%800+1))
		}), repeat(n, func(i int) []byte {
			return joined([]byte{opLocalGet}, leb(i*3%800), []byte{opBrIf, 0, opEnd})
		}), repeat(800, func(i int) []byte { return joined([]byte{opLocalGet}, leb(i), []byte{0x1a}) }), []byte{opLocalGet, 0})}.module()
	}},
	{name: "br_table with 800 variables", make: func(n int) []byte {
		return blueprint{locals: 800, code: joined(repeat(n, same(opBlock, typeEmpty)), []byte{opLocalGet, 0, opBrTable}, leb(n-1), repeat(n, func(i int) []byte { return leb(i) }),
			repeat(n, func(i int) []byte {
				return joined([]byte{opEnd, opLocalGet, 0, opI32Const, 1, opI32Add, 0x21}, leb(1+i%800))
			}),
			repeat(800, func(i int) []byte { return joined([]byte{opLocalGet}, leb(i), []byte{0x1a}) }), []byte{opLocalGet, 0})}.module()
	}},
	{name: "many variables in loops", make: func(n int) []byte {
		return blueprint{locals: 120, code: joined(repeat(n, func(i int) []byte {
			return joined([]byte{opLoop, typeEmpty}, repeat(120, func(j int) []byte {
				return []byte{opLocalGet, byte(j), opI32Const, 3, opI32Add, 0x21, byte((j*7+i)%120) + 1}
			}), []byte{opLocalGet, 0, opBrIf, 0, opEnd})
		}), []byte{opLocalGet, 0})}.module()
	}},
	{name: "values across blocks", make: func(n int) []byte {
		return blueprint{code: joined(repeat(n, same(opLocalGet, 0, 0x67)), repeat(n, same(opLocalGet, 0, opIf, typeEmpty, opEnd)), repeat(n-1, same(opI32Add)))}.module()
	}},
	{name: "globals and calls", make: func(n int) []byte {
		return blueprint{globals: n, code: joined([]byte{opLocalGet, 0}, repeat(n, same(opCall, 1)))}.module()
	}},
	{name: "calls with long lists", make: func(n int) []byte {
		return blueprint{nTypes: 1, types: joined([]byte{0x60, 100}, repeat(100, same(0x7f)), []byte{100}, repeat(100, same(0x7f))),
			code: joined(repeat(100, same(opLocalGet, 0)), repeat(n, same(opI32Const, 0, opCallIndirect, 2, 0)), repeat(99, same(0x1a)))}.module()
	}},
	{name: "blocks with long lists", make: func(n int) []byte {
		return blueprint{nTypes: 1, types: joined([]byte{0x60, 100}, repeat(100, same(0x7f)), []byte{100}, repeat(100, same(0x7f))),
			code: joined(repeat(100, same(opLocalGet, 0)), repeat(n, same(opBlock, 2, opLocalGet, 0, opBrIf, 0, opEnd)), repeat(99, same(0x1a)))}.module()
	}},
	{name: "long functions type", make: func(n int) []byte {
		return blueprint{nTypes: 1, types: joined([]byte{0x60}, leb(n), repeat(n, same(0x7f)), leb(n), repeat(n, same(0x7f))),
			code: joined(repeat(n, same(opLocalGet, 0)), []byte{opI32Const, 0, opCallIndirect, 2, 0}, repeat(n-1, same(0x1a)))}.module()
	}},
	{name: "locals", make: func(n int) []byte { return blueprint{locals: n, code: []byte{opLocalGet, 0}}.module() }},
	{name: "functions", make: func(n int) []byte { return blueprint{functions: n, code: []byte{opLocalGet, 0}}.module() }},
	{name: "functions with loops", make: func(n int) []byte {
		return blueprint{functions: n, code: []byte{opLoop, typeEmpty, opLocalGet, 0, opBrIf, 0, opEnd, opLocalGet, 0, opCall, 1}}.module()
	}},
	{name: "functions with locals", make: func(n int) []byte { return blueprint{functions: n, locals: 900, code: []byte{opLocalGet, 0}}.module() }},
	{name: "functions and globals", make: func(n int) []byte {
		return blueprint{functions: n, globals: 5000, code: []byte{opLocalGet, 0}}.module()
	}},
	{name: "types", make: func(n int) []byte {
		return blueprint{nTypes: n, types: repeat(n, func(i int) []byte {
			return joined([]byte{0x60, 16}, repeat(16, func(j int) []byte { return []byte{0x7f - byte(i>>(2*j)&3)} }), []byte{0})
		}), code: []byte{opLocalGet, 0}}.module()
	}},
	{name: "globals", make: func(n int) []byte { return blueprint{globals: n, code: []byte{opLocalGet, 0}}.module() }},
	{name: "tables", make: func(n int) []byte { return blueprint{tables: n, code: []byte{opLocalGet, 0}}.module() }},
	{name: "custom sections", make: func(n int) []byte {
		return blueprint{code: []byte{opLocalGet, 0}, extra: repeat(n, same(sectionCustom, 3, 1, 'x', 0))}.module()
	}},
	{name: "data segments", make: func(n int) []byte {
		return blueprint{code: []byte{opLocalGet, 0}, extra: part(sectionData, n, repeat(n, same(0, opI32Const, 0, opEnd, 0)))}.module()
	}},
}
