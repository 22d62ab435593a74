package abi

import (
	"runtime"
	"strings"
	"testing"
)

// TestNotesKeepNoMore: a cut note does not keep the memory of the whole text.
func TestNotesKeepNoMore(t *testing.T) {
	var s StreamInfo
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for i := range MaxNotes + 1 {
		if ok := s.AddNote(strings.Repeat("n", 1<<20)); ok != (i < MaxNotes) {
			t.Fatalf("note %d: %v", i, ok)
		}
	}
	if after := heap(); after > before+1<<20 {
		t.Errorf("%d notes take %d bytes", MaxNotes, after-before)
	}
	if notes := s.Notes(); len(notes) != MaxNotes || len(notes[0]) != MaxNoteSize {
		t.Errorf("%d notes of %d bytes", len(notes), len(notes[0]))
	}
}
