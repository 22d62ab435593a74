package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// mutant is one deliberate fault: a text of the sources and its replacement.
type mutant struct {
	name  string         // unique, for -run and the report
	fault string         // description of the fault
	tests *regexp.Regexp // names of the tests that have to fail; nil: all tests of the mutated package
	old   string         // occurs once in the sources
	new   string
	where string // file and line of the entry, for error messages
}

// readLists reads every list of mutants in a directory, in the order of their names.
func readLists(dir string) ([]mutant, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil {
		return nil, err
	}
	var all []mutant
	seen := make(map[string]string)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		list, err := parseList(filepath.Base(path), string(text))
		if err != nil {
			return nil, err
		}
		for _, m := range list {
			if first := seen[m.name]; first != "" {
				return nil, fmt.Errorf("%s: %s has the same name", m.where, first)
			}
			seen[m.name] = m.where
		}
		all = append(all, list...)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: no mutants", dir)
	}
	return all, nil
}

// parseList reads the form that the package comment describes.
func parseList(file, text string) (list []mutant, err error) {
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		where := fmt.Sprintf("%s:%d", file, i+1)
		if line == "" || line[0] == '#' {
			continue
		}
		if name, found := strings.CutPrefix(line, "mutant "); found {
			name, fault, described := strings.Cut(name, ": ")
			if !described {
				return nil, fmt.Errorf("%s: want \"mutant name: fault\"", where)
			}
			list = append(list, mutant{name: name, fault: fault, where: where})
			continue
		}
		if len(list) == 0 {
			return nil, fmt.Errorf("%s: a line before the first mutant", where)
		}
		if err := list[len(list)-1].line(line); err != nil {
			return nil, fmt.Errorf("%s: %w", where, err)
		}
	}
	for _, m := range list {
		if m.old == "" || m.old == m.new {
			return nil, fmt.Errorf("%s: mutant %s changes nothing", m.where, m.name)
		}
	}
	return list, nil
}

// line adds one line of an entry to m.
func (m *mutant) line(line string) (err error) {
	switch {
	case line[0] == '-':
		m.old = addLine(m.old, line[1:])
	case line[0] == '+':
		m.new = addLine(m.new, line[1:])
	case strings.HasPrefix(line, "tests ") && m.tests == nil:
		m.tests, err = regexp.Compile(strings.TrimPrefix(line, "tests "))
	default:
		err = fmt.Errorf("unknown line %q", line)
	}
	return err
}

func addLine(text, line string) string {
	if text == "" {
		return line
	}
	return text + "\n" + line
}
