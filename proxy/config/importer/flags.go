package importer

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// arity is the number of values of a flag.
type arity int

const (
	takesNothing arity = iota
	takesOne
	takesMany
	// takesURL is --prefill: a URL and perhaps a port.
	takesURL
	// takesSwitch is true without a value, and takes true or false after "=".
	takesSwitch
)

// flagSpec is one flag of a router.
type flagSpec struct {
	arity arity
	// note is the reason why the flag has no equivalent; empty for flags that have one.
	note string
	// trap is an additional warning about an effect that an operator may overlook.
	trap string
	// lost: the flag changes what a request does, so that leaving it out needs --force.
	lost bool
	// off are the values with which a flag does nothing, beside "" and those of a switch.
	off []string
	// negatable: the switch also has a form that begins with --no-.
	negatable bool
}

// oneValue returns the specs of flags that take a value and have an equivalent.
func oneValue(names ...string) map[string]flagSpec {
	specs := make(map[string]flagSpec)
	for _, name := range names {
		specs[name] = flagSpec{arity: takesOne}
	}
	return specs
}

// noted is a flag that takes a value and has no equivalent.
func noted(note string) flagSpec { return flagSpec{arity: takesOne, note: note} }

// lostFlag is a flag like noted that changes what a request does, unless its value is in off.
func lostFlag(note string, off ...string) flagSpec {
	return flagSpec{arity: takesOne, note: note, lost: true, off: off}
}

// use is one occurrence of a flag.
type use struct {
	line   int
	values []word
}

// flags are the flags of one command line.
type flags struct {
	*report
	file  string
	specs map[string]flagSpec
	// order contains each name once, in the order of the file.
	order []string
	uses  map[string][]use
	// names holds the keys that stand for flags in the input, if it is a file of values.
	names map[string]string
	// strange are the flags that no known version of the router has.
	strange []Finding
}

// key returns the name of a flag in the input.
func (f *flags) key(name string) string {
	if key, ok := f.names[name]; ok {
		return key
	}
	return "--" + name
}

// readFlags reads the command line of a router.
func readFlags(r *report, f File, programs []string, specs map[string]flagSpec) *flags {
	out := &flags{report: r, file: f.Name, specs: specs, uses: map[string][]use{}}
	words, isManifest := manifestWords(r, f, programs)
	if !isManifest {
		w := wordReader{report: r, file: f.Name, text: string(f.Text), line: 1}
		words = arguments(w.split(), programs)
	}
	for _, word := range words {
		if word.open != "" {
			r.problem(f.Name, word.line, "", "%s", word.open)
		}
	}
	for len(words) > 0 {
		words = out.take(words)
	}
	out.repeated()
	if len(out.order) == 0 && len(r.problems) == 0 {
		r.problem(f.Name, 0, "", "the text has no flags of that router")
	}
	return out
}

// isFlag reports whether a word is a flag's name.
func isFlag(w word) bool { return strings.HasPrefix(w.text, "--") && len(w.text) > len("--") }

// take reads one flag with its values and returns the other words.
func (f *flags) take(words []word) []word {
	first := words[0]
	if !isFlag(first) {
		f.problem(f.file, first.line, "", "found an argument, want a flag")
		return words[1:]
	}
	name, inline, hasInline := strings.Cut(first.text[len("--"):], "=")
	if _, known := f.specs[name]; !known {
		// The launcher that also starts engines has the router's flags in this form.
		if short, prefixed := strings.CutPrefix(name, "router-"); prefixed {
			name = short
		}
	}
	if base, negated := strings.CutPrefix(name, "no-"); negated && f.specs[base].negatable {
		name, inline, hasInline = base, "false", true
	}
	end := 1
	for end < len(words) && !isFlag(words[end]) {
		end++
	}
	values := words[1:end]
	spec, known := f.specs[name]
	if !known {
		f.unknown(first.line, name)
		return words[end:]
	}
	if hasInline && spec.arity == takesNothing {
		f.problem(f.file, first.line, "--"+name, "takes no value")
	} else if hasInline {
		values = append([]word{{text: inline, line: first.line}}, values...)
	}
	most := len(values)
	switch spec.arity {
	case takesNothing:
		most = 0
	case takesOne:
		most = 1
	case takesURL:
		most = 2
	case takesSwitch:
		if most = 0; hasInline {
			most = 1
		}
	case takesMany: // any number
	}
	if len(values) == 0 && (spec.arity == takesOne || spec.arity == takesURL) {
		f.problem(f.file, first.line, "--"+name, "has no value")
		return words[end:]
	}
	for _, extra := range values[min(most, len(values)):] {
		f.problem(f.file, extra.line, "--"+name, "has one argument too many")
	}
	f.add(name, use{first.line, values[:min(most, len(values))]})
	return words[end:]
}

func (f *flags) add(name string, u use) {
	if len(f.uses[name]) == 0 {
		f.order = append(f.order, name)
	}
	f.uses[name] = append(f.uses[name], u)
}

// unknown warns about a flag that no known version of the router has.
func (f *flags) unknown(line int, name string) {
	var known []string
	for k := range f.specs {
		known = append(known, k)
	}
	slices.Sort(known)
	name = printable(name[:min(len(name), 64)])
	if near, ok := nearest(name, known); ok {
		f.problem(f.file, line, "--"+name, "unknown flag; is --%s meant?", near)
		return
	}
	f.warn(f.file, line, "--"+name, "unknown flag: pdproxy import ignores it")
	f.strange = append(f.strange, newFinding("", line, "--"+name, "unknown flag: pdproxy import ignores it"))
}

// repeated warns about flags that occur several times but have only one value.
func (f *flags) repeated() {
	for _, name := range f.order {
		n := len(f.uses[name])
		switch arity := f.specs[name].arity; {
		case n == 1 || arity == takesNothing || arity == takesSwitch || arity == takesURL || name == "decode":
		case arity == takesMany:
			f.warn(f.file, f.line(name), "--"+name, "is given %d times: pdproxy import reads all of them, like the Rust program; the Python launcher reads the last one", n)
		default:
			f.warn(f.file, f.line(name), "--"+name, "is given %d times: pdproxy import reads the last one, like the Python launcher; the Rust program rejects the flags", n)
		}
	}
}

// on reports whether a switch is set.
func (f *flags) on(name string) bool { return len(f.uses[name]) > 0 }

// enabled returns the value of a switch, or byDefault if the flag is not there.
func (f *flags) enabled(name string, byDefault bool) bool {
	if !f.on(name) {
		return byDefault
	}
	s, ok := f.text(name)
	if !ok {
		return true
	}
	on, err := strconv.ParseBool(s)
	if err != nil {
		f.problem(f.file, f.line(name), f.key(name), "want true or false")
	}
	return on
}

// items returns the values of a flag, each of which may hold several, separated by commas.
func (f *flags) items(name string) []word {
	var items []word
	for _, w := range f.all(name) {
		for item := range strings.SplitSeq(w.text, ",") {
			if item = strings.TrimSpace(item); item != "" {
				items = append(items, word{text: item, line: w.line})
			}
		}
	}
	return items
}

// line returns the line of a flag's last occurrence; 0 if there is none.
func (f *flags) line(name string) int {
	if uses := f.uses[name]; len(uses) > 0 {
		return uses[len(uses)-1].line
	}
	return 0
}

// text returns the value of a flag that takes one. Of several the last counts.
func (f *flags) text(name string) (string, bool) {
	uses := f.uses[name]
	if len(uses) == 0 {
		return "", false
	}
	last := uses[len(uses)-1]
	if len(last.values) == 0 {
		return "", false
	}
	return last.values[0].text, true
}

// all returns the values of every occurrence.
func (f *flags) all(name string) []word {
	var words []word
	for _, u := range f.uses[name] {
		words = append(words, u.values...)
	}
	return words
}

// texts returns the texts of words.
func texts(words []word) []string {
	var out []string
	for _, w := range words {
		out = append(out, w.text)
	}
	return out
}

// dropped notes in d each flag without an equivalent, and warns of traps.
func (f *flags) dropped(d *document) {
	d.notes = append(d.notes, f.strange...)
	for _, name := range f.order {
		spec, line := f.specs[name], f.line(name)
		if spec.note == "" || f.idle(name) {
			continue
		}
		if spec.lost {
			f.lose(d, f.file, line, f.key(name), "%s", spec.note)
		} else {
			d.note(line, f.key(name), "%s", spec.note)
		}
		if spec.trap != "" {
			f.warn(f.file, line, f.key(name), "%s", spec.trap)
		}
	}
}

// idle reports whether a flag is there with a value that does nothing.
func (f *flags) idle(name string) bool {
	s, ok := f.text(name)
	if !ok {
		return false
	}
	return f.specs[name].arity == takesSwitch && !f.enabled(name, true) || slices.Contains(f.specs[name].off, s) || s == ""
}

// integer returns an integer from low to high.
func (f *flags) integer(name string, low, high int) (int, bool) {
	s, ok := f.text(name)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < low || n > high {
		f.problem(f.file, f.line(name), f.key(name), "want a whole number from %d to %d", low, high)
		return 0, false
	}
	return n, true
}

// float returns a number from low to high.
func (f *flags) float(name string, low, high float64) (float64, bool) {
	s, ok := f.text(name)
	if !ok {
		return 0, false
	}
	x, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(x) || x < low || x > high {
		f.problem(f.file, f.line(name), f.key(name), "want a number from %g to %g", low, high)
		return 0, false
	}
	return x, true
}
