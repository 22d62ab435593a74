package importer

import (
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// yamlFile reads one YAML file. It is stricter than PyYAML, which silently uses the
// last of two equal keys.
type yamlFile struct {
	*report
	file string
	read int // keys of mappings that were read, each time that an alias or a merge key names them
}

// table is a mapping whose keys are taken one by one. The keys that remain at the end
// are unknown to the reader.
type table struct {
	path string
	// node is the source of the mapping: Python has one object for all aliases of an
	// anchor.
	node    *yaml.Node
	entries []tableEntry
}

type tableEntry struct {
	key   string
	line  int
	value *yaml.Node
	// inherited reports that the key is at the top level of the file and applies to a section.
	inherited bool
}

const (
	// maxMerges bounds the depth of merge keys (<<), and so ends cycles.
	maxMerges = 8
	// maxKeys bounds the keys of a file, with those that aliases and merge keys repeat.
	maxKeys = 1 << 16
	// maxText bounds a file, in bytes.
	maxText = 4 << 20
)

// document reads the mapping of the file's only document.
func (y *yamlFile) document(f File) (*table, bool) {
	if !utf8.Valid(f.Text) {
		y.problem(y.file, 0, "", "the file is no UTF-8 text")
		return nil, false
	}
	if len(f.Text) > maxText {
		y.problem(y.file, 0, "", "the file has more than %d bytes", maxText)
		return nil, false
	}
	var root yaml.Node
	if err := yaml.Unmarshal(f.Text, &root); err != nil {
		y.syntax(err)
		return nil, false
	}
	if len(root.Content) == 0 {
		y.problem(y.file, 0, "", "it is empty")
		return nil, false
	}
	if resolve(root.Content[0]).Kind != yaml.MappingNode {
		y.problem(y.file, root.Content[0].Line, "", "want keys with values, found a %s", kindOf(root.Content[0]))
		return nil, false
	}
	return y.table("", root.Content[0]), true
}

var yamlLine = regexp.MustCompile(`^yaml: line (\d+): `)

// syntax notes a parser's error with its line.
func (y *yamlFile) syntax(err error) {
	message, line := err.Error(), 0
	if m := yamlLine.FindStringSubmatch(message); m != nil {
		line, _ = strconv.Atoi(m[1])
		message = message[len(m[0]):]
	}
	y.problem(y.file, line, "", "invalid YAML: %s", strings.TrimPrefix(message, "yaml: "))
}

// table reads a mapping; null is a mapping without keys.
func (y *yamlFile) table(path string, node *yaml.Node) *table {
	t := &table{path: path, node: resolve(node)}
	switch {
	case t.node.Kind == yaml.MappingNode:
		y.fill(t, t.node, &filling{keys: map[string]bool{}, done: map[*yaml.Node]bool{}}, maxMerges)
	case t.node.Tag != "!!null":
		y.problem(y.file, node.Line, path, "want keys with values, found a %s", kindOf(node))
	}
	return t
}

// filling is the state of one table that is being filled.
type filling struct {
	keys map[string]bool     // the keys of the table so far
	done map[*yaml.Node]bool // true: the table has the keys of this mapping; false: they are being added
}

// fill adds the keys of a mapping, its own before merged ones. A mapping that several merge keys
// name is read once: its keys are in the table then.
func (y *yamlFile) fill(t *table, node *yaml.Node, f *filling, depth int) {
	f.done[node] = false
	defer func() { f.done[node] = true }()
	var merged []*yaml.Node
	own := map[string]bool{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		if y.read++; y.read > maxKeys {
			if y.read == maxKeys+1 {
				y.problem(y.file, node.Line, t.path, "the file has more than %d keys, with those of aliases", maxKeys)
			}
			return
		}
		key, v := resolve(node.Content[i]), node.Content[i+1]
		switch {
		case key.Tag == "!!merge":
			merged = append(merged, v)
		case key.Kind != yaml.ScalarNode:
			y.problem(y.file, key.Line, t.path, "a key must be a name, found a %s", kindOf(key))
		case own[key.Value]:
			y.problem(y.file, key.Line, t.name(key.Value), "is given twice")
		default:
			own[key.Value] = true
			if !f.keys[key.Value] {
				f.keys[key.Value] = true
				t.entries = append(t.entries, tableEntry{key: key.Value, line: key.Line, value: v})
			}
		}
	}
	for _, v := range merged {
		from := resolve(v)
		sources := []*yaml.Node{from}
		if from.Kind == yaml.SequenceNode {
			sources = from.Content
		}
		for _, s := range sources {
			s = resolve(s)
			done, known := f.done[s]
			if y.read++; done {
				continue
			}
			if s.Kind != yaml.MappingNode || depth == 0 || known {
				y.problem(y.file, v.Line, t.path, "a merge key (<<) wants keys with values, a few levels deep")
				return
			}
			y.fill(t, s, f, depth-1)
		}
	}
}

// resolve follows an alias. YAML has no alias of an alias.
func resolve(node *yaml.Node) *yaml.Node {
	if node.Kind == yaml.AliasNode {
		return node.Alias
	}
	return node
}

func kindOf(node *yaml.Node) string {
	switch n := resolve(node); n.Kind {
	case yaml.MappingNode:
		return "mapping"
	case yaml.SequenceNode:
		return "list"
	default:
		return strings.TrimPrefix(n.ShortTag(), "!!")
	}
}

// name returns a key's full name.
func (t *table) name(key string) string {
	if t.path == "" {
		return key
	}
	return t.path + "." + key
}

func (t *table) find(key string) (tableEntry, bool) {
	i := slices.IndexFunc(t.entries, func(e tableEntry) bool { return e.key == key })
	if i < 0 {
		return tableEntry{}, false
	}
	return t.entries[i], true
}

// take removes a key and returns it; null counts as absent.
func (t *table) take(key string) (tableEntry, bool) {
	e, found := t.find(key)
	t.entries = slices.DeleteFunc(t.entries, func(e tableEntry) bool { return e.key == key })
	return e, found && resolve(e.value).Tag != "!!null"
}

// wrong notes that a key's value has another type. It omits the value.
func (y *yamlFile) wrong(t *table, e tableEntry, want string) {
	y.problem(y.file, e.line, t.name(e.key), "want %s, found a %s", want, kindOf(e.value))
}

// sub takes a mapping; a missing one has no keys.
func (y *yamlFile) sub(t *table, key string) (*table, tableEntry, bool) {
	e, found := t.take(key)
	if !found {
		return &table{path: t.name(key)}, e, false
	}
	return y.table(t.name(key), e.value), e, true
}

// text takes a string.
func (y *yamlFile) text(t *table, key string) (string, tableEntry, bool) {
	e, found := t.take(key)
	if !found {
		return "", e, false
	}
	if n := resolve(e.value); n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" {
		return n.Value, e, true
	}
	y.wrong(t, e, "a string")
	return "", e, false
}

// integer takes an integer from low to high.
func (y *yamlFile) integer(t *table, key string, low, high int) (int, tableEntry, bool) {
	e, found := t.take(key)
	if !found {
		return 0, e, false
	}
	n, err := 0, fmt.Errorf("no integer")
	if node := resolve(e.value); node.ShortTag() == "!!int" {
		err = node.Decode(&n)
	}
	if err != nil {
		y.wrong(t, e, "a whole number")
		return 0, e, false
	}
	if n < low || n > high {
		y.problem(y.file, e.line, t.name(key), "must be from %d to %d, found %d", low, high, n)
		return 0, e, false
	}
	return n, e, true
}

// float takes a number from low to high.
func (y *yamlFile) float(t *table, key string, low, high float64) (float64, tableEntry, bool) {
	e, found := t.take(key)
	if !found {
		return 0, e, false
	}
	x, err := 0.0, fmt.Errorf("no number")
	if node := resolve(e.value); node.ShortTag() == "!!int" || node.ShortTag() == "!!float" {
		err = node.Decode(&x)
	}
	if err != nil {
		y.wrong(t, e, "a number")
		return 0, e, false
	}
	if math.IsNaN(x) || x < low || x > high {
		y.problem(y.file, e.line, t.name(key), "must be from %g to %g, found %g", low, high, x)
		return 0, e, false
	}
	return x, e, true
}

// boolean takes true or false, also in the spellings of YAML 1.1, which PyYAML accepts.
func (y *yamlFile) boolean(t *table, key string) (bool, tableEntry, bool) {
	e, found := t.take(key)
	if !found {
		return false, e, false
	}
	node := resolve(e.value)
	if node.Kind == yaml.ScalarNode && node.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) == 0 {
		switch strings.ToLower(node.Value) {
		case "true", "yes", "on":
			return true, e, true
		case "false", "no", "off":
			return false, e, true
		}
	}
	y.wrong(t, e, "true or false")
	return false, e, false
}

// list takes a list of strings.
func (y *yamlFile) list(t *table, key string) ([]*yaml.Node, tableEntry, bool) {
	e, found := t.take(key)
	if !found {
		return nil, e, false
	}
	n := resolve(e.value)
	if n.Kind != yaml.SequenceNode {
		y.wrong(t, e, "a list")
		return nil, e, false
	}
	return n.Content, e, true
}

// equal reports whether two values are equal in Python.
func equal(a, b *yaml.Node) bool {
	var x, y any
	return a.Decode(&x) == nil && b.Decode(&y) == nil && reflect.DeepEqual(x, y)
}
