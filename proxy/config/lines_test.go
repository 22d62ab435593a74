package config

import (
	"reflect"
	"strings"
	"testing"
)

func TestScanLines(t *testing.T) {
	for _, tt := range []struct {
		name string
		text string
		want lineIndex
	}{
		{"empty", "", lineIndex{}},
		{"only comments", "# a = 1\n\n  # [b]\n", lineIndex{}},
		{"plain", "a = 1\n\n[t] # [x]\nb = 'x' # c = 1\n  c=true\n", lineIndex{"a": 1, "t": 3, "t.b": 4, "t.c": 5}},
		{"line ends of two bytes", "a = 1\r\n[t]\r\nb = 2\r\n", lineIndex{"a": 1, "t": 2, "t.b": 3}},
		{"spaces in headers and keys", "[ a . 'b' ]\nc . d = 1\n", lineIndex{"a": 1, "a.b": 1, "a.b.c": 2, "a.b.c.d": 2}},
		{"quoted keys", "\"a b\" = 1\n'c=d' = 2\n\"e#\\\"\" = 3\n\"\" = 4\n\"\\u0066\" = 5\n\"\\e\" = 6\n", lineIndex{
			`"a b"`: 1, `"c=d"`: 2, `"e#\""`: 3, `""`: 4, `f`: 5, `"\u001b"`: 6}},
		{"keys in strings", "a = \"b = 1 # \\\" c = 2\"\nd = 'e = \"'\nf = 1\n", lineIndex{"a": 1, "d": 2, "f": 3}},
		{"multi-line strings", "a = \"\"\"\nb = 1\n[c]\n\\\"\"\" \"\" \\\\\"\"\"\nd = '''\ne = 1\\'''\nf = 1\n", lineIndex{"a": 1, "d": 5, "f": 7}},
		{"quotes before the end of a multi-line string", "a = \"\"\"x\"\"\"\"\"\nb = '''x''''\nc = \"\"\nd = ''\ne = 1\n", lineIndex{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}},
		{"arrays", "a = [\n 1, # ]\n \"]\",\n [ 3,\n 4 ],\n]\nb = 2\n", lineIndex{
			"a": 1, "a[0]": 2, "a[1]": 3, "a[2]": 4, "a[2][0]": 4, "a[2][1]": 5, "b": 7}},
		{"inline tables", "a = { b = 1, c . d = { e = '}' } }\nf = [ {g = 1},\n {g = 2} ]\n", lineIndex{
			"a": 1, "a.b": 1, "a.c": 1, "a.c.d": 1, "a.c.d.e": 1, "f": 2, "f[0]": 2, "f[0].g": 2, "f[1]": 3, "f[1].g": 3}},
		{"arrays of tables", "[[a]]\nb = 1\n[[a]]\nb = 2\n[a.c]\nd = 3\n[[a.e]]\n[[a.e]]\nf = 4\n[x]\ny = 5\n", lineIndex{
			"a": 1, "a[0]": 1, "a[0].b": 2, "a[1]": 3, "a[1].b": 4, "a[1].c": 5, "a[1].c.d": 6,
			"a[1].e": 7, "a[1].e[0]": 7, "a[1].e[1]": 8, "a[1].e[1].f": 9, "x": 10, "x.y": 11}},
		{"values with spaces", "a = 1979-05-27 07:32:00 # c\nb = -1_000\n", lineIndex{"a": 1, "b": 2}},
		{"no line end", "a = 1", lineIndex{"a": 1}},
		{"byte order mark", "\xef\xbb\xbfa = 1\n", lineIndex{"a": 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := scanLines(tt.text); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %v\nwant %v", got, tt.want)
			}
		})
	}
}

func TestLineOfAbsentKey(t *testing.T) {
	index := scanLines("[server.tls]\ncert = 'c'\n[[engine]]\n[[engine]]\nname = 'a'\n")
	for key, want := range map[string]int{
		"server.tls.cert": 2, "server.tls.key": 1, "server.listen": 1, "engine[1].role": 5, "engine[0].role": 3, "engine[1].name": 5, "engine[7].role": 3, "admin.listen": 0, "": 0,
	} {
		if got := index.line(key); got != want {
			t.Errorf("%q: got line %d, want %d", key, got, want)
		}
	}
}

// TestScanLinesAlwaysEnds: the scanner also returns for text that is no TOML. Its
// result for such text does not matter.
func TestScanLinesAlwaysEnds(t *testing.T) {
	for _, text := range []string{
		"=", "a", "a =", "a = [", "a = {", "a = [}", "a = {]", "a = {{", "a = {[=", "a = [=,}", "[", "[[", "]", "[a", "[[a]", "\"", "'''", `"""\`, `"\`, "a.", ".a", "a = \"\"\"\"", ",", "{}", "a = [{", "\x00",
		strings.Repeat("a = [", 1000),
	} {
		if index := scanLines(text); index.line("a") > 1 {
			t.Errorf("%q: a is on line %d", text, index.line("a"))
		}
	}
}
