package config

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Problem is an error or an oddity in a configuration.
type Problem struct {
	// Key is the key's full name, such as engine[1].role; entries of an array count
	// from 0. Empty if the text could not be parsed.
	Key string
	// Line is the line of the key, from 1; that of the nearest enclosing table if the
	// key itself is missing; 0 if that is missing too.
	Line int
	// Message describes the problem. It never contains a secret: no URL, no plugin
	// configuration.
	Message string
}

// String formats p as "config: line 12: engine[1].role: message", without the
// parts that are not known.
func (p Problem) String() string {
	var b strings.Builder
	b.WriteString("config: ")
	if p.Line > 0 {
		fmt.Fprintf(&b, "line %d: ", p.Line)
	}
	if p.Key != "" {
		b.WriteString(p.Key + ": ")
	}
	b.WriteString(p.Message)
	return b.String()
}

// Problems holds all problems of a configuration, in the order of the lines. It is the
// error of Parse.
type Problems []Problem

// Error lists every problem on a separate line.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// AsProblems returns the Problems in the chain of err, or else one Problem without a
// key that has the text of err. err is not nil.
func AsProblems(err error) Problems {
	var p Problems
	if errors.As(err, &p) {
		return p
	}
	return Problems{{Message: err.Error()}}
}

// Problem returns a problem of a key, with the line of the key. It is for problems that
// appear only when the configuration is used.
func (c *Config) Problem(key, message string) Problem {
	k := &checker{config: c}
	k.add(key, "%s", message)
	return k.problems[0]
}

// keys returns the set of the keys that have a problem.
func (ps Problems) keys() map[string]bool {
	set := make(map[string]bool, len(ps))
	for _, p := range ps {
		set[p.Key] = true
	}
	return set
}

// sortProblems orders by line, then by key, so that a report reads along the
// file and does not depend on map order.
func sortProblems(ps []Problem) {
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Key, b.Key))
	})
}
