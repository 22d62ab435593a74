// Package importer converts the configuration of another router to a config.toml:
// TensorRT-LLM's disagg_config.yaml, the flags of vllm-router, of SGLang's model gateway,
// of the production stack's router and of Dynamo's frontend, the Helm values of the
// production stack and of llm-d, llm-d's pd-sidecar and EndpointPickerConfig, Dynamo's graph
// deployments, and LiteLLM's config.yaml. It opens nothing: it reads bytes and returns text
// and warnings.
//
// Each reader (trtllm.go, vllmrouter.go, sglangrouter.go, productionstack.go, llmd.go,
// dynamo.go, litellm.go) fills a document (document.go); the common part of the two gateways
// is in gateway.go, and that of charts and manifests in kubernetes.go. The text names
// the origin of each value, has a comment for each setting without an equivalent, and
// never contains a secret. It always passes config.Parse.
//
// The decisions behind this package are in docs/design/request.md.
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
	// Name is the file's name in findings.
	Name string
	// Text is its content.
	Text []byte
}

// Result is a configuration made from another router's.
type Result struct {
	// TOML is the text of a config.toml; config.Parse takes it.
	TOML string `json:"toml"`
	// Warnings list what the operator should check before using the text: pitfalls of the
	// other router, and differences. They are in the order of the input's lines.
	Warnings []Finding `json:"warnings"`
	// Lost are the settings that change what a request does (the two legs, retries, limits,
	// keys, models) and that TOML lacks. A caller uses TOML only if the operator accepts the
	// loss.
	Lost []Finding `json:"lost"`
}

// Finding is an error in an input, or a remark about it.
type Finding struct {
	// File is the input's name.
	File string `json:"file"`
	// Line is its line, from 1; 0 if it has none.
	Line int `json:"line"`
	// Key is the key's full name in the YAML, or the flag with its dashes; empty for
	// the file as a whole.
	Key string `json:"key"`
	// Message describes the finding. It never contains a secret.
	Message string `json:"message"`
}

// newFinding returns a finding of one line, whatever the keys and values of the input are.
func newFinding(file string, line int, key, format string, args ...any) Finding {
	return Finding{file, line, printable(key), printable(fmt.Sprintf(format, args...))}
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

// Problems holds all reasons why an input cannot be imported, in the order of its
// lines. It is the error of every reader.
type Problems []Finding

// Error lists every problem, one a line.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// report collects the findings of one reader.
type report struct {
	problems Problems
	warnings []Finding
	lost     []Finding
}

func (r *report) problem(file string, line int, key, format string, args ...any) {
	r.problems = append(r.problems, newFinding(file, line, key, format, args...))
}

func (r *report) warn(file string, line int, key, format string, args ...any) {
	r.warnings = append(r.warnings, newFinding(file, line, key, format, args...))
}

// lose notes in d a setting that changes what a request does and that d lacks.
func (r *report) lose(d *document, file string, line int, key, format string, args ...any) {
	d.note(line, key, format, args...)
	r.lost = append(r.lost, newFinding(file, line, key, format, args...))
}

// finish returns the text of d, or the problems. config.Parse makes the checks that the
// readers do not make.
func (r *report) finish(file string, d *document) (Result, error) {
	if len(r.problems) == 0 {
		r.check(file, d)
	}
	if len(r.problems) > 0 {
		sortFindings(r.problems)
		return Result{}, r.problems
	}
	sortFindings(r.warnings)
	sortFindings(r.lost)
	return Result{TOML: d.render(), Warnings: append([]Finding{}, r.warnings...), Lost: append([]Finding{}, r.lost...)}, nil
}

// check parses the resulting text, also with the tables that the operator uncomments.
func (r *report) check(file string, d *document) {
	for _, uncommented := range []bool{false, true} {
		_, err := config.Parse([]byte(d.text(uncommented)))
		var problems config.Problems
		errors.As(err, &problems)
		for _, p := range problems {
			r.problem(file, 0, "", "the result would have an invalid %s: %s", p.Key, p.Message)
		}
		if len(problems) > 0 {
			return
		}
	}
}

func sortFindings(fs []Finding) {
	slices.SortStableFunc(fs, func(a, b Finding) int { return cmp.Compare(a.Line, b.Line) })
}
