package build

import (
	"slices"
	"testing"
)

var emptyModule = []byte("\x00asm\x01\x00\x00\x00")

func TestExports(t *testing.T) {
	// (module (memory (export "memory") 1) (func (export "f"))), by hand.
	module := append(slices.Clone(emptyModule),
		1, 4, 1, 0x60, 0, 0, // one type: () -> ()
		3, 2, 1, 0, // one function of it
		5, 3, 1, 0, 1, // one memory
		7, 14, 2, 6, 'm', 'e', 'm', 'o', 'r', 'y', 2, 0, 1, 'f', 0, 0,
		10, 4, 1, 2, 0, 0x0b) // its code
	got, err := exports(module)
	if err != nil || !slices.Equal(got, []string{"memory", "f"}) {
		t.Errorf("exports %v, error %v", got, err)
	}
	if got, err := exports(emptyModule); err != nil || len(got) != 0 {
		t.Errorf("an empty module: %v, error %v", got, err)
	}
	for cut := range len(module) - 7 { // without the last section the rest is a complete module
		switch cut {
		case 8, 14, 18, 23: // between two sections
			continue
		}
		if got, err := exports(module[:cut]); err == nil {
			t.Errorf("got %d bytes: %v, want an error", cut, got)
		}
	}
}

func FuzzExports(f *testing.F) {
	f.Add(emptyModule)
	f.Add(append(slices.Clone(emptyModule), 7, 5, 1, 1, 'f', 0, 0))
	f.Add(append(slices.Clone(emptyModule), 7, 0xff, 0xff, 0xff, 0xff, 0x0f))
	f.Fuzz(func(t *testing.T, module []byte) {
		names, err := exports(module)
		if err != nil {
			return
		}
		size := 0
		for _, n := range names {
			size += len(n) + 3
		}
		if size > len(module) {
			t.Errorf("%d names with %d bytes out of %d", len(names), size, len(module))
		}
	})
}
