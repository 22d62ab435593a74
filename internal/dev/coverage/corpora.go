package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
)

// showCorpora runs each fuzz target below the folders only on its seeds.
func showCorpora(to io.Writer, module string, folders []string) error {
	var patterns []string
	for _, folder := range folders {
		patterns = append(patterns, "./"+folder+"/...")
	}
	lines, err := goList(append([]string{"-f", `{{.ImportPath}} {{.Dir}} {{join .TestGoFiles " "}} {{join .XTestGoFiles " "}}`}, patterns...)...)
	if err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "pdproxy-coverage")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "seeds\tfiles\tbytes\treached\t fuzz target")
	var errs []error
	targets, empty := 0, 0
	for _, line := range lines {
		words := strings.Fields(line)
		names, err := fuzzTargets(words[1], words[2:])
		if err != nil {
			return err
		}
		if len(names) == 0 {
			continue
		}
		program, err := build(scratch, words[0])
		if err != nil {
			return err
		}
		for _, name := range names {
			c, err := program.run(words[1], name)
			errs = append(errs, err)
			fmt.Fprintf(table, "%d\t%d\t%d\t%s\t %s %s\n", c.seeds, c.files, c.bytes, c.reached, strings.TrimPrefix(words[0], module+"/"), name)
			targets++
			if c.files == 0 {
				empty++
			}
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(to, "%d fuzz targets, %d of them without files in testdata/fuzz\n", targets, empty)
	return errors.Join(append(errs, err)...)
}

// fuzzTargets returns the names of the fuzz targets in the test files of a folder.
func fuzzTargets(dir string, files []string) (names []string, err error) {
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Fuzz") {
				names = append(names, f.Name.Name)
			}
		}
	}
	slices.Sort(names)
	return names, nil
}

// program is the test program of a package. It counts the package's executed
// statements.
type program struct{ pkg, path, profile string }

func build(scratch, pkg string) (*program, error) {
	p := &program{pkg: pkg, path: filepath.Join(scratch, strings.ReplaceAll(pkg, "/", "_")), profile: filepath.Join(scratch, "profile")}
	if out, err := exec.Command("go", "test", "-c", "-cover", "-vet=off", "-o", p.path, pkg).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the tests of %s: %w\n%s", pkg, err, out)
	}
	return p, nil
}

// corpus describes the initial inputs of a fuzz target.
type corpus struct {
	seeds        int // in total
	files, bytes int // those in testdata/fuzz, and their size
	reached      tally
}

// run runs a target on its seeds.
func (p *program) run(dir, target string) (c corpus, err error) {
	test := exec.Command(p.path, "-test.run=^"+target+"$", "-test.v", "-test.coverprofile="+p.profile)
	test.Dir = dir
	out, err := test.CombinedOutput()
	if err != nil {
		return c, fmt.Errorf("%s %s: %w\n%s", p.pkg, target, err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "=== RUN   "+target+"/") {
			c.seeds++
		}
	}
	if c.seeds == 0 {
		return c, fmt.Errorf("%s %s has no seed", p.pkg, target)
	}
	files, err := os.ReadDir(filepath.Join(dir, "testdata", "fuzz", target))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return c, err
	}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			return c, err
		}
		c.files, c.bytes = c.files+1, c.bytes+int(info.Size())
	}
	text, err := os.ReadFile(p.profile)
	if err != nil {
		return c, err
	}
	reached := make(profile)
	if err := reached.add(string(text)); err != nil {
		return c, err
	}
	c.reached = reached.tally(p.pkg)
	return c, nil
}
