package main

import (
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// checker checks the types of mutated packages, without a build of each mutant.
type checker struct {
	fset  *token.FileSet
	other types.Importer // of the unmodified packages
}

// newChecker reads the exported data of the packages of the module at dir. The go command
// compiles missing packages.
func newChecker(dir string) (*checker, error) {
	list := exec.Command("go", "list", "-export", "-deps", "-f", "{{with .Export}}{{$.ImportPath}} {{.}}{{end}}", "./...")
	list.Dir, list.Stderr = dir, os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list -export: %w", err)
	}
	exports := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		exports[path] = file
	}
	c := &checker{fset: token.NewFileSet()}
	c.other = importer.ForCompiler(c.fset, "gc", func(path string) (io.ReadCloser, error) {
		if exports[path] == "" {
			return nil, fmt.Errorf("go list has no export data of package %s", path)
		}
		return os.Open(exports[path])
	})
	return c, nil
}

// compiles returns the reason why the package of a mutated file does not
// compile, nil if it does.
func (c *checker) compiles(s *sources, file sourceFile, text string) error {
	var files []*ast.File
	for _, f := range s.files {
		if f.pkg != file.pkg {
			continue
		}
		if f.path == file.path {
			f.text = text
		}
		parsed, err := parser.ParseFile(c.fset, filepath.Base(f.path), f.text, parser.SkipObjectResolution)
		if err != nil {
			return fmt.Errorf("it does not compile: %w", err)
		}
		files = append(files, parsed)
	}
	if _, err := (&types.Config{Importer: c.other}).Check(file.pkg.ImportPath, c.fset, files, nil); err != nil {
		return fmt.Errorf("it does not compile: %w", err)
	}
	return nil
}
