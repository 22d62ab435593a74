package host

import "encoding/binary"

// assembler builds small WebAssembly binaries, just enough for guests that
// misbehave in exactly one way.
type assembler struct {
	imports, types, funcs, exports, code [][]byte
	importCount                          int
	memoryMin, memoryMax                 uint32 // pages; max 0: none
	noMemory                             bool
	data                                 []byte // at address 0
	startFunc                            int    // -1: none
	tables, globals, elements            [][]byte
	spare                                int // locals of a function
}

// newAssembler returns an assembler with one page of exported memory.
func newAssembler() *assembler { return &assembler{memoryMin: 1, startFunc: -1, spare: 2} }

// Types are written as in hostFunction: i is i32, I is i64.
func (a *assembler) typeIndex(params, results string) []byte {
	list := func(s string) []byte {
		b := uleb(uint64(len(s)))
		for _, c := range s {
			if c == 'I' {
				b = append(b, 0x7e)
			} else {
				b = append(b, 0x7f)
			}
		}
		return b
	}
	a.types = append(a.types, join([]byte{0x60}, list(params), list(results)))
	return uleb(uint64(len(a.types) - 1))
}

// importFunc returns the function's index. All imports must come before the
// functions.
func (a *assembler) importFunc(module, name, params, results string) int {
	a.imports = append(a.imports, join(str(module), str(name), []byte{0}, a.typeIndex(params, results)))
	a.importCount++
	return a.importCount - 1
}

// locals sets the number of spare locals of the next functions.
func (a *assembler) locals(n int) *assembler {
	a.spare = n
	return a
}

// fn adds a function with spare i32 locals, two by default, after its parameters. A function
// with a name is exported.
func (a *assembler) fn(export, params, results string, body ...[]byte) int {
	a.funcs = append(a.funcs, a.typeIndex(params, results))
	code := join([]byte{1}, uleb(uint64(a.spare)), []byte{0x7f}, join(body...), []byte{0x0b})
	a.code = append(a.code, join(uleb(uint64(len(code))), code))
	index := a.importCount + len(a.funcs) - 1
	if export != "" {
		a.exports = append(a.exports, join(str(export), []byte{0}, uleb(uint64(index))))
	}
	return index
}

// marker adds the marker of an ABI version and a bump allocator, which keeps
// the address of the next block at address 8.
func (a *assembler) marker(version string) *assembler {
	a.fn("proxy_abi_version_"+version, "", "")
	a.data = binary.LittleEndian.AppendUint32(make([]byte, 8), 0x2000)
	a.fn("malloc", "i", "i",
		i32(8), i32(8), load32, tee(1), local(0), add, i32(7), add, i32(-8), and, store32, local(1))
	return a
}

// bytes returns the binary.
func (a *assembler) bytes() []byte {
	section := func(id byte, items [][]byte) []byte {
		if len(items) == 0 {
			return nil
		}
		body := join(uleb(uint64(len(items))), join(items...))
		return join([]byte{id}, uleb(uint64(len(body))), body)
	}
	memory := join([]byte{0}, uleb(uint64(a.memoryMin)))
	if a.memoryMax > 0 {
		memory = join([]byte{1}, uleb(uint64(a.memoryMin)), uleb(uint64(a.memoryMax)))
	}
	memories, exports := [][]byte{memory}, append([][]byte{join(str("memory"), []byte{2, 0})}, a.exports...)
	if a.noMemory {
		memories, exports = nil, a.exports
	}
	var start []byte
	if a.startFunc >= 0 {
		index := uleb(uint64(a.startFunc))
		start = join([]byte{8}, uleb(uint64(len(index))), index)
	}
	var data [][]byte
	if len(a.data) > 0 {
		data = [][]byte{join([]byte{0}, i32(0), []byte{0x0b}, uleb(uint64(len(a.data))), a.data)}
	}
	return join([]byte("\x00asm\x01\x00\x00\x00"),
		section(1, a.types), section(2, a.imports), section(3, a.funcs),
		section(4, a.tables), section(5, memories), section(6, a.globals),
		section(7, exports), start, section(9, a.elements), section(10, a.code), section(11, data))
}

// Instructions.
var (
	unreachable = []byte{0x00}
	drop        = []byte{0x1a}
	load32      = []byte{0x28, 2, 0}
	store32     = []byte{0x36, 2, 0}
	growMemory  = []byte{0x40, 0}
	add         = []byte{0x6a}
	and         = []byte{0x71}
	forever     = []byte{0x03, 0x40, 0x0c, 0, 0x0b} // loop br 0 end
	endBlock    = []byte{0x0b}
	branchIf    = []byte{0x0d, 0}
	notEqual    = []byte{0x47}
)

func i32(v int32) []byte    { return join([]byte{0x41}, sleb(int64(v))) }
func i64(v int64) []byte    { return join([]byte{0x42}, sleb(v)) }
func local(n int) []byte    { return []byte{0x20, byte(n)} }
func tee(n int) []byte      { return []byte{0x22, byte(n)} }
func call(index int) []byte { return join([]byte{0x10}, uleb(uint64(index))) }

// table adds a table of functions without a maximum, and one whose first entries are functions.
func (a *assembler) table(least uint32, functions ...int) int {
	a.tables = append(a.tables, join([]byte{0x70, 0}, uleb(uint64(least))))
	if len(functions) > 0 {
		element := join([]byte{2}, uleb(uint64(len(a.tables)-1)), i32(0), endBlock, []byte{0}, uleb(uint64(len(functions))))
		for _, f := range functions {
			element = append(element, uleb(uint64(f))...)
		}
		a.elements = append(a.elements, element)
	}
	return len(a.tables) - 1
}

// callTable is call_indirect of a function without results in table 0.
func (a *assembler) callTable(params, results string) []byte {
	return join([]byte{0x11}, a.typeIndex(params, results), []byte{0})
}

func str(s string) []byte { return join(uleb(uint64(len(s))), []byte(s)) }

func uleb(v uint64) []byte { return binary.AppendUvarint(nil, v) }

func sleb(v int64) (b []byte) {
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if v == 0 && c&0x40 == 0 || v == -1 && c&0x40 != 0 {
			return append(b, c)
		}
		b = append(b, c|0x80)
	}
}

func join(parts ...[]byte) (b []byte) {
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}
