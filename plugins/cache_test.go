package plugins

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestPrune(t *testing.T) {
	dir := t.TempDir()
	for i := range 10 {
		path := filepath.Join(dir, fmt.Sprint(i))
		if err := os.WriteFile(path, make([]byte, 100), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(int64(1000-i), 0) // the last one is the oldest
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	left := func() (names string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names += e.Name()
		}
		return names
	}
	prune(dir, 1000)
	if left() != "0123456789" {
		t.Errorf("at the limit: %s", left())
	}
	prune(dir, 999)
	if left() != "0123" {
		t.Errorf("remaining entries: %s", left())
	}
	prune(filepath.Join(dir, "none"), 0)
}
