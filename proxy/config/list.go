package config

import (
	"bytes"
	"encoding/json"
	"reflect"
)

// ParseEngines parses a list of engines: TOML with [[engine]] tables, or JSON, an array
// of objects with the same keys, or {"engine": [...]}. Each engine is validated as
// strictly as in a configuration, but need not have a partner in the list. A text
// without the list is a problem: an empty list is engine = []. The error is Problems.
func ParseEngines(data []byte) ([]Engine, error) {
	list, err := parseEngines(data)
	if err != nil {
		return nil, err
	}
	return list.Engines, nil
}

// ParseEngineFile is ParseEngines for the content of a file. The result has only engines.
// Its method Problem returns problems with the file and the line of a key. The problems in
// the error name the file, too.
func ParseEngineFile(file string, data []byte) (*Config, error) {
	list, err := parseEngines(data)
	if err != nil {
		problems := AsProblems(err)
		for i := range problems {
			problems[i].File = file
		}
		return nil, problems
	}
	list.file = file
	return list, nil
}

// parseEngines returns a configuration that has only the engines of a list, with the lines
// of their keys.
func parseEngines(data []byte) (*Config, error) {
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, Problems{{Key: "engine", Message: "the file is empty: write engine = [] for a list without engines"}}
	}
	if p := checkShape(string(data)); p != nil {
		return nil, Problems{*p}
	}
	if json.Valid(data) || beginsJSON(data) {
		return enginesFromJSON(data)
	}
	tree, p := decodeTOML(string(data))
	if p != nil {
		return nil, Problems{*p}
	}
	return enginesOf(tree, scanLines(string(data)))
}

// beginsJSON reports whether a text is meant as JSON: TOML never begins with a brace,
// or with a bracket before one.
func beginsJSON(data []byte) bool {
	rest := bytes.TrimLeft(data, " \t\r\n")
	if array, isArray := bytes.CutPrefix(rest, []byte("[")); isArray {
		rest = bytes.TrimLeft(array, " \t\r\n")
	}
	return bytes.HasPrefix(rest, []byte("{"))
}

// enginesOf decodes and checks a tree whose only key is engine.
func enginesOf(tree map[string]any, lines lineIndex) (*Config, error) {
	cfg := &Config{lines: lines}
	d := &decoder{lines: lines}
	for name := range tree {
		if name != "engine" {
			d.add(joinKey("", name), "unknown key: a list of engines contains only [[engine]]")
		}
	}
	if datum, found := tree["engine"]; !found {
		d.add("engine", "is missing: write engine = [] for a list without engines")
	} else {
		d.value("engine", datum, reflect.ValueOf(&cfg.Engines).Elem())
	}
	k := &checker{config: cfg}
	k.engines()
	reported := d.problems.keys()
	for _, p := range k.problems {
		if !reported[p.Key] {
			d.problems = append(d.problems, p)
		}
	}
	if len(d.problems) > 0 {
		d.problems.Sort()
		return nil, cfg.complete(d.problems)
	}
	return cfg, nil
}

// Check returns the problems of an engine that was built in code, by the rules of
// [[engine]]; nil or Problems with the engine's keys.
func (e Engine) Check() error {
	cfg := Config{Engines: []Engine{e}}
	k := &checker{config: &cfg}
	k.engine("", e, map[string]string{})
	if len(k.problems) > 0 {
		return k.problems
	}
	return nil
}
