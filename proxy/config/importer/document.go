package importer

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// document builds a config.toml.
type document struct {
	from     string // name of the input, for the first line
	sections []*section
	// notes lists the input's settings without an equivalent, and differences that no setting names,
	// with what pdproxy does instead. Line 0: no setting names the difference.
	notes []Finding
}

// section is one table, or one entry of an array of tables.
type section struct {
	name  string
	array bool
	// above is a comment before the header.
	above string
	// sample: the whole table is an example that the operator must complete. The importer
	// always writes it as comments.
	sample bool
	lines  []entry
}

// entry is one key with its value and a comment that names the origin of the value.
type entry struct {
	key     string
	value   value
	comment string
	// sample: the line is an example that the operator must complete. The importer always
	// writes it as a comment.
	sample bool
}

// value is a TOML value.
type value string

// sectionOrder is the order of the reference config.toml.
func sectionOrder() []string {
	return []string{"server", "server.tls", "server.auth", "admin", "timeouts", "limits", "policy", "policy.params.pd_auto", "policy.params.sglang_cache_aware",
		"policy.params.trtllm_kv_cache_aware", "scores", "kv_index", "conversation", "epp", "epp.tls", "sidecar", "engine", "model", "remote", "priority_class", "health", "retry", "circuit",
		"trtllm", "discovery.moriio", "discovery.trtllm", "discovery.kubernetes", "discovery.kubernetes.engine", "discovery.kubernetes.pool", "fleet"}
}

// section returns the table of that name and creates it if needed.
func (d *document) section(name string) *section {
	for _, s := range d.sections {
		if s.name == name && !s.array {
			return s
		}
	}
	s := &section{name: name}
	d.sections = append(d.sections, s)
	return s
}

// set sets a key of a table. The comment gives the reason.
func (d *document) set(name, key string, v value, comment string) {
	d.section(name).set(key, v, comment)
}

// add adds an entry of the array of tables of that name.
func (d *document) add(name string) *section {
	s := &section{name: name, array: true}
	d.sections = append(d.sections, s)
	return s
}

// engine adds an [[engine]].
func (d *document) engine() *section { return d.add("engine") }

// engines returns the number of [[engine]] entries.
func (d *document) engines() int {
	n := 0
	for _, s := range d.sections {
		if s.name == "engine" {
			n++
		}
	}
	return n
}

func (s *section) set(key string, v value, comment string) {
	s.lines = append(s.lines, entry{key: key, value: v, comment: comment})
}

// note adds a setting of the input without an equivalent in pdproxy, with its line; 0: no
// setting names the difference.
func (d *document) note(line int, key, format string, args ...any) {
	d.notes = append(d.notes, newFinding("", line, key, format, args...))
}

// sampleKey sets a key that the operator must complete: the importer writes it as a comment.
func (s *section) sampleKey(key string, v value, comment string) {
	s.lines = append(s.lines, entry{key: key, value: v, comment: comment, sample: true})
}

// render returns the text of the config.toml.
func (d *document) render() string { return d.text(false) }

// text returns the text of the config.toml. uncommented: the tables that are samples are no
// comments, as after the operator has completed them.
func (d *document) text(uncommented bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Made by pdproxy import from %s. Keys that are left out have pdproxy's defaults.\n", d.from)
	b.WriteString("# Lines that begin with \"#\" and no space need a check or a change by you first; the comments name it.\n")
	order := sectionOrder()
	sections := slices.Clone(d.sections)
	place := func(s *section) int { return slices.Index(order, strings.TrimSuffix(s.name, ".scorer")) } // a scorer follows its set
	slices.SortStableFunc(sections, func(x, y *section) int { return place(x) - place(y) })
	for _, s := range sections {
		s.render(&b, uncommented)
	}
	if len(d.notes) > 0 {
		b.WriteString("\n# Without an equivalent in pdproxy:\n")
		for _, n := range sortedNotes(d.notes) {
			b.WriteString("# - " + n.String() + "\n")
		}
	}
	return b.String()
}

// sortedNotes returns the notes in the order of their lines, those without a line at the end.
func sortedNotes(notes []Finding) []Finding {
	order := func(n Finding) int {
		if n.Line == 0 {
			return math.MaxInt
		}
		return n.Line
	}
	sorted := slices.Clone(notes)
	slices.SortStableFunc(sorted, func(x, y Finding) int { return cmp.Compare(order(x), order(y)) })
	return sorted
}

func (s *section) render(b *strings.Builder, uncommented bool) {
	if len(s.lines) == 0 {
		return
	}
	b.WriteByte('\n')
	if s.above != "" {
		b.WriteString("# " + printable(s.above) + "\n")
	}
	header := "[" + s.name + "]"
	if s.array {
		header = "[" + header + "]"
	}
	sample := s.sample && !uncommented
	if sample {
		header = "#" + header
	}
	b.WriteString(header + "\n")
	for _, e := range s.lines {
		text, comment := e.key+" = "+string(e.value), e.comment
		if e.sample || sample {
			text = "#" + text
		}
		if comment != "" {
			text = fmt.Sprintf("%-32s # %s", text, printable(comment))
		}
		b.WriteString(text + "\n")
	}
}

// printable replaces the characters of text that a TOML comment must not contain, or that move the
// cursor of a terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == unicode.ReplacementChar {
			return '?'
		}
		return r
	}, text)
}

// text returns s as a TOML string.
func text(s string) value {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteString(`\` + string(r))
		case !unicode.IsPrint(r):
			fmt.Fprintf(&b, `\U%08X`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return value(b.String())
}

// number returns n as a TOML integer.
func number(n int) value { return value(strconv.Itoa(n)) }

// float returns x as a TOML float.
func float(x float64) value {
	s := strconv.FormatFloat(x, 'f', -1, 64)
	if x == math.Trunc(x) {
		s += ".0"
	}
	return value(s)
}

// list returns items as a TOML array of strings.
func list(items []string) value {
	quoted := make([]string, len(items))
	for i, item := range items {
		quoted[i] = string(text(item))
	}
	return value("[" + strings.Join(quoted, ", ") + "]")
}

// seconds returns x seconds as a duration: whole seconds in the form 180s, others in
// the form of Go's time.Duration.
func seconds(x float64) value {
	d := time.Duration(math.Round(x * float64(time.Second)))
	if d%time.Second == 0 {
		return text(strconv.Itoa(int(d/time.Second)) + "s")
	}
	return text(d.String())
}
