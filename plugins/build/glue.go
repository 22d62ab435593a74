package build

import (
	"fmt"
	"go/ast"
	"maps"
	"slices"
	"strings"
)

// glueFile is the name of the file that the overlay adds to the SDK's package, and initFile is the
// name of the file in package main. Its name sorts last, because Go runs the init functions of a
// package in the order of its files' names.
const (
	glueFile = "zz_pdproxy_glue.go"
	initFile = "zzzzzzzz_pdproxy_init.go"
)

// initSource calls main from an init function, because a reactor runs nothing
// else at its start. Plugins for TinyGo register themselves in main.
const initSource = `package main

func init() { main() }
`

// glueHead holds the conversions between Go's 64-bit pointers and sizes and the
// host's 32 bits.
const glueHead = `
// pdproxySize is a size for the host. Sizes are 64 bits wide here: "all of it"
// may be more than the host's 32 bits hold.
func pdproxySize(n int64) uint32 {
	if n < 0 || n > 1<<32-1 {
		return 1<<32 - 1
	}
	return uint32(n)
}

// pdproxyPointer is the address of a buffer that the host has filled.
func pdproxyPointer(p uint32) *byte { return (*byte)(unsafe.Pointer(uintptr(p))) }

// pdproxyBuffer keeps the newest buffer of the host alive: between the end of
// the allocation and the return of the host call nobody else knows it.
var pdproxyBuffer []byte

func pdproxyAllocate(n uint32) unsafe.Pointer {
	if n == 0 {
		return nil
	}
	pdproxyBuffer = make([]byte, n)
	return unsafe.Pointer(&pdproxyBuffer[0])
}
`

// glue returns the Go source that turns the SDK's //export functions into
// imports and exports of Go's compiler.
func (s *tinySDK) glue() (string, error) {
	var code strings.Builder
	used := map[string]bool{}
	for _, f := range s.hostCalls {
		text, err := s.hostCall(f)
		if err != nil {
			return "", err
		}
		code.WriteString(text)
	}
	for _, f := range s.callbacks {
		text, err := s.callback(f, used)
		if err != nil {
			return "", err
		}
		code.WriteString(text)
	}
	var head strings.Builder
	fmt.Fprintf(&head, "package %s\n\nimport (\n\t\"unsafe\"\n", s.pkg.Name)
	for _, name := range slices.Sorted(maps.Keys(used)) {
		fmt.Fprintf(&head, "\t%s %q\n", name, s.imports[name])
	}
	head.WriteString(")\n")
	return head.String() + glueHead + code.String(), nil
}

// hostCall returns an import, and the SDK's function that wraps it.
func (s *tinySDK) hostCall(f function) (string, error) {
	var declared, passed, imported []string
	var before, after strings.Builder
	for i, kind := range s.types(f.decl.Type.Params) {
		a, ok := translate(kind, i)
		if !ok {
			return "", fmt.Errorf("%s: %s has a parameter of type %s, which has no form in WebAssembly", s.pkg.ImportPath, f.export, kind)
		}
		declared = append(declared, fmt.Sprintf("p%d %s", i, kind))
		passed, imported = append(passed, a.expr), append(imported, a.kind)
		before.WriteString(a.before)
		after.WriteString(a.after)
	}
	result := strings.Join(s.types(f.decl.Type.Results), ", ")
	name := f.decl.Name.Name
	call := fmt.Sprintf("pdproxyHost%s(%s)", name, strings.Join(passed, ", "))
	if result != "" {
		call = "status := " + call
		after.WriteString("\treturn status\n")
	}
	return fmt.Sprintf("\n//go:wasmimport env %s\nfunc pdproxyHost%s(%s) %s\n\nfunc %s(%s) %s {\n%s\t%s\n%s}\n",
		f.export, name, strings.Join(imported, ", "), result,
		name, strings.Join(declared, ", "), result, before.String(), call, after.String()), nil
}

// argument describes how a parameter p<i> of the SDK's function is passed to
// the host.
type argument struct {
	expr, kind    string // the passed expression and its type
	before, after string // statements around the call
}

// translate returns the form in which a parameter of that type is passed to the
// host; ok is false when there is none. It covers all types that the SDKs use:
// numbers, also with names of their own, bools, addresses, and the addresses of
// results, which the host writes with 4 bytes where Go has 8.
func translate(kind string, i int) (a argument, ok bool) {
	p, r := fmt.Sprintf("p%d", i), fmt.Sprintf("r%d", i)
	result := argument{expr: "unsafe.Pointer(&" + r + ")", kind: "unsafe.Pointer", before: "\tvar " + r + " uint32\n"}
	switch kind {
	case "int", "uint", "uintptr":
		return argument{expr: "pdproxySize(int64(" + p + "))", kind: "uint32"}, true
	case "bool":
		return argument{expr: r, kind: "uint32", before: fmt.Sprintf("\tvar %s uint32\n\tif %s {\n\t\t%s = 1\n\t}\n", r, p, r)}, true
	case "**byte":
		result.after = fmt.Sprintf("\tif %s != nil {\n\t\t*%s = pdproxyPointer(%s)\n\t}\n", p, p, r)
		return result, true
	case "*int", "*uint":
		result.after = fmt.Sprintf("\tif %s != nil {\n\t\t*%s = %s(%s)\n\t}\n", p, p, kind[1:], r)
		return result, true
	case "unsafe.Pointer":
		return argument{expr: p, kind: kind}, true
	}
	base, pointer := strings.CutPrefix(kind, "*")
	if base == "string" || strings.ContainsAny(base, "*[](.") {
		return argument{}, false
	}
	if pointer {
		return argument{expr: "unsafe.Pointer(" + p + ")", kind: "unsafe.Pointer"}, true
	}
	return argument{expr: p, kind: kind}, true
}

// callback returns an export that wraps a function of the SDK. It adds the
// imports of the SDK's file that the signature needs to used.
func (s *tinySDK) callback(f function, used map[string]bool) (string, error) {
	if f.export == "proxy_on_memory_allocate" || f.export == "malloc" {
		return fmt.Sprintf("\n//go:wasmexport %s\nfunc pdproxyGuest%s(n uint32) unsafe.Pointer { return pdproxyAllocate(n) }\n",
			f.export, f.decl.Name.Name), nil
	}
	var declared, passed []string
	for i, p := range s.types(f.decl.Type.Params) {
		name, kind, arg := fmt.Sprintf("p%d", i), p, fmt.Sprintf("p%d", i)
		switch p {
		case "int", "uint":
			kind, arg = "uint32", p+"("+name+")"
		case "bool":
			kind, arg = "uint32", name+" != 0"
		}
		declared, passed = append(declared, name+" "+kind), append(passed, arg)
	}
	results := s.types(f.decl.Type.Results)
	for _, list := range []*ast.FieldList{f.decl.Type.Params, f.decl.Type.Results} {
		if err := s.packages(list, used); err != nil {
			return "", err
		}
	}
	call := fmt.Sprintf("%s(%s)", f.decl.Name.Name, strings.Join(passed, ", "))
	if len(results) > 0 {
		call = "return " + call
	}
	return fmt.Sprintf("\n//go:wasmexport %s\nfunc pdproxyGuest%s(%s) %s {\n\t%s\n}\n",
		f.export, f.decl.Name.Name, strings.Join(declared, ", "), strings.Join(results, ", "), call), nil
}

// types returns the types of a list, one for each name.
func (s *tinySDK) types(list *ast.FieldList) []string {
	if list == nil {
		return nil
	}
	var types []string
	for _, field := range list.List {
		for range max(1, len(field.Names)) {
			types = append(types, s.source(field.Type))
		}
	}
	return types
}

// packages records the packages of a list's types.
func (s *tinySDK) packages(list *ast.FieldList, used map[string]bool) (err error) {
	if list == nil {
		return nil
	}
	ast.Inspect(list, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		name, ok := sel.X.(*ast.Ident)
		if !ok || s.imports[name.Name] == "" {
			err = fmt.Errorf("%s: the type %s cannot be found", s.pkg.ImportPath, s.source(sel))
			return false
		}
		used[name.Name] = true
		return true
	})
	return err
}
