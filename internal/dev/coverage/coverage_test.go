package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const lines = `mode: set
example.com/m/a/x.go:3.20,5.2 3 0
example.com/m/a/x.go:7.20,9.2 1 1
example.com/m/a/b/y.go:1.1,2.2 4 7
mode: set
example.com/m/a/x.go:3.20,5.2 3 1
example.com/m/c/z.go:1.1,2.2 5 0
`

// A block counts once. It is covered if one test program has run it.
func TestProfile(t *testing.T) {
	p := make(profile)
	if err := p.add(lines); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(p.packages(), " "); got != "example.com/m/a example.com/m/a/b example.com/m/c" {
		t.Errorf("packages %s", got)
	}
	for pkg, want := range map[string]tally{"example.com/m/a": {4, 4}, "example.com/m/a/b": {4, 4}, "example.com/m/c": {5, 0}, "example.com/m": {}} {
		if got := p.tally(pkg); got != want {
			t.Errorf("%s: p.tally(pkg) = %+v, want %+v", pkg, got, want)
		}
	}
	if got := (tally{3, 2}).String(); got != "66.7 %" {
		t.Errorf("got the share %s", got)
	}
	for _, text := range []string{"x", "x.go:1.1,2.2 a 1", "x.go 1.1,2.2 1 1\n"} {
		if err := make(profile).add(text); err == nil {
			t.Errorf("%q is accepted as a profile", text)
		}
	}
}

// newModule makes a module with the profile of its tests, and makes it the
// working directory.
func newModule(t *testing.T) (profile string) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":                     "module example.com/m\n\ngo 1.26\n",
		"a/a.go":                     "package a\n\nfunc Even(n int) bool {\n\tif n%2 == 0 {\n\t\treturn true\n\t}\n\treturn false\n}\n",
		"a/a_test.go":                "package a\n\nimport \"testing\"\n\nfunc FuzzEven(f *testing.F) {\n\tf.Add(1)\n\tf.Fuzz(func(t *testing.T, n int) {\n\t\tif n < 0 {\n\t\t\tt.Fatal(n)\n\t\t}\n\t\tEven(n)\n\t})\n}\n",
		"a/testdata/fuzz/FuzzEven/x": "go test fuzz v1\nint(2)\n",
		"profile":                    "mode: set\nexample.com/m/a/a.go:3.24,4.15 1 1\nexample.com/m/a/a.go:4.15,6.3 1 0\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	return filepath.Join(dir, "profile")
}

func TestShow(t *testing.T) {
	profile := newModule(t)
	var out bytes.Buffer
	if err := show(&out, []string{profile}, []string{"a"}, 50); err != nil {
		t.Fatal(err)
	}
	words := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{"2 50.0 % a ", "2 50.0 % a/... in all", "2 1 23 100.0 % a FuzzEven", "1 fuzz targets, 0 of them without files"} {
		if !strings.Contains(words, want) {
			t.Errorf("no %q in %s", want, words)
		}
	}
	if err := show(&out, []string{profile}, []string{"a"}, 51); err == nil || !strings.Contains(err.Error(), "a/... is covered to 50.0 %") {
		t.Errorf("below the minimum: %v", err)
	}
	if err := os.WriteFile("a/testdata/fuzz/FuzzEven/y", []byte("go test fuzz v1\nint(-1)\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := show(&out, []string{profile}, []string{"a"}, 50); err == nil || !strings.Contains(err.Error(), "FuzzEven") {
		t.Errorf("a seed that fails: %v", err)
	}
}
