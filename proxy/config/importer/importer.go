// Package importer writes a config.toml from the configuration of another
// router: TensorRT-LLM's disagg_config.yaml, and the flags of vllm-router and
// of SGLang's model gateway. It opens nothing: bytes in, text and warnings out.
//
// Each reader (trtllm.go, vllmrouter.go, sglangrouter.go) fills a document
// (document.go); what the two gateways share is in gateway.go. The text says
// where each value comes from, holds a comment for each thing that has no
// equal, and never a secret. It always passes config.Parse.
package importer

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// File is one input.
type File struct {
	// Name is what findings call the file.
	Name string
	// Text is its content.
	Text []byte
}

// Result is a configuration made from another router's.
type Result struct {
	// TOML is the text of a config.toml; config.Parse takes it.
	TOML string `json:"toml"`
	// Warnings are what the operator should look at before using it: traps of
	// the other router, and what will differ. In the order of the input's lines.
	Warnings []Finding `json:"warnings"`
}

// Finding is one thing that is wrong with, or remarkable about, an input.
type Finding struct {
	// File is the input's name.
	File string `json:"file"`
	// Line is where it stands, from 1; 0 when it stands nowhere.
	Line int `json:"line"`
	// Key is the key's full name in the YAML, or the flag with its dashes;
	// empty for what concerns the file as a whole.
	Key string `json:"key"`
	// Message says what it is. It never holds a secret.
	Message string `json:"message"`
}

// String formats f as "FILE: line 12: port: message", without the parts that
// are not known.
func (f Finding) String() string {
	var b strings.Builder
	if f.File != "" {
		b.WriteString(f.File + ": ")
	}
	if f.Line > 0 {
		fmt.Fprintf(&b, "line %d: ", f.Line)
	}
	if f.Key != "" {
		b.WriteString(f.Key + ": ")
	}
	b.WriteString(f.Message)
	return b.String()
}

// Problems is everything for which an input cannot be imported, in the order of
// its lines. It is the error of every reader.
type Problems []Finding

// Error lists every problem, one a line.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// report collects what one reader finds.
type report struct {
	problems Problems
	warnings []Finding
}

func (r *report) problem(file string, line int, key, format string, args ...any) {
	r.problems = append(r.problems, Finding{file, line, key, fmt.Sprintf(format, args...)})
}

func (r *report) warn(file string, line int, key, format string, args ...any) {
	r.warnings = append(r.warnings, Finding{file, line, key, fmt.Sprintf(format, args...)})
}

// finish renders d, or returns the problems. What the readers do
// not check themselves is left to config.Parse.
func (r *report) finish(file string, d *document) (Result, error) {
	if len(r.problems) == 0 {
		r.check(file, d)
	}
	if len(r.problems) > 0 {
		sortFindings(r.problems)
		return Result{}, r.problems
	}
	sortFindings(r.warnings)
	return Result{TOML: d.render(), Warnings: append([]Finding{}, r.warnings...)}, nil
}

// check has the result read as it will be read.
func (r *report) check(file string, d *document) {
	_, err := config.Parse([]byte(d.render()))
	var problems config.Problems
	errors.As(err, &problems)
	for _, p := range problems {
		r.problem(file, 0, "", "it leads to a %s that cannot be: %s", p.Key, p.Message)
	}
}

func sortFindings(fs []Finding) {
	slices.SortStableFunc(fs, func(a, b Finding) int { return cmp.Compare(a.Line, b.Line) })
}
