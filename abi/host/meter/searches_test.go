package meter

import (
	"errors"
	"strings"
	"testing"
)

func localGet(i int) []byte { return joined([]byte{opLocalGet}, leb(i)) }
func localSet(i int) []byte { return joined([]byte{opLocalSet}, leb(i)) }

// turning is a loop over variables that copies each one to the next. The order changes from one loop
// to the next, so that the compiler finds only one superfluous value in each of its rounds.
func turning(loop, variables int) []byte {
	at := func(i int) int {
		if loop%2 == 0 {
			return 1 + i
		}
		return variables - i
	}
	return joined([]byte{opLoop, typeEmpty},
		repeat(variables-1, func(i int) []byte { return joined(localGet(at(i)), []byte{0x1a}) }),
		repeat(variables-1, func(i int) []byte { return joined(localGet(at(i+1)), localSet(at(i))) }),
		[]byte{opLocalGet, 0, opBrIf, 0, opEnd})
}

func reads(variables int) []byte {
	return joined(repeat(variables, func(i int) []byte { return joined(localGet(i+1), []byte{0x1a}) }), []byte{opLocalGet, 0})
}

// searches are shapes in which the compiler searches much for each variable or address. The sizes
// are those of modules that took the compiler 10 s to minutes, or gigabytes.
var searches = []struct {
	shape
	bad int
}{
	{bad: 170_000, shape: shape{name: "variables behind a chain of blocks", make: func(n int) []byte {
		return blueprint{code: joined([]byte{opBlock, typeEmpty}, repeat(8000, same(opLocalGet, 0, opBrIf, 0)), repeat(n, same(opLocalGet, 0, 0x1a)), []byte{opEnd, opLocalGet, 0})}.module()
	}}},
	{bad: 170_000, shape: shape{name: "globals behind a chain of blocks", make: func(n int) []byte {
		return blueprint{globals: 1, code: joined([]byte{opGlobalGet, 0, 0x1a, opBlock, typeEmpty}, repeat(8000, same(opLocalGet, 0, opBrIf, 0)), repeat(n, same(opGlobalGet, 0, 0x1a)), []byte{opEnd, opLocalGet, 0})}.module()
	}}},
	{bad: 33_000, shape: shape{name: "loads behind a chain of blocks", make: func(n int) []byte {
		return blueprint{code: joined([]byte{opLocalGet, 0, opI32Load, 2, 0, 0x1a, opBlock, typeEmpty}, repeat(6000, same(opLocalGet, 0, opBrIf, 0)), repeat(n, same(opLocalGet, 0, opI32Load, 2, 0, 0x1a)), []byte{opEnd, opLocalGet, 0})}.module()
	}}},
	{bad: 36_000, shape: shape{name: "variables behind blocks with a trap", make: func(n int) []byte {
		return blueprint{code: joined(repeat(5000, same(opLocalGet, 0, opIf, typeEmpty, 0, opEnd)), repeat(n, same(opLocalGet, 0, 0x1a)), []byte{opLocalGet, 0})}.module()
	}}},
	{bad: 2000, shape: shape{name: "branches from a chain to many blocks", make: func(n int) []byte {
		return blueprint{locals: 250, code: joined(repeat(n, same(opBlock, typeEmpty)), repeat(n, func(i int) []byte { return joined(localGet(0), []byte{opBrIf}, leb(i)) }),
			repeat(n, func(i int) []byte { return joined([]byte{opEnd}, localGet(0), localSet(1+i%250)) }), reads(250))}.module()
	}}},
	{bad: 12_000, shape: shape{name: "checked addresses in a chain of blocks", make: func(n int) []byte {
		return blueprint{code: joined([]byte{opBlock, typeEmpty, opLocalGet, 0}, repeat(n, same(opI32Load, 2, 0, opI32Load, 2, 0, opLocalTee, 0, opLocalGet, 0, opBrIf, 0)), []byte{0x1a, opEnd, opLocalGet, 0})}.module()
	}}},
	{bad: 4000, shape: shape{name: "copies of variables in one loop", make: func(n int) []byte {
		return blueprint{locals: n, code: joined(turning(0, n), reads(n))}.module()
	}}},
	{bad: 700, shape: shape{name: "copies of 100 variables in loops", make: func(n int) []byte {
		return blueprint{locals: 100, code: joined(repeat(n, func(i int) []byte { return turning(i, 100) }), reads(100))}.module()
	}}},
	{bad: 3000, shape: shape{name: "copies of 10 variables in loops", make: func(n int) []byte {
		return blueprint{locals: 10, code: joined(repeat(n, func(i int) []byte { return turning(i, 10) }), reads(10))}.module()
	}}},
	{bad: 18_000, shape: shape{name: "copied and filled tables", make: func(n int) []byte {
		return blueprint{code: joined(repeat(n, same(opI32Const, 0, opI32Const, 0, opI32Const, 0, prefixMisc, miscTableCopy, 0, 0,
			opI32Const, 0, opRefNull, 0x70, opI32Const, 0, prefixMisc, miscTableFill, 0)), []byte{opLocalGet, 0})}.module()
	}}},
}

// TestSearchesAreRefused: Check refuses the modules before they cost much.
func TestSearchesAreRefused(t *testing.T) {
	for _, s := range searches {
		m, err := Read(s.make(s.bad))
		if err != nil {
			t.Fatal(s.name, err)
		}
		if _, err = m.Check(1); !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), "function 2 has") {
			t.Errorf("%s: got %v", s.name, err)
		}
	}
}

// TestSearchesOfPrograms: the same searches cost little in functions as compilers write them: many
// blocks that branches end, with variables that change, loads and jump tables.
func TestSearchesOfPrograms(t *testing.T) {
	block := func(i int) []byte {
		v := 1 + i%20
		return joined([]byte{opBlock, typeEmpty}, localGet(v), []byte{opI32Load, 2, 0, opBrIf, 0}, localGet(v), []byte{opI32Const, 1, opI32Add}, localSet(v), []byte{opEnd},
			[]byte{opLoop, typeEmpty}, localGet(v), []byte{opI32Load, 2, 4}, localSet(1+(i+1)%20), localGet(v), []byte{opBrIf, 0, opEnd})
	}
	m, err := Read(blueprint{locals: 20, code: joined(repeat(900, block), []byte{opLocalGet, 0})}.module())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Check(1); err != nil {
		t.Fatal(err)
	}
	if s := m.sizeOf(&m.Functions[2], 0); s.work() > 700_000 || s.copies > 0 {
		t.Errorf("%d microseconds, %+v", s.work(), s)
	}
}
