package meter

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

// dataModule exports a memory of two pages with these data segments.
func dataModule(segments ...[]byte) []byte {
	return build(
		appendSection(nil, sectionMemory, []byte{1, 0, 2}),
		appendSection(nil, sectionExport, append(append([]byte{1}, appendName(nil, "memory")...), kindMemory, 0)),
		appendSection(nil, sectionData, append(appendUint(nil, len(segments)), bytes.Join(segments, nil)...)))
}

// active encodes an active segment at a constant address.
func active(at int32, data string) []byte {
	return appendName(append(appendConst([]byte{0}, at), opEnd), data)
}

// afterJoin returns the module after JoinData, and the number of its segments.
func afterJoin(t testing.TB, wasm []byte) (after []byte, segments int) {
	t.Helper()
	m, err := Read(wasm)
	if err != nil {
		t.Fatal(err)
	}
	m.JoinData()
	after = m.Encode(wasm)
	again, err := Read(after)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range again.sections {
		if s.id == sectionData {
			segments = (&reader{data: s.data}).count()
		}
	}
	return after, segments
}

// TestJoinData: segments that are near each other become one, whatever their order. Where the order or the number
// of the segments has a meaning, the module stays as it is.
func TestJoinData(t *testing.T) {
	for _, c := range []struct {
		name     string
		wasm     []byte
		segments int
	}{
		{"neighbours", dataModule(active(0, "ab"), active(2, "c"), active(3+maxGap, "d")), 1},
		{"too far", dataModule(active(0, "ab"), active(2, "c"), active(4+maxGap, "d")), 2},
		{"order", dataModule(active(500, "x"), active(501, ""), active(100, "y"), active(520, "z")), 2},
		{"one", dataModule(active(7, "abc")), 1},
		{"overlap", dataModule(active(0, "abc"), active(2, "d"), active(3, "e")), 3},
		{"negative address", dataModule(active(0, "a"), active(1, "b"), active(-8, "c")), 3},
		{"passive", dataModule(active(0, "a"), active(1, "b"), appendName([]byte{1}, "c")), 3},
		{"explicit memory", dataModule(active(0, "a"), append([]byte{2, 0}, active(1, "b")[1:]...)), 2},
		{"counted", build(appendSection(nil, sectionMemory, []byte{1, 0, 2}), appendSection(nil, sectionDataCount, []byte{2}),
			appendSection(nil, sectionData, slices.Concat([]byte{2}, active(0, "a"), active(1, "b")))), 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			after, n := afterJoin(t, c.wasm)
			if n != c.segments {
				t.Errorf("%d segments, want %d", n, c.segments)
			}
			sameMemory(t, c.wasm, after)
		})
	}
}

// TestJoinDataOfGuests: the modules of the repository have few segments, which give the same memory.
func TestJoinDataOfGuests(t *testing.T) {
	for path, wasm := range guests(t) {
		m, err := Read(wasm)
		if err != nil {
			t.Fatal(err)
		}
		before, _ := initial(m)
		m.JoinData()
		if after, n := initial(m); n > 50 || !bytes.Equal(before, after) {
			t.Errorf("%s: %d segments, same memory: %v", path, n, bytes.Equal(before, after))
		}
	}
}

// initial returns the memory that the active data segments of a module make, and their number.
func initial(m *Module) (memory []byte, segments int) {
	memory = make([]byte, 4<<20)
	for _, s := range m.sections {
		if s.id != sectionData {
			continue
		}
		r := &reader{data: s.data}
		for segments = range r.count() {
			r.skip(2) // kind, i32.const
			at := r.leb(5)
			r.skip(1) // end
			copy(memory[at:], r.bytes())
		}
	}
	return memory, segments + 1
}

// sameMemory reports a difference of the memories of two modules after their start.
func sameMemory(t testing.TB, wasm, other []byte) {
	t.Helper()
	a, b := run(t, wasm), run(t, other)
	switch {
	case (a.instance == nil) != (b.instance == nil):
		t.Errorf("one of the modules starts: %v, %v", a.instance != nil, b.instance != nil)
	case a.instance != nil && !bytes.Equal(a.memory(), b.memory()):
		t.Error("the memories differ")
	}
}

// FuzzJoinData: a module starts with the same memory before and after JoinData. The input has three bytes for each
// segment: its distance from the last end, its kind, and its size.
func FuzzJoinData(f *testing.F) {
	f.Add([]byte{0, 0, 3, 1, 0, 4, 200, 0, 9})
	f.Add([]byte{10, 0, 3, 0, 1, 4, 2, 0, 9})
	f.Add([]byte{10, 0, 3, 0, 2, 4, 2, 3, 9})
	f.Fuzz(func(t *testing.T, input []byte) {
		var segments [][]byte
		end := int32(100)
		for c := range slices.Chunk(input[:len(input)/3*3], 3) {
			at := end + int32(c[0]) - 8
			if c[1] > 250 {
				at = int32(c[1]) << (c[0] % 24) // far away, or out of the memory
			}
			data := strings.Repeat(string(rune('a'+len(segments)%26)), int(c[2]%100))
			s := active(at, data)
			if c[1]%16 == 1 {
				s = append([]byte{2, 0}, s[1:]...)
			}
			segments = append(segments, s)
			end = at + int32(len(data))
		}
		wasm := dataModule(segments...)
		after, _ := afterJoin(t, wasm)
		sameMemory(t, wasm, after)
	})
}
