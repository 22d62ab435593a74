package abi

import (
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// wasmModule is a WebAssembly module that a test assembles by hand: degenerate
// modules that no compiler makes, and small ones that compile at once. A body
// consists of a few words of the text format:
//
//	get set tee N        locals (parameters first)
//	gget gset N          globals, all of them mutable i32 that begin at 0
//	i32 N, i64 N, f32 N  constants
//	"text"               address and length of that text
//	call NAME            a function of this module or a host function
//
// Everything else is an instruction's own name. Source of the encoding:
// WebAssembly Core Specification 2.0, section 5 (binary format).
type wasmModule struct {
	memory    [2]int // pages at least, pages at most; at most 0: no limit
	noMemory  bool
	functions []wasmFunction
	exports   []string // names without a function of their own: empty functions
	types     []string
	imports   []string // "module.name signature"
	data      []byte
	globals   int
}

type wasmFunction struct {
	name, signature, locals, body string
	hidden                        bool // not exported
}

// dataAt is the address of texts in the guest's memory. The memory from heapAt
// on is free.
const (
	dataAt = 1024
	heapAt = 16384
)

// newModule returns a module with one page of memory, a marker and an allocator
// that returns the memory from heapAt at each call.
func newModule() *wasmModule {
	m := &wasmModule{memory: [2]int{1, 0}, exports: []string{"proxy_abi_version_0_2_1"}}
	return m.function("proxy_on_memory_allocate", "i:i", "", "i32 16384")
}

// policyModule is a module without a marker. It has the scratch buffer that
// hooks need: all memory from the second page on.
func policyModule() *wasmModule {
	m := &wasmModule{memory: [2]int{8, 0}}
	return m.function("pdproxy_v1_scratch", "i:i", "", "i32 65536")
}

// function adds an exported function. A signature such as "iI:i" has a letter
// for each type: i32 i, i64 I, f32 f.
func (m *wasmModule) function(name, signature, locals, body string) *wasmModule {
	m.functions = append(m.functions, wasmFunction{name: name, signature: signature, locals: locals, body: body})
	return m
}

// inner adds a function that is not exported.
func (m *wasmModule) inner(name, signature, locals, body string) *wasmModule {
	m.functions = append(m.functions, wasmFunction{name, signature, locals, body, true})
	return m
}

// imports of env by name; those of WASI below.
var signatures = map[string]string{
	"proxy_log": "iii:i", "proxy_set_tick_period_milliseconds": "i:i", "proxy_set_effective_context": "i:i",
	"proxy_done": ":i", "proxy_get_header_map_value": "iiiii:i", "proxy_add_header_map_value": "iiiii:i",
	"proxy_replace_header_map_value": "iiiii:i", "proxy_get_buffer_bytes": "iiiii:i", "proxy_set_buffer_bytes": "iiiii:i",
	"proxy_send_local_response": "iiiiiiii:i", "proxy_continue_stream": "i:i", "proxy_get_property": "iiii:i",
	"proxy_get_configuration": "ii:i", "proxy_continue_request": ":i", "proxy_get_shared_data": "iiiii:i",
	"proxy_set_shared_data": "iiiii:i", "proxy_define_metric": "iiii:i", "proxy_increment_metric": "iI:i",
	"proxy_get_current_time_nanoseconds": "i:i",
}

var wasiSignatures = map[string]string{
	"fd_write": "iiii:i", "random_get": "ii:i", "clock_time_get": "iIi:i", "proc_exit": "i:", "environ_sizes_get": "ii:i",
}

// opcodes of the instructions that stand alone.
var opcodes = map[string][]byte{
	"unreachable": {0x00}, "nop": {0x01}, "block": {0x02, 0x40}, "loop": {0x03, 0x40}, "if": {0x04, 0x40},
	"else": {0x05}, "end": {0x0b}, "return": {0x0f}, "drop": {0x1a}, "select": {0x1b},
	"i32.load": {0x28, 2, 0}, "i64.load": {0x29, 3, 0}, "i32.load8_u": {0x2d, 0, 0}, "i32.load16_u": {0x2f, 1, 0},
	"i32.store": {0x36, 2, 0}, "i64.store": {0x37, 3, 0}, "f32.store": {0x38, 2, 0}, "i32.store8": {0x3a, 0, 0},
	"memory.size": {0x3f, 0}, "memory.copy": {0xfc, 10, 0, 0}, "memory.grow": {0x40, 0},
	"i32.eqz": {0x45}, "i32.eq": {0x46}, "i32.ne": {0x47}, "i32.lt_u": {0x49}, "i32.gt_u": {0x4b}, "i32.ge_u": {0x4f},
	"i64.eqz": {0x50}, "i32.add": {0x6a}, "i32.sub": {0x6b}, "i32.mul": {0x6c}, "i32.rem_u": {0x70}, "i32.and": {0x71},
	"i32.or": {0x72}, "i32.shl": {0x74}, "i64.add": {0x7c}, "i64.sub": {0x7d}, "i64.rem_u": {0x82}, "i64.or": {0x84},
	"i64.shl": {0x86}, "i64.shr_u": {0x88}, "i32.wrap_i64": {0xa7}, "i64.extend_i32_s": {0xac}, "i64.extend_i32_u": {0xad},
}

var valueTypes = map[rune]byte{'i': 0x7f, 'I': 0x7e, 'f': 0x7d}

// bytes returns the module in the binary format.
func (m *wasmModule) bytes() []byte {
	functions := m.functions
	for _, name := range m.exports {
		functions = append(functions, wasmFunction{name: name, signature: ":"})
	}
	for _, f := range functions { // imports come first in the index space
		for word := range strings.FieldsSeq(f.body) {
			m.link(word, functions)
		}
	}
	var types, code, decl, exports [][]byte
	for i, f := range functions {
		decl = append(decl, uleb(uint64(m.typeOf(f.signature))))
		code = append(code, m.compile(f, functions))
		if !f.hidden {
			exports = append(exports, append(name(f.name), append([]byte{0}, uleb(uint64(len(m.imports)+i))...)...))
		}
	}
	var imports [][]byte
	for _, i := range m.imports {
		full, signature, _ := strings.Cut(i, " ")
		module, field, _ := strings.Cut(full, ".")
		imports = append(imports, append(append(name(module), name(field)...), append([]byte{0}, uleb(uint64(m.typeOf(signature)))...)...))
	}
	for _, t := range m.types {
		params, results, _ := strings.Cut(t, ":")
		types = append(types, append(append([]byte{0x60}, typeList(params)...), typeList(results)...))
	}
	out := []byte("\x00asm\x01\x00\x00\x00")
	out = append(out, section(1, types)...)
	out = append(out, section(2, imports)...)
	out = append(out, section(3, decl)...)
	if !m.noMemory {
		limits := append([]byte{0}, uleb(uint64(m.memory[0]))...)
		if m.memory[1] > 0 {
			limits = append(append([]byte{1}, uleb(uint64(m.memory[0]))...), uleb(uint64(m.memory[1]))...)
		}
		out = append(out, section(5, [][]byte{limits})...)
		exports = append(exports, append(name("memory"), 2, 0))
	}
	var globals [][]byte
	for range m.globals {
		globals = append(globals, []byte{0x7f, 1, 0x41, 0, 0x0b})
	}
	out = append(out, section(6, globals)...)
	out = append(out, section(7, exports)...)
	out = append(out, section(10, code)...)
	if len(m.data) > 0 {
		at := append(append([]byte{0, 0x41}, sleb(dataAt)...), 0x0b)
		out = append(out, section(11, [][]byte{append(append(at, uleb(uint64(len(m.data)))...), m.data...)})...)
	}
	return out
}

// link adds the import that a word of a body names.
func (m *wasmModule) link(word string, functions []wasmFunction) {
	module, field, dotted := strings.Cut(word, ".")
	signature := ""
	switch {
	case dotted && (module == "wasi_snapshot_preview1" || module == "wasi_unstable"):
		signature = wasiSignatures[field]
	case dotted && module == "env":
		signature = signatures[field]
	case signatures[word] != "" && indexOf(functions, word) < 0:
		word, signature = "env."+word, signatures[word]
	}
	if signature == "" {
		return
	}
	for _, i := range m.imports {
		if strings.HasPrefix(i, word+" ") {
			return
		}
	}
	m.imports = append(m.imports, word+" "+signature)
}

func indexOf(functions []wasmFunction, name string) int {
	for i, f := range functions {
		if f.name == name {
			return i
		}
	}
	return -1
}

// index is the number of a function in the module's index space.
func (m *wasmModule) index(name string, functions []wasmFunction) int {
	for i, imported := range m.imports {
		if full, _, _ := strings.Cut(imported, " "); full == name || full == "env."+name {
			return i
		}
	}
	i := indexOf(functions, name)
	if i < 0 {
		panic("assemble: unknown function " + name)
	}
	return len(m.imports) + i
}

func (m *wasmModule) typeOf(signature string) int {
	for i, t := range m.types {
		if t == signature {
			return i
		}
	}
	m.types = append(m.types, signature)
	return len(m.types) - 1
}

// compile encodes one function's body.
func (m *wasmModule) compile(f wasmFunction, functions []wasmFunction) []byte {
	locals := uleb(uint64(len(f.locals)))
	for _, l := range f.locals {
		locals = append(locals, 1, valueTypes[l])
	}
	body := locals
	operand := func(rest string) (int64, string) {
		word, rest := nextWord(rest)
		n, err := strconv.ParseInt(word, 0, 64)
		if err != nil {
			panic(fmt.Sprintf("assemble %s: %v", f.name, err))
		}
		return n, rest
	}
	for word, rest := nextWord(f.body); word != ""; word, rest = nextWord(rest) {
		var n int64
		switch word {
		case "get", "set", "tee", "gget", "gset", "br", "br_if":
			n, rest = operand(rest)
			op := map[string]byte{"get": 0x20, "set": 0x21, "tee": 0x22, "gget": 0x23, "gset": 0x24, "br": 0x0c, "br_if": 0x0d}[word]
			if op == 0x23 || op == 0x24 {
				m.globals = max(m.globals, int(n)+1)
			}
			body = append(append(body, op), uleb(uint64(n))...)
		case "i32":
			n, rest = operand(rest)
			body = append(append(body, 0x41), sleb(int64(int32(n)))...)
		case "i64":
			n, rest = operand(rest)
			body = append(append(body, 0x42), sleb(n)...)
		case "f32":
			n, rest = operand(rest)
			body = binary.LittleEndian.AppendUint32(append(body, 0x43), math.Float32bits(float32(n)))
		case "call":
			word, rest = nextWord(rest)
			body = append(append(body, 0x10), uleb(uint64(m.index(word, functions)))...)
		default:
			if word[0] == '"' {
				text, err := strconv.Unquote(word)
				if err != nil {
					panic("assemble: " + word)
				}
				body = append(append(body, 0x41), sleb(int64(dataAt+len(m.data)))...)
				body = append(append(body, 0x41), sleb(int64(len(text)))...)
				m.data = append(m.data, text...)
				break
			}
			op, ok := opcodes[word]
			if !ok {
				panic("assemble: unknown instruction " + word)
			}
			body = append(body, op...)
		}
	}
	body = append(body, 0x0b)
	return append(uleb(uint64(len(body))), body...)
}

// nextWord cuts the first word or quoted text off.
func nextWord(s string) (word, rest string) {
	s = strings.TrimSpace(s)
	if strings.HasPrefix(s, `"`) {
		q, err := strconv.QuotedPrefix(s)
		if err != nil {
			panic("assemble: " + s)
		}
		return q, s[len(q):]
	}
	if i := strings.IndexAny(s, " \t\n"); i >= 0 {
		return s[:i], s[i:]
	}
	return s, ""
}

func section(id byte, items [][]byte) []byte {
	if len(items) == 0 {
		return nil
	}
	body := uleb(uint64(len(items)))
	for _, i := range items {
		body = append(body, i...)
	}
	return append(append([]byte{id}, uleb(uint64(len(body)))...), body...)
}

func name(s string) []byte { return append(uleb(uint64(len(s))), s...) }

func typeList(types string) []byte {
	b := uleb(uint64(len(types)))
	for _, t := range types {
		b = append(b, valueTypes[t])
	}
	return b
}

func uleb(n uint64) []byte { return binary.AppendUvarint(nil, n) }

func sleb(n int64) (b []byte) {
	for {
		c := byte(n & 0x7f)
		n >>= 7
		if n == 0 && c&0x40 == 0 || n == -1 && c&0x40 != 0 {
			return append(b, c)
		}
		b = append(b, c|0x80)
	}
}
