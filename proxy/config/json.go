package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
)

// EngineFromJSON parses one engine that an operator posts or registers in etcd: a JSON
// object with the keys of [[engine]], validated as strictly as the configuration. The
// error is Problems.
func EngineFromJSON(data []byte) (Engine, error) {
	if p := checkShape(string(data)); p != nil {
		return Engine{}, Problems{*p}
	}
	r := &jsonReader{text: data, lines: lineIndex{}}
	datum := r.read(indexKey("engine", 0))
	if _, isObject := datum.(map[string]any); !isObject && len(r.problems) == 0 {
		r.problems = Problems{{Line: 1, Message: "invalid JSON: want one object with the keys of [[engine]]"}}
	}
	list, err := r.engines([]any{datum})
	if err != nil {
		return Engine{}, err
	}
	return list.Engines[0], nil
}

// enginesFromJSON reads a list of engines: an array of objects, or an object
// whose only key is "engine" and holds that array.
func enginesFromJSON(data []byte) (*Config, error) {
	r := &jsonReader{text: data, lines: lineIndex{}}
	root := "engine"
	if bytes.HasPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte("{")) {
		root = ""
	}
	return r.engines(r.read(root))
}

// jsonReader parses JSON into the tree that the decoder reads, with integers as int64,
// and notes the line of each key.
type jsonReader struct {
	text     []byte
	tokens   *json.Decoder
	lines    lineIndex
	problems Problems
	seen     int // bytes that lineAt has counted, and the line ends in them
	breaks   int
}

// read returns the tree of the text, whose key is root.
func (r *jsonReader) read(root string) any {
	// This finds every syntax error of the text, and excessive depth.
	var whole json.RawMessage
	if err := json.Unmarshal(r.text, &whole); err != nil {
		line := 0
		if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
			line = r.lineAt(syntax.Offset)
		}
		r.problems = append(r.problems, Problem{Line: line, Message: "invalid JSON: " + err.Error()})
		return nil
	}
	r.tokens = json.NewDecoder(bytes.NewReader(r.text))
	r.tokens.UseNumber()
	return r.value(root)
}

// engines decodes datum, which is the array "engine" or the table that contains the
// array.
func (r *jsonReader) engines(datum any) (*Config, error) {
	if len(r.problems) > 0 {
		return nil, r.problems
	}
	tree, isTable := datum.(map[string]any)
	if !isTable {
		tree = map[string]any{"engine": datum}
	}
	return enginesOf(tree, r.lines)
}

// value reads the next value, whose key is key.
func (r *jsonReader) value(key string) any {
	token := r.token()
	if _, seen := r.lines[key]; !seen && key != "" {
		r.lines[key] = r.lineAt(r.tokens.InputOffset())
	}
	switch token := token.(type) {
	case json.Delim:
		if token == '{' {
			return r.object(key)
		}
		array := []any{}
		for r.tokens.More() {
			array = append(array, r.value(indexKey(key, len(array))))
		}
		r.token()
		return array
	case json.Number:
		if whole, err := token.Int64(); err == nil {
			return whole
		}
		float, _ := token.Float64() // out of range: no key accepts so large a float
		return float
	default:
		return token
	}
}

// object reads the members after an opening brace, up to the closing one.
func (r *jsonReader) object(path string) map[string]any {
	table := map[string]any{}
	for r.tokens.More() {
		name, _ := r.token().(string)
		key := joinKey(path, name)
		line := r.lineAt(r.tokens.InputOffset())
		if _, twice := table[name]; twice && len(r.problems) < maxProblems {
			r.problems = append(r.problems, Problem{Key: key, Line: line, Message: "the key occurs twice"})
		}
		r.lines[key] = line
		table[name] = r.value(key)
	}
	r.token()
	return table
}

// token returns the next token; read has checked that there is one.
func (r *jsonReader) token() json.Token {
	token, err := r.tokens.Token()
	if err != nil && !errors.Is(err, io.EOF) {
		r.problems = append(r.problems, Problem{Message: "invalid JSON: " + err.Error()})
	}
	return token
}

// lineAt returns the line, from 1, of the byte before offset. Offsets must not
// decrease.
func (r *jsonReader) lineAt(offset int64) int {
	end := min(max(int(offset)-1, r.seen), len(r.text))
	r.breaks += bytes.Count(r.text[r.seen:end], []byte("\n"))
	r.seen = end
	return 1 + r.breaks
}
