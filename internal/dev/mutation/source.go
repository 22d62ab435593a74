package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// goPackage is the description of a package by `go list -json`.
type goPackage struct {
	ImportPath   string
	Dir          string
	GoFiles      []string
	TestGoFiles  []string
	XTestGoFiles []string
	Deps         []string
	TestImports  []string
	XTestImports []string

	tests []string // names of its tests, examples and fuzz targets
}

// sources is the module under test.
type sources struct {
	packages []*goPackage
	byPath   map[string]*goPackage
	files    []sourceFile // files that mutants may change
}

type sourceFile struct {
	path string
	pkg  *goPackage
	text string
}

// readSources lists the packages of the module in dir. Mutants may change the
// packages below the given folders.
func readSources(dir string, folders []string) (*sources, error) {
	list := exec.Command("go", "list", "-json=ImportPath,Dir,GoFiles,TestGoFiles,XTestGoFiles,Deps,TestImports,XTestImports", "./...")
	list.Dir, list.Stderr = dir, os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	s := &sources{byPath: make(map[string]*goPackage)}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		p := new(goPackage)
		if err := d.Decode(p); errors.Is(err, io.EOF) {
			return s, nil
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		s.packages = append(s.packages, p)
		s.byPath[p.ImportPath] = p
		if err := s.read(dir, folders, p); err != nil {
			return nil, err
		}
	}
}

// read reads the names of p's tests, and its files if mutants may change them.
func (s *sources) read(dir string, folders []string, p *goPackage) error {
	for _, name := range slices.Concat(p.TestGoFiles, p.XTestGoFiles) {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && isTest(f.Name.Name) {
				p.tests = append(p.tests, f.Name.Name)
			}
		}
	}
	below, err := filepath.Rel(dir, p.Dir)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(folders, func(f string) bool { return below == f || strings.HasPrefix(below, f+string(filepath.Separator)) }) {
		return nil
	}
	for _, name := range p.GoFiles {
		path := filepath.Join(p.Dir, name)
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		s.files = append(s.files, sourceFile{path: path, pkg: p, text: string(text)})
	}
	return nil
}

func isTest(name string) bool {
	return strings.HasPrefix(name, "Test") && name != "TestMain" || strings.HasPrefix(name, "Fuzz")
}

// find returns the only file that contains the text, which must occur in it once.
func (s *sources) find(text string) (found sourceFile, err error) {
	count := 0
	for _, f := range s.files {
		if n := strings.Count(f.text, text); n > 0 {
			count += n
			found = f
		}
	}
	if count != 1 {
		return found, fmt.Errorf("its text is in the sources %d times, want once", count)
	}
	return found, nil
}

// testers returns the packages with a test of a matching name that link the mutated
// package. A nil pattern means the mutated package alone.
func (s *sources) testers(mutated *goPackage, tests *regexp.Regexp) (paths []string) {
	if tests == nil {
		return []string{mutated.ImportPath}
	}
	for _, p := range s.packages {
		if slices.ContainsFunc(p.tests, tests.MatchString) && s.links(p, mutated.ImportPath) {
			paths = append(paths, p.ImportPath)
		}
	}
	return paths
}

// links reports whether the tests of p link the package at path.
func (s *sources) links(p *goPackage, path string) bool {
	if p.ImportPath == path || slices.Contains(p.Deps, path) {
		return true
	}
	for _, imported := range slices.Concat(p.TestImports, p.XTestImports) {
		if i := s.byPath[imported]; imported == path || i != nil && slices.Contains(i.Deps, path) {
			return true
		}
	}
	return false
}
