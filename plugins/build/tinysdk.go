package build

import (
	"bytes"
	"fmt"
	"go/ast"
	gobuild "go/build"
	"go/parser"
	"go/printer"
	"go/token"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// tinySDK is an SDK written for TinyGo
// (github.com/tetratelabs/proxy-wasm-go-sdk from v0.3.0 on, and its forks). One
// package declares the host calls as functions without body and the callbacks
// as functions with one. Both are marked with the comment //export NAME, which
// Go's compiler does not know. For native tests the same package has stubs of
// the host calls.
type tinySDK struct {
	pkg       goPackage
	fset      *token.FileSet
	hostCalls []function
	callbacks []function
	tags      string            // build tags that select the stubs, "" for none
	imports   map[string]string // name to path, in the callbacks' files
	stubs     map[string][]byte // file name to its text without the stubs
}

// function is a function with an //export comment.
type function struct {
	export string
	decl   *ast.FuncDecl
}

// stubTag is the tag with which SDKs before v0.20.0 select their stubs. Later
// ones select them whenever the compiler is not TinyGo.
const stubTag = "proxytest"

// readTinySDK reads the SDK in pkg; it returns nil if pkg is not one.
func readTinySDK(pkg *goPackage) (*tinySDK, error) {
	s := &tinySDK{pkg: *pkg, fset: token.NewFileSet(), imports: map[string]string{}, stubs: map[string][]byte{}}
	files := map[string]*ast.File{}
	text := map[string][]byte{}
	for _, name := range slices.Concat(pkg.GoFiles, pkg.IgnoredGoFiles) {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		src, err := os.ReadFile(filepath.Join(pkg.Dir, name))
		if err != nil {
			return nil, err
		}
		text[name] = src
	}
	if !slices.ContainsFunc(slices.Collect(maps.Values(text)), declaresHostCalls) {
		return nil, nil
	}
	for name, src := range text {
		file, err := parser.ParseFile(s.fset, filepath.Join(pkg.Dir, name), src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files[name] = file
		s.collect(file)
	}
	if len(s.hostCalls) == 0 {
		return nil, nil
	}
	byName := func(a, b function) int { return strings.Compare(a.export, b.export) }
	slices.SortFunc(s.hostCalls, byName)
	slices.SortFunc(s.callbacks, byName)
	return s, s.findStubs(files, text)
}

// declaresHostCalls is a quick check before the parser runs.
func declaresHostCalls(src []byte) bool { return bytes.Contains(src, []byte("//export proxy_log\n")) }

// collect adds the exported functions of one file.
func (s *tinySDK) collect(file *ast.File) {
	found := false
	for _, d := range file.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Recv != nil || fn.Doc == nil {
			continue
		}
		for _, c := range fn.Doc.List {
			name, ok := strings.CutPrefix(c.Text, "//export ")
			if !ok {
				continue
			}
			f := function{export: strings.TrimSpace(name), decl: fn}
			if fn.Body == nil {
				s.hostCalls = append(s.hostCalls, f)
				continue
			}
			s.callbacks = append(s.callbacks, f)
			found = true
		}
	}
	if !found {
		return
	}
	for _, i := range file.Imports {
		p, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			continue
		}
		name := path.Base(p)
		if i.Name != nil {
			name = i.Name.Name
		}
		s.imports[name] = p
	}
}

// findStubs selects the build tags and cuts the stubs out of the files that
// contain them.
func (s *tinySDK) findStubs(files map[string]*ast.File, text map[string][]byte) error {
	calls := map[string]bool{}
	for _, f := range s.hostCalls {
		calls[f.decl.Name.Name] = true
	}
	for _, tags := range []string{"", stubTag} {
		cut, bodyless := map[string][]byte{}, false
		for name, file := range files {
			in, err := wasmContext(tags).MatchFile(s.pkg.Dir, name)
			if err != nil {
				return err
			}
			if !in {
				continue
			}
			src := bytes.Clone(text[name])
			for _, d := range file.Decls {
				fn, ok := d.(*ast.FuncDecl)
				if !ok || fn.Recv != nil || !calls[fn.Name.Name] {
					continue
				}
				bodyless = bodyless || fn.Body == nil
				blank(src[s.offset(fn.Pos()):s.offset(fn.End())])
				cut[name] = src
			}
		}
		if !bodyless {
			s.tags, s.stubs = tags, cut
			return nil
		}
	}
	return fmt.Errorf("%s: its host calls cannot be distinguished from its stubs", s.pkg.ImportPath)
}

// wasmContext selects the files of the build as the go command will.
func wasmContext(tags string) *gobuild.Context {
	c := gobuild.Default
	c.GOOS, c.GOARCH, c.Compiler, c.CgoEnabled = "wasip1", "wasm", "gc", false
	c.BuildTags = nil
	if tags != "" {
		c.BuildTags = []string{tags}
	}
	return &c
}

func (s *tinySDK) offset(p token.Pos) int { return s.fset.Position(p).Offset }

// blank overwrites code with spaces, so that line numbers stay.
func blank(code []byte) {
	for i, c := range code {
		if c != '\n' {
			code[i] = ' '
		}
	}
}

// source prints a type.
func (s *tinySDK) source(e ast.Expr) string {
	var b strings.Builder
	_ = printer.Fprint(&b, s.fset, e) // a strings.Builder returns no errors
	return b.String()
}
