package config

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
)

// costlyTexts returns texts of about n bytes that become much memory when they are decoded.
func costlyTexts(n int) map[string]string {
	several := func(part string) string { return strings.Repeat(part, n/len(part)) }
	counted := func(format string) string {
		var b strings.Builder
		for i := 0; b.Len() < n; i++ {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	return map[string]string{
		"inline tables inside each other":  "[[engine]]\nname=" + several("{b="),
		"closed inline tables":             "a=" + several("{b=") + "1" + several("}}}"),
		"arrays inside each other":         "a=" + several("["),
		"a deep dotted key":                several("a.") + "a=1",
		"dotted keys":                      counted(strings.Repeat("a.", 30) + "a%d=1\n"),
		"a deep header":                    "[" + several("a.") + "a]",
		"headers":                          counted("[" + strings.Repeat("a.", 30) + "a%d]\n"),
		"keys":                             counted("a%d=1\n"),
		"quoted keys":                      counted("\"a\\n%d\"=1\n"),
		"tables":                           counted("[a%d]\n"),
		"arrays of tables":                 several("[[engine]]\n"),
		"tables below an engine":           "[[engine]]\n" + several("[[engine.x]]\n"),
		"empty inline engines":             "engine=[" + several("{},") + "]",
		"numbers":                          "a=[" + several("1,") + "]",
		"inline tables in an array":        "a=[" + several(strings.Repeat("{b=", 30)+"1"+strings.Repeat("}", 30)+",") + "]",
		"unknown keys of an engine":        "[[engine]]\n" + counted("x%d=1\n"),
		"JSON engines":                     `{"engine":[` + several("{},") + `{}]}`,
		"JSON keys":                        `{"engine":[{` + counted(`"%d":1,`) + `"x":1}]}`,
		"JSON arrays inside each other":    `{"engine":` + several("[") + several("]") + `}`,
		"JSON objects inside each other":   `{"engine":` + several(`{"a":`) + "1" + several("}}}}}") + `}`,
		"a long key":                       several("k") + "=1",
		"a long number":                    "a=" + several("1"),
		"a string":                         "a='" + several("x") + "'",
		"a string of lines":                "a=\"\"\"" + several("\\\n") + "\"\"\"",
		"comments":                         several("#\n"),
		"brackets in strings and comments": "a='" + several("[{.") + "'\n#" + several("{[."),
	}
}

// maxDecoded is the most that a text may allocate when it is read, in bytes, also of what the
// collector frees meanwhile: 256 KiB, and 3 KiB for each byte of a short text.
func maxDecoded(n int) uint64 { return 256<<10 + min(3<<10*uint64(n), 1<<30) }

// checkCost reads a text in each way.
func checkCost(t *testing.T, name, text string) {
	t.Helper()
	for way, read := range map[string]func(){
		"ParseEngines":   func() { _, _ = ParseEngines([]byte(text)) },
		"Draft":          func() { _, _ = Draft("", []byte(text)) },
		"EngineFromJSON": func() { _, _ = EngineFromJSON([]byte(text)) },
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		read()
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > maxDecoded(len(text)) {
			t.Errorf("%s, %d bytes, %s: %d bytes allocated, want %d at most", name, len(text), way, got, maxDecoded(len(text)))
		}
	}
}

// TestDecodingCost: no text becomes much memory, in particular not in proportion to the square of
// its length.
func TestDecodingCost(t *testing.T) {
	for _, n := range []int{3 << 10, 30 << 10, 400 << 10} {
		for name, text := range costlyTexts(n) {
			checkCost(t, name, text)
		}
	}
}

func FuzzDecodingCost(f *testing.F) {
	for _, text := range costlyTexts(1 << 10) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) { checkCost(t, "fuzzed", text) })
}

// TestShape: the limits refuse what exceeds them, with the line, and nothing else.
func TestShape(t *testing.T) {
	nested := func(n int) string { return "a=1\nb=" + strings.Repeat("[", n) + strings.Repeat("]", n) + "\n" }
	inline := func(n int) string { return "b=" + strings.Repeat("{c=", n) + "1" + strings.Repeat("}", n) + "\n" }
	for _, tt := range []struct{ name, text, want string }{
		{"as deep as allowed", nested(maxNesting), ""},
		{"too deep", nested(maxNesting + 1), "line 2: tables and arrays are nested more than 32 levels deep"},
		{"inline tables", inline(maxNesting), ""},
		{"too deep inline tables", inline(maxNesting + 1), "line 1: tables and arrays are nested"},
		{"as many parts as allowed", strings.Repeat("a.", maxParts-1) + "a=1", ""},
		{"too many parts", strings.Repeat("a.", maxParts) + "a=1", "line 1: a key has more than 32 parts"},
		{"too many quoted parts", strings.Repeat("'a' . ", maxParts) + "a=1", "line 1: a key has more than 32 parts"},
		{"too many parts of a header", "[" + strings.Repeat("a.", maxParts) + "a]", "line 1: a key has more than 32 parts"},
		{"too many elements", "a=[" + strings.Repeat("1,", maxEntries) + "]", "more than 131072 keys"},
		{"too long", strings.Repeat("\n", maxText+1), "more than 4194304 bytes"},
		{"dots of numbers", "a=[" + strings.Repeat("1.5,", 100) + "]", ""},
		{"dots of times", "a=[" + strings.Repeat("2026-01-01T00:00:00.5Z,", 100) + "]", ""},
		{"brackets in a string", "a=\"" + strings.Repeat("[", 100) + "\"\nb='" + strings.Repeat("{", 100) + "'", ""},
		{"after an escaped quote", "a=\"\\\"" + strings.Repeat("[", 100) + "\"", ""},
		{"a backslash in a literal string", `a='\'` + "\nb=" + strings.Repeat("[", 100), "nested"},
		{"brackets in a string of lines", "a=\"\"\"\n\"" + strings.Repeat("[", 100) + "\"\"\\\"\"\"\"\"\nb='''\n''" + strings.Repeat("[", 100) + "'''''\n", ""},
		{"after a string of lines", "a='''''''\nb=" + strings.Repeat("[", 100), "line 2: tables"},
		{"after an empty string", "a=''\nb=" + strings.Repeat("[", 100), "line 2: tables"},
		{"brackets in a comment", "# '" + strings.Repeat("[", 100) + "\na=1", ""},
		{"after a comment", "# '\na=" + strings.Repeat("[", 100), "line 2: tables"},
		{"many tables", strings.Repeat("[[a]]\n[a.b]\n", 1000), ""},
	} {
		p := checkShape(tt.text)
		switch {
		case tt.want == "" && p != nil:
			t.Errorf("%s: %s", tt.name, p)
		case tt.want != "" && (p == nil || !strings.Contains(p.String(), tt.want)):
			t.Errorf("%s: %v, want %s", tt.name, p, tt.want)
		}
		var tree map[string]any
		if _, err := toml.Decode(tt.text, &tree); tt.want == "" && err != nil {
			t.Errorf("%s: the case itself is no TOML: %v", tt.name, err)
		}
	}
}

// TestManyProblems: the number of reported problems and the texts that they repeat are bounded.
func TestManyProblems(t *testing.T) {
	for name, text := range costlyTexts(60 << 10) {
		if _, err := ParseEngines([]byte(text)); err == nil {
			t.Errorf("%s: accepted", name)
		} else if n := len(AsProblems(err)); n > maxProblems+20 {
			t.Errorf("%s: %d problems", name, n)
		}
	}
}
