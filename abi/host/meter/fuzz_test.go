package meter

import "testing"

// FuzzRead: a file that is no module gets an error, and the numbers of a module are bounded by its
// size.
func FuzzRead(f *testing.F) {
	for _, wasm := range guests(f) {
		if len(wasm) < 64<<10 {
			f.Add(wasm)
		}
	}
	f.Fuzz(func(t *testing.T, wasm []byte) {
		m, err := Read(wasm)
		if err != nil {
			return
		}
		instructions, targets := 0, 0
		for _, fn := range m.Functions {
			instructions += fn.Instructions
			targets += fn.Targets
		}
		for _, n := range []int{len(m.Functions), len(m.Tables), m.Types, m.Globals, m.Elements, m.Exports, m.Imports, instructions, targets} {
			if n > 2*len(wasm) {
				t.Fatalf("%d of %d bytes", n, len(wasm))
			}
		}
	})
}
