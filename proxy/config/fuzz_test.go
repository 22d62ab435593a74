package config

import (
	"reflect"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
)

// mustTree decodes text to a TOML tree.
func mustTree(t testing.TB, text string) map[string]any {
	t.Helper()
	var tree map[string]any
	if _, err := toml.Decode(text, &tree); err != nil {
		t.Fatal(err)
	}
	return tree
}

// FuzzParse checks that any text yields a Config or Problems, that an accepted
// Config validates again, and that the line scanner finds every key that the
// TOML parser finds.
func FuzzParse(f *testing.F) {
	f.Add([]byte(readReference(f)))
	f.Add([]byte(optional.ReplaceAllString(readReference(f), "$1")))
	for _, tt := range problemCases {
		f.Add([]byte(tt.text))
	}
	f.Add([]byte("a = \"\"\"\nb = 1\\\n\"\"\"\n[['x y'.z]]\n\"\\u00e9\" = {q=[{r=1}]}\n"))
	f.Add([]byte("y.s = 0x\n")) // the parser's message holds the line end
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg, err := Parse(data)
		if err != nil {
			checkFailure(t, cfg, err)
		} else {
			if again := cfg.Validate(); len(again) > 0 {
				t.Errorf("accepted, then refused: %v", again)
			}
			for _, w := range cfg.Warnings() {
				if w.Message == "" {
					t.Errorf("empty warning for %q", w.Key)
				}
			}
		}
		var tree map[string]any
		if _, err := toml.Decode(string(data), &tree); err == nil {
			checkLines(t, string(data), tree)
		}
	})
}

// checkFailure checks that err is a non-empty list of Problems of one line each, and
// that no half-read Config is returned with it.
func checkFailure(t *testing.T, cfg Config, err error) {
	t.Helper()
	problems, ok := err.(Problems)
	if !ok || len(problems) == 0 {
		t.Fatalf("error is %T: %v", err, err)
	}
	for _, p := range problems {
		if p.Message == "" || strings.Contains(p.String(), "\n") {
			t.Errorf("problem of no or several lines: %q", p)
		}
	}
	if !reflect.DeepEqual(cfg, Config{}) {
		t.Errorf("Parse returned an error and a Config: %+v", cfg)
	}
}

// checkLines compares the scanner with the parser: every key of tree has a separate line,
// and that line is inside the text.
func checkLines(t *testing.T, text string, tree map[string]any) {
	t.Helper()
	index := scanLines(text)
	last := strings.Count(text, "\n") + 1
	var check func(key string, datum any)
	check = func(key string, datum any) {
		if line := index[key]; key != "" && (line < 1 || line > last) {
			t.Errorf("%s: line %d of %d", key, line, last)
		}
		switch d := datum.(type) {
		case map[string]any:
			for name, value := range d {
				check(joinKey(key, name), value)
			}
		case []map[string]any:
			for i, value := range d {
				check(indexKey(key, i), value)
			}
		case []any:
			for i, value := range d {
				check(indexKey(key, i), value)
			}
		}
	}
	check("", tree)
}
