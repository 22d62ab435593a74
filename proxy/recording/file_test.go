package recording

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// addLine adds a line to a recording.
func addLine(t *testing.T, r *Recorder, tokens int) {
	t.Helper()
	if err := r.Add(fmt.Appendf(nil, `{"timestamp":0,"input_length":%d,"output_length":1,"hash_ids":[1]}`, tokens)); err != nil {
		t.Fatal(err)
	}
}

// TestRecordingGoesOn: a new recording does not remove the lines of earlier recordings.
// Their processes continue to write, also a process that has not written before.
func TestRecordingGoesOn(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "trace.jsonl")
	at := time.Date(2026, 1, 2, 15, 4, 5, 678e6, time.UTC)
	begin := func() *Recorder {
		r, err := New(path, 4)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	dated := func() {
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	first := begin()
	addLine(t, first, 1)
	dated()
	second := begin()
	addLine(t, first, 2)
	dated()
	third := begin()
	addLine(t, second, 3)
	for _, r := range []*Recorder{first, second, third} { // the third recorder has written nothing
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
	fourth := begin()
	addLine(t, fourth, 4)
	text, err := os.ReadFile(path) // before the recorder is closed
	if err != nil || len(text) == 0 {
		t.Errorf("os.ReadFile(path) = %q, %v", text, err)
	}
	if err := fourth.Close(); err != nil {
		t.Error(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range text {
			if b == '\n' {
				got[f.Name()]++
			}
		}
	}
	if want := map[string]int{"trace.jsonl.20260102T150405.678Z": 2, "trace.jsonl.20260102T150405.679Z": 1, "trace.jsonl": 1}; !maps.Equal(got, want) {
		t.Errorf("lines by file %v, want %v", got, want)
	}
}

func TestRecordingToADevice(t *testing.T) {
	r, err := New(os.DevNull, 4)
	if err != nil {
		t.Fatal(err)
	}
	addLine(t, r, 1)
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	if r, err := New(t.TempDir(), 4); err == nil {
		r.Close()
		t.Error("a directory is a recording")
	}
}
