package conformance

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var updateNotices = flag.Bool("update-notices", false, "write cmd/THIRD_PARTY_NOTICES.md again")

// noticesFile is in package cmd, which embeds it.
const noticesFile = "../cmd/THIRD_PARTY_NOTICES.md"

// linkedOn are the systems for which the binary is built: each may link other modules.
var linkedOn = [][2]string{{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "arm64"}}

// licences are the allowed licences, each with a sentence that only its text
// contains. All of them allow distributing a binary under Apache-2.0 together
// with their texts.
var licences = []struct{ name, sentence string }{
	{"Apache-2.0", "apache license version 2.0, january 2004"},
	{"MIT", "permission is hereby granted, free of charge, to any person obtaining a copy of this software"},
	{"BSD", "redistribution and use in source and binary forms, with or without modification, are permitted"},
	{"ISC", "permission to use, copy, modify, and/or distribute this software for any purpose with or without fee"},
	{"ISC", "permission to use, copy, modify, and distribute this software for any purpose with or without fee"},
	{"CC0-1.0", "this work is released into the public domain with cc0 1.0"},
}

// copyleft are phrases of licences that require the source of linked code.
var copyleft = []string{"gnu general public", "gnu lesser", "gnu library", "gnu affero", "mozilla public license", "eclipse public license", "server side public license", "common development and distribution"}

// linked is a module in the binary, with the paths of its licence files.
type linked struct {
	path, version, dir string
	files              []string // sorted; includes NOTICE files
}

// TestNotices: the notices are those of the modules in the binary, and each
// module has an allowed licence. With -update-notices the test writes them.
func TestNotices(t *testing.T) {
	modules := linkedModules(t)
	if len(modules) < 10 {
		t.Fatalf("only %d modules", len(modules))
	}
	text := notices(t, modules)
	if *updateNotices {
		if err := os.WriteFile(noticesFile, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile(noticesFile); err != nil || !bytes.Equal(have, text) {
		t.Errorf("%s is not of the modules that are linked in (%v): run make notices", filepath.Base(noticesFile), err)
	}
}

// linkedModules returns the modules of all linkedOn, sorted by path, and Go
// itself.
func linkedModules(t *testing.T) []*linked {
	t.Helper()
	found := map[string]*linked{}
	for _, system := range linkedOn {
		c := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}|{{.Version}}|{{.Dir}}|{{$.Dir}}{{end}}{{end}}", module+"cmd/pdproxy")
		c.Env = append(os.Environ(), "GOOS="+system[0], "GOARCH="+system[1])
		var stderr bytes.Buffer
		c.Stderr = &stderr
		out, err := c.Output()
		if err != nil {
			t.Fatalf("c.Output() = %v, %s", err, stderr.String())
		}
		for line := range strings.Lines(string(out)) {
			part := strings.Split(strings.TrimSpace(line), "|")
			if len(part) != 4 {
				continue // from the standard library, or the project's own
			}
			m := found[part[0]]
			if m == nil {
				m = &linked{path: part[0], version: part[1], dir: part[2]}
				found[m.path] = m
			}
			m.addFiles(t, part[3])
		}
	}
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	goItself := &linked{path: "Go standard library", dir: strings.TrimSpace(string(root))}
	goItself.addFiles(t, goItself.dir)
	list := []*linked{goItself}
	for _, m := range found {
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b *linked) int { return cmp.Compare(a.path, b.path) })
	return list
}

// addFiles adds the licence files of a package's folder and of the folders
// above it in the module: parts of a module may have a licence of their own.
func (m *linked) addFiles(t *testing.T, dir string) {
	t.Helper()
	for ; ; dir = filepath.Dir(dir) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if isLicence(e.Name()) && e.Type().IsRegular() && !slices.Contains(m.files, path) {
				m.files = append(m.files, path)
			}
		}
		if dir == m.dir || len(dir) <= len(m.dir) {
			break
		}
	}
	slices.Sort(m.files)
}

func isLicence(name string) bool {
	name = strings.ToUpper(name)
	switch filepath.Ext(name) {
	case ".GO", ".PY", ".SH":
		return false
	}
	return slices.ContainsFunc([]string{"LICENSE", "LICENCE", "COPYING", "NOTICE", "PATENTS"}, func(word string) bool { return strings.HasPrefix(name, word) })
}

// notices lists the modules with their licences, then each text once.
func notices(t *testing.T, modules []*linked) []byte {
	t.Helper()
	var list, texts bytes.Buffer
	number := map[string]int{} // of a text
	for _, m := range modules {
		var names, refs []string
		for _, file := range m.files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			text := strings.TrimSpace(strings.ReplaceAll(string(b), "\r\n", "\n"))
			for _, name := range classify(t, file, text) {
				if !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
			if number[text] == 0 {
				number[text] = len(number) + 1
				fmt.Fprintf(&texts, "\n## Text %d\n\n```text\n%s\n```\n", number[text], text)
			}
			refs = append(refs, fmt.Sprint(number[text]))
		}
		if len(names) == 0 {
			t.Errorf("%s has no known licence", m.path)
		}
		slices.Sort(names)
		fmt.Fprintf(&list, "| %s | %s | %s | %s |\n", m.path, m.version, strings.Join(names, ", "), strings.Join(refs, ", "))
	}
	return slices.Concat([]byte("# Third-party notices\n\nThe binary of pdproxy contains the modules below. `make notices` writes this file.\n\n"+
		"| module | version | licence | text |\n| --- | --- | --- | --- |\n"), list.Bytes(), texts.Bytes())
}

// classify returns the licences whose texts a file contains.
func classify(t *testing.T, file, text string) (names []string) {
	t.Helper()
	words := strings.ToLower(strings.Join(strings.Fields(text), " "))
	for _, word := range copyleft {
		if strings.Contains(words, word) {
			t.Errorf("%s names a copyleft licence: %s", file, word)
		}
	}
	for _, l := range licences {
		if strings.Contains(words, l.sentence) {
			names = append(names, l.name)
		}
	}
	return names
}
