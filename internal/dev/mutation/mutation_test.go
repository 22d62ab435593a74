package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestParseList(t *testing.T) {
	list, err := parseList("x.txt", "# why\n\nmutant one: a fault: of a kind\ntests ^TestA$\n-\tif a {\n-\t\tb()\n+\tif b {\n\nmutant two: gone\n-x\n")
	if err != nil {
		t.Fatal(err)
	}
	one, two := list[0], list[1]
	if len(list) != 2 || one.name != "one" || one.fault != "a fault: of a kind" || one.tests.String() != "^TestA$" || one.old != "\tif a {\n\t\tb()" || one.new != "\tif b {" || one.where != "x.txt:3" {
		t.Errorf("%+v", one)
	}
	if two.name != "two" || two.tests != nil || two.old != "x" || two.new != "" {
		t.Errorf("%+v", two)
	}
}

func TestListsThatAreWrong(t *testing.T) {
	for name, text := range map[string]string{
		"no mutant":       "-x",
		"no fault":        "mutant one\n-x",
		"no text":         "mutant one: a fault",
		"no change":       "mutant one: a fault\n-x\n+x",
		"another line":    "mutant one: a fault\nx",
		"a bad pattern":   "mutant one: a fault\ntests (\n-x",
		"tests twice":     "mutant one: a fault\ntests a\ntests b\n-x",
		"only a new text": "mutant one: a fault\n+x",
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := parseList("x.txt", text); err == nil {
				t.Error("no error")
			}
		})
	}
}

func TestNamesAreUnique(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a.txt", "b.txt"} {
		write(t, filepath.Join(dir, name), "mutant one: a fault\n-x\n")
	}
	if _, err := readLists(dir); err == nil || !strings.Contains(err.Error(), "same name") {
		t.Errorf("got %v", err)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// newModule writes a module with a package and tests of it in another one.
func newModule(t *testing.T) string {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":              "module example.com/m\n\ngo 1.26\n",
		"code/code.go":        "package code\n\nfunc Sum(a, b int) int { return a + b }\n\nfunc Loose() int { return 7 }\n\nfunc Twice() int { return 2 }\n",
		"code/more.go":        "package code\n\nfunc Again() int { return 2 }\n\nfunc Loop(n int) int {\n\tfor i := 0; i < n; i++ {\n\t\tn--\n\t}\n\treturn n\n}\n",
		"code/code_test.go":   "package code\n\nimport \"testing\"\n\nfunc TestSum(t *testing.T) {\n\tif Sum(1, 2) != 3 {\n\t\tt.Error(\"sum\")\n\t}\n}\n\nfunc TestLoop(t *testing.T) {\n\tif Loop(4) != 2 {\n\t\tt.Error(\"loop\")\n\t}\n}\n",
		"other/other_test.go": "package other\n\nimport (\n\t\"testing\"\n\n\t\"example.com/m/code\"\n)\n\nfunc TestLoose(t *testing.T) {\n\tif code.Loose() != 7 {\n\t\tt.Error(\"loose\")\n\t}\n}\n",
		"apart/apart_test.go": "package apart\n\nimport \"testing\"\n\nfunc TestLoose(t *testing.T) { t.Error(\"this package does not link the code\") }\n",
	} {
		write(t, filepath.Join(dir, name), text)
	}
	return dir
}

func readModule(t *testing.T, dir string) (*sources, *checker) {
	s, err := readSources(dir, []string{"code"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := newChecker(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s, c
}

func TestRuns(t *testing.T) {
	dir := newModule(t)
	s, c := readModule(t, dir)
	before, _ := os.ReadFile(filepath.Join(dir, "code", "code.go"))
	for _, tt := range []struct{ name, entry, killer, wrong string }{
		{"killed", "-a + b\n+a - b", "TestSum", ""},
		{"killed from another package", "tests ^TestLoose$\n-return 7\n+return 8", "TestLoose", ""},
		{"survives", "-return 7\n+return 8", "", ""},
		{"hangs", "tests ^TestLoop$\n-\t\tn--\n+\t\ti--", "example.com/m/code", ""},
		{"does not compile", "-return 7\n+return x", "", "does not compile"},
		{"text that does not occur", "-return 9\n+return 8", "", "0 times"},
		{"text that occurs twice", "-return 2\n+return 3", "", "2 times"},
		{"tests that do not exist", "tests ^TestGone$\n-return 7\n+return 8", "", "no test"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list, err := parseList("x.txt", "mutant m: a fault\n"+tt.entry)
			if err != nil {
				t.Fatal(err)
			}
			j, err := prepare(s, c, &list[0])
			var o outcome
			if err == nil {
				o = j.run(dir, t.TempDir(), 2*time.Second)
				err = o.err
			}
			if o.killer != tt.killer || (err == nil) != (tt.wrong == "") || err != nil && !strings.Contains(err.Error(), tt.wrong) {
				t.Errorf("detected by %q, %v", o.killer, err)
			}
		})
	}
	if after, _ := os.ReadFile(filepath.Join(dir, "code", "code.go")); string(after) != string(before) {
		t.Error("a source file has changed")
	}
}

func TestSuite(t *testing.T) {
	dir := newModule(t)
	s, c := readModule(t, dir)
	list, err := parseList("x.txt", "mutant a: killed\n-a + b\n+a - b\n\nmutant b: survives\n-return 7\n+return 8\n")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, only, want string
		least            float64
	}{
		{"half is enough", "", "", 50},
		{"half of the mutants is not enough", "", "less than 95", 95},
		{"one that is killed", "^a$", "", 95},
		{"none", "^c$", "no mutant", 95},
	} {
		t.Run(tt.name, func(t *testing.T) {
			jobs, err := prepareAll(s, c, list, regexp.MustCompile(tt.only))
			if err == nil {
				err = suite{dir: dir, scratch: t.TempDir(), limit: time.Minute, workers: 2}.run(jobs, tt.least)
			}
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v", err)
			}
		})
	}
	write(t, filepath.Join(dir, "code", "red_test.go"), "package code\n\nimport \"testing\"\n\nfunc TestRed(t *testing.T) { t.Error() }\n")
	jobs, err := prepareAll(s, c, list, regexp.MustCompile("^a$"))
	if err != nil {
		t.Fatal(err)
	}
	if err := (suite{dir: dir, scratch: t.TempDir(), limit: time.Minute, workers: 1}).run(jobs, 0); err == nil || !strings.Contains(err.Error(), "do not pass") {
		t.Errorf("tests that fail without a mutant: %v", err)
	}
}
