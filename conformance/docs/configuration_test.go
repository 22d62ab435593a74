package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// field is a key of the configuration with the comment of its struct field.
type field struct{ name, key, kind, comment, table string }

// source holds the structs of proxy/config by name.
type source struct {
	comments map[string]string  // of the structs
	fields   map[string][]field // in their order
	keys     map[string]string  // keys by the names of their fields
}

// parseDir parses the files of a package, without its tests.
func parseDir(t testing.TB, dir string) []*ast.File {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return files
}

func readConfig(t testing.TB) source {
	s := source{comments: map[string]string{}, fields: map[string][]field{}, keys: map[string]string{}}
	for _, file := range parseDir(t, root+"/proxy/config") {
		for _, d := range file.Decls {
			decl, ok := d.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, spec := range decl.Specs {
				typ, ok := spec.(*ast.TypeSpec)
				if !ok {
					continue
				}
				if list, ok := typ.Type.(*ast.StructType); ok {
					s.comments[typ.Name.Name] = decl.Doc.Text()
					s.add(typ.Name.Name, list)
				}
			}
		}
	}
	return s
}

func (s *source) add(typ string, list *ast.StructType) {
	for _, f := range list.Fields.List {
		if f.Tag == nil || len(f.Names) == 0 {
			continue
		}
		key := reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("toml")
		if key == "" || key == "-" {
			continue
		}
		name := f.Names[0].Name
		s.keys[name] = key
		s.fields[typ] = append(s.fields[typ], field{name: name, key: key, kind: kindOf(f.Type), comment: f.Doc.Text(), table: typeName(f.Type)})
	}
}

// typeName returns the name of a type, or of the elements of a list.
func typeName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.ArrayType:
		return typeName(e.Elt)
	case *ast.StarExpr:
		return typeName(e.X)
	case *ast.MapType:
		return typeName(e.Value)
	}
	return ""
}

func kindOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.ArrayType:
		return "list of " + kindOf(e.Elt)
	case *ast.StarExpr:
		return kindOf(e.X)
	case *ast.MapType:
		return "table of " + kindOf(e.Value)
	case *ast.Ident:
		switch e.Name {
		case "Duration":
			return "duration"
		case "ByteSize":
			return "size"
		case "bool":
			return "boolean"
		case "int", "int32", "int64", "uint64", "uint32":
			return "integer"
		case "float64":
			return "number"
		}
	}
	return "string"
}

var (
	goName  = regexp.MustCompile(`\b[A-Z]+[a-z0-9]+[A-Z]\w*\b`)
	goLink  = regexp.MustCompile(`\[([A-Z]\w*)\]`)
	ending  = regexp.MustCompile(`(\S)\n(\S)`)
	midWord = regexp.MustCompile(`([^.\s]\s)([A-Z]\w*)\b`) // a word that begins no sentence
	acronym = regexp.MustCompile(`^[A-Z]+$`)
)

// prose turns the comment of a struct field into text about the key.
func (s *source) prose(comment, name, key string, table []field) string {
	text := ending.ReplaceAllString(goLink.ReplaceAllString(strings.TrimSpace(comment), "$1"), "$1 $2")
	if rest, ok := strings.CutPrefix(text, name+" "); ok {
		text = "`" + key + "` " + rest
	}
	text = goName.ReplaceAllStringFunc(text, func(word string) string {
		if key, ok := s.keys[word]; ok {
			return "`" + key + "`"
		}
		return word
	})
	siblings := map[string]string{}
	for _, f := range table {
		siblings[f.name] = f.key
	}
	return midWord.ReplaceAllStringFunc(text, func(match string) string {
		parts := midWord.FindStringSubmatch(match)
		if key, ok := siblings[parts[2]]; ok && (!acronym.MatchString(parts[2]) || parts[2] == "URL") {
			return parts[1] + "`" + key + "`"
		}
		return match
	})
}

// configurationPage describes each key of the configuration.
func configurationPage(t testing.TB) string {
	s := readConfig(t)
	var b strings.Builder
	b.WriteString(notice + `# Configuration

The configuration is one TOML file. ` + "`pdproxy check FILE`" + ` checks the file. Every key is optional unless its text says otherwise. An unknown key is an error.

A duration is a text such as ` + "`\"500ms\"`, `\"30s\"` or `\"1h\"`" + `. A size is a text such as ` + "`\"64KiB\"` or `\"16MiB\"`" + `.

[config.toml](../../config.toml) contains every key with its default.
`)
	s.describe(&b, "Config", "", "")
	return b.String()
}

// describe writes the keys of a struct, then its tables.
func (s *source) describe(b *strings.Builder, typ, path, comment string) {
	if path != "" {
		fmt.Fprintf(b, "\n## %s\n", path)
		if comment != "" {
			fmt.Fprintf(b, "\n%s\n", comment)
		}
	}
	var tables []field
	for _, f := range s.fields[typ] {
		if _, ok := s.fields[f.table]; ok {
			tables = append(tables, f)
			continue
		}
		full := strings.TrimPrefix(path+"."+f.key, ".")
		fmt.Fprintf(b, "\n### %s\n\n%s\n\nType: %s.\n", full, s.prose(f.comment, f.name, f.key, s.fields[typ]), f.kind)
	}
	for _, f := range tables {
		full := strings.TrimPrefix(path+"."+f.key, ".")
		comment := s.prose(f.comment, f.name, full, s.fields[typ])
		if isPattern(full, f.table) {
			fmt.Fprintf(b, "\n## %s\n\n%s\n\nEach table has the keys of [`engine`](#engine).\n", full, comment)
			continue
		}
		s.describe(b, f.table, full, comment)
	}
}

// isPattern reports whether a table has engines that are patterns for found engines. The page
// does not repeat the keys of engines there.
func isPattern(path, table string) bool { return table == "Engine" && path != "engine" }

// TestEveryKeyIsListed walks the struct itself: the page has a heading for each key.
func TestEveryKeyIsListed(t *testing.T) {
	page := configurationPage(t)
	keys := 0
	var walk func(prefix string, typ reflect.Type)
	walk = func(prefix string, typ reflect.Type) {
		for typ.Kind() == reflect.Slice || typ.Kind() == reflect.Pointer {
			typ = typ.Elem()
		}
		if typ.Kind() != reflect.Struct {
			return
		}
		for f := range typ.NumField() {
			key := typ.Field(f).Tag.Get("toml")
			if key == "" || key == "-" {
				continue
			}
			keys++
			full := strings.TrimPrefix(prefix+"."+key, ".")
			if !strings.Contains(page, "# "+full+"\n") {
				t.Errorf("%s is not listed", full)
			}
			if of := typ.Field(f).Type; of != reflect.TypeFor[[]config.Engine]() || full == "engine" {
				walk(full, of)
			}
		}
	}
	walk("", reflect.TypeFor[config.Config]())
	if keys < 100 {
		t.Errorf("found only %d keys", keys)
	}
}

// TestNoGoNames: the page has no names of Go's source, which readers of the page do not know.
func TestNoGoNames(t *testing.T) {
	names := map[string]bool{}
	for _, file := range parseDir(t, root+"/proxy/config") {
		for _, d := range file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				names[d.Name.Name] = true
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch spec := spec.(type) {
					case *ast.TypeSpec:
						names[spec.Name.Name] = true
					case *ast.ValueSpec:
						names[spec.Names[0].Name] = true
					}
				}
			}
		}
	}
	for _, word := range regexp.MustCompile(`\b[A-Za-z]+[a-z][A-Z]\w*\b`).FindAllString(configurationPage(t), -1) {
		if names[word] {
			t.Errorf("%s is a name of the package config", word)
		}
	}
}
