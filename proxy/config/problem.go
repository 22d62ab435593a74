package config

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Problem is an error or an oddity in a configuration.
type Problem struct {
	// File is the file with the configuration; empty for a text that is not from a file.
	File string `json:"file,omitempty"`
	// Key is the key's full name, such as engine[1].role; entries of an array count
	// from 0. Empty if the text could not be parsed.
	Key string `json:"key"`
	// Name is the name of the [[engine]], [[plugin]] or [[upstream]] that Key is a key
	// of; empty for other keys and for an entry without a name.
	Name string `json:"name,omitempty"`
	// Line is the line of the key, from 1. If the key itself is missing, Line is that of
	// the name of its entry, or of the nearest enclosing table; 0 if that is missing too.
	Line int `json:"line"`
	// Message describes the problem. It never contains a secret: no URL, no plugin
	// configuration.
	Message string `json:"message"`
}

// String formats p as "config.toml:12: engine[1].role (d0): message", without the parts
// that are not known. For a text that is not from a file it begins "config: line 12: ".
func (p Problem) String() string {
	var b strings.Builder
	switch {
	case p.File != "" && p.Line > 0: // the form that terminals and editors make a link of
		fmt.Fprintf(&b, "%s:%d: ", p.File, p.Line)
	case p.File != "":
		b.WriteString(p.File + ": ")
	case p.Line > 0:
		fmt.Fprintf(&b, "config: line %d: ", p.Line)
	default:
		b.WriteString("config: ")
	}
	switch {
	case p.Name != "":
		fmt.Fprintf(&b, "%s (%s): ", p.Key, p.Name)
	case p.Key != "":
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
	return c.complete(k.problems)[0]
}

// complete adds the file, and the names of the entries, to problems and returns them.
func (c *Config) complete(problems Problems) Problems {
	for i := range problems {
		p := &problems[i]
		p.File = c.file
		if name := c.entryName(p.Key); safeName(name) && len(name) <= maxName {
			p.Name = name
		}
	}
	return problems
}

// entryName returns the name of the entry of an array that key is in, or "".
func (c *Config) entryName(key string) string {
	array, rest, _ := strings.Cut(key, "[")
	digits, _, _ := strings.Cut(rest, "]")
	i, err := strconv.Atoi(digits)
	if err != nil || i < 0 {
		return ""
	}
	switch {
	case array == "engine" && i < len(c.Engines):
		return c.Engines[i].Name
	case array == "plugin" && i < len(c.Plugins):
		return c.Plugins[i].Name
	case array == "upstream" && i < len(c.Upstreams):
		return c.Upstreams[i].Name
	case array == "remote" && i < len(c.Remotes):
		return c.Remotes[i].Name
	case array == "model" && i < len(c.Models):
		return c.Models[i].Name
	case array == "tenant" && i < len(c.Tenants):
		return c.Tenants[i].Name
	}
	return ""
}

// keys returns the set of the keys that have a problem.
func (ps Problems) keys() map[string]bool {
	set := make(map[string]bool, len(ps))
	for _, p := range ps {
		set[p.Key] = true
	}
	return set
}

// Sort orders by file, line and key, so that a report reads along the file and does not
// depend on map order.
func (ps Problems) Sort() {
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Key, b.Key))
	})
}
