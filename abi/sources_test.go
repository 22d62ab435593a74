package abi

import (
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestSources: every source of the two packages is embedded.
func TestSources(t *testing.T) {
	var want []string
	for _, pattern := range []string{"*.go", "guest/*.go"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, names...)
	}
	want = slices.DeleteFunc(want, func(name string) bool { return name == "sources.go" || strings.HasSuffix(name, "_test.go") })
	var got []string
	err := fs.WalkDir(Sources, ".", func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".go") {
			got = append(got, path)
		}
		return err
	})
	slices.Sort(want)
	slices.Sort(got)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("embedded are %v, not %v; %v", got, want, err)
	}
}
