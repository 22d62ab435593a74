package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestParseRefuses(t *testing.T) {
	deep := func(n int) string { return `{"a":` + strings.Repeat("[", n) + strings.Repeat("]", n) + `}` }
	many := func(n int, last string) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `"k%d":%d,`, i, i)
		}
		return "{" + b.String() + last + "}"
	}
	for _, tt := range []struct {
		name, body string
		code       string // expected error code; empty: the body is accepted
		param      string
	}{
		{"empty object", `{}`, "", ""},
		{"white space around", " \t\r\n{ \"a\" : 1 , \"b\" : [ ] } \n", "", ""},
		{"every escape", `{"a":"\"\\\/\b\f\n\r\t\u00e9\uD83D\uDE00"}`, "", ""},
		{"every width of UTF-8", `{"a":"é 中 😀 ` + "\u007f\u0080\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff" + `"}`, "", ""},
		{"numbers", `{"a":[0,-0,10,1.5,-1.25e+10,1E5,1e-5,123456789012345678901234567890]}`, "", ""},
		{"keys that differ by case", `{"stream":true,"Stream":false}`, "", ""},
		{"one key in two objects", `{"a":{"k":1},"b":{"k":1},"k":{"a":{"k":{}}}}`, "", ""},
		{"33 keys", many(33, `"x":0`), "", ""},
		{"depth 256", deep(255), "", ""},

		{"nothing", ``, "invalid_json", ""},
		{"white space only", " \n", "invalid_json", ""},
		{"byte order mark", "\xef\xbb\xbf{}", "invalid_json", ""},
		{"array", `[1]`, "invalid_json", ""},
		{"string", `"a"`, "invalid_json", ""},
		{"trailing bytes", `{} x`, "invalid_json", ""},
		{"second object", `{}{}`, "invalid_json", ""},
		{"trailing NUL", "{}\x00", "invalid_json", ""},
		{"open object", `{"a":1`, "invalid_json", ""},
		{"open array", `{"a":[1`, "invalid_json", "a"},
		{"open string", `{"prompt":"abc`, "invalid_json", "prompt"},
		{"open key", `{"prompt`, "invalid_json", ""},
		{"escape at the end", `{"a":"\`, "invalid_json", "a"},
		{"no value", `{"a":`, "invalid_json", "a"},
		{"no colon", `{"a" 1}`, "invalid_json", ""},
		{"no comma", `{"a":1 "b":2}`, "invalid_json", ""},
		{"no comma in array", `{"a":[1 2]}`, "invalid_json", "a"},
		{"comma before the end", `{"a":1,}`, "invalid_json", ""},
		{"comma before the end of an array", `{"a":[1,]}`, "invalid_json", "a"},
		{"comma alone", `{,}`, "invalid_json", ""},
		{"comment", `{"a":1/**/}`, "invalid_json", ""},
		{"single quotes", `{'a':1}`, "invalid_json", ""},
		{"bare key", `{a:1}`, "invalid_json", ""},
		{"number as key", `{1:1}`, "invalid_json", ""},
		{"wrong bracket", `{"a":[1}`, "invalid_json", "a"},
		{"wrong brace", `{"a":{"b":1]}`, "invalid_json", "a"},
		{"NaN", `{"temperature":NaN}`, "invalid_json", "temperature"},
		{"Infinity", `{"temperature":Infinity}`, "invalid_json", "temperature"},
		{"minus Infinity", `{"temperature":-Infinity}`, "invalid_json", "temperature"},
		{"leading zero", `{"n":01}`, "invalid_json", "n"},
		{"leading zero in a long list", `{"prompt":[1,2,3,04,5,6,7,8,9,10,11,12]}`, "invalid_json", "prompt"},
		{"plus sign", `{"n":+1}`, "invalid_json", "n"},
		{"minus alone", `{"n":-}`, "invalid_json", "n"},
		{"point without digits", `{"n":1.}`, "invalid_json", "n"},
		{"point in front", `{"n":.5}`, "invalid_json", "n"},
		{"exponent without digits", `{"n":1e+}`, "invalid_json", "n"},
		{"hexadecimal", `{"n":0x10}`, "invalid_json", ""},
		{"wrong literal", `{"stream":True}`, "invalid_json", "stream"},
		{"half a literal", `{"stream":tru`, "invalid_json", "stream"},
		{"two values", `{"a":truefalse}`, "invalid_json", ""},
		{"tab in a string", "{\"a\":\"\t\"}", "invalid_json", "a"},
		{"line end in a string", "{\"a\":\"0123456789abcdef\n\"}", "invalid_json", "a"},
		{"NUL in a key", "{\"a\x00\":1}", "invalid_json", ""},
		{"unknown escape", `{"a":"\x41"}`, "invalid_json", "a"},
		{"unknown escape far from the end", `{"a":"\x41 and a good deal of text"}`, "invalid_json", "a"},
		{"short escape", `{"a":"\u12"}`, "invalid_json", "a"},
		{"escape that is no number", `{"a":"\u12g4"}`, "invalid_json", "a"},
		{"high surrogate alone", `{"a":"\ud83d"}`, "invalid_json", "a"},
		{"high surrogate and a letter", `{"a":"\ud83dabcdefghijklm"}`, "invalid_json", "a"},
		{"two high surrogates", `{"a":"\ud83d\ud83d"}`, "invalid_json", "a"},
		{"low surrogate alone", `{"a":"\ude00"}`, "invalid_json", "a"},
		{"surrogates the wrong way round", `{"a":"\ude00\ud83d"}`, "invalid_json", "a"},
		{"surrogate in a key", `{"\ud83d":1}`, "invalid_json", ""},
		{"continuation byte alone", "{\"a\":\"\x80 plus some more text\"}", "invalid_json", "a"},
		{"overlong NUL", "{\"a\":\"\xc0\x80 plus some more text\"}", "invalid_json", "a"},
		{"overlong, three bytes", "{\"a\":\"\xe0\x9f\xbf plus some more text\"}", "invalid_json", "a"},
		{"overlong, four bytes", "{\"a\":\"\xf0\x8f\xbf\xbf plus some more text\"}", "invalid_json", "a"},
		{"surrogate as bytes", "{\"a\":\"\xed\xa0\x80 plus some more text\"}", "invalid_json", "a"},
		{"past the last code point", "{\"a\":\"\xf4\x90\x80\x80 plus some more text\"}", "invalid_json", "a"},
		{"cut character", "{\"a\":\"\xe4\xb8\"}", "invalid_json", "a"},
		{"Latin-1", "{\"a\":\"caf\xe9\"}", "invalid_json", "a"},

		{"duplicate key", `{"stream":true,"stream":false}`, "duplicate_key", "stream"},
		{"duplicate by escape", `{"max_tokens":1,"max\u005ftokens":2}`, "duplicate_key", "max_tokens"},
		{"duplicate by escape, the other way", `{"\u0061":1,"a":2}`, "duplicate_key", "a"},
		{"duplicate by two escapes", `{"\u0061\/":1,"a\u002F":2}`, "duplicate_key", "a/"},
		{"duplicate in an object", `{"stream_options":{"include_usage":true,"include_usage":false}}`, "duplicate_key", "stream_options"},
		{"duplicate far inside", `{"messages":[{"content":[{"type":"text","type":"image"}]}]}`, "duplicate_key", "messages"},
		{"duplicate empty key", `{"":1,"":1}`, "duplicate_key", ""},
		{"duplicate among many", many(40, `"k\u0037":0`), "duplicate_key", "k7"},
		{"duplicate among many, inside", `{"a":` + many(40, `"k7":0`) + `}`, "duplicate_key", "a"},
		{"duplicate long key", `{"` + strings.Repeat("é", 40) + `":1,"` + strings.Repeat("é", 40) + `":1}`, "duplicate_key", strings.Repeat("é", 32)},

		{"depth 257", deep(256), "invalid_json", "a"},
		{"objects at depth 257", strings.Repeat(`{"a":`, 257) + "1" + strings.Repeat("}", 257), "invalid_json", "a"},
		{"a hundred thousand brackets", `{"a":` + strings.Repeat("[", 100_000), "invalid_json", "a"},
		{"too many members", many(maxMembers, `"x":0`), "invalid_json", ""},
		{"as many keys as a scan holds", `{"a":` + many(maxKeys-2, `"x":0`) + `}`, "", ""},
		{"too many keys", `{"a":` + many(maxKeys-1, `"x":0`) + `}`, "invalid_json", "a"},
		{"too many keys in objects inside each other", strings.Repeat(`{"a":`, 200) + many(maxKeys-200, `"x":0`) + strings.Repeat(`}`, 200), "invalid_json", "a"},
		{"duplicate in a wide object", `{"a":` + many(20_000, `"k7":0`) + `}`, "duplicate_key", "a"},
		{"long key with escapes", `{"\u0061` + strings.Repeat("a", maxEscaped-6) + `":1}`, "", ""},
		{"too long key with escapes", `{"\u0061` + strings.Repeat("a", maxEscaped-5) + `":1}`, "invalid_json", ""},
		{"long key without escapes", `{"` + strings.Repeat("a", 100_000) + `":1}`, "", ""},
		{"long key with escapes inside", `{"a":{"` + strings.Repeat(`\n`, 50_000) + `":1}}`, "", ""},
		{"duplicate of a long key with escapes", `{"a":{"` + strings.Repeat(`\n`, 50_000) + `":1,"` + strings.Repeat(`\u000a`, 50_000) + `":1}}`, "duplicate_key", "a"},
		{"duplicate by escapes among many", `{"a":` + many(40, `"\u006b\u0037":0`) + `}`, "duplicate_key", "a"},
		{"escapes that differ in the last byte", `{"a":{"\u00e9\u00ea":1,"\u00e9\u00eb":1,"é":1,"\u00e9":{}}}`, "duplicate_key", "a"},
		{"keys of which one begins the other", `{"a":{"\u0061":1,"\u0061b":1,"abc":1,"ab\u0063d":1}}`, "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var o Object
			err := o.Parse([]byte(tt.body))
			if tt.code == "" {
				if err != nil {
					t.Fatal(err)
				}
				if !json.Valid([]byte(tt.body)) {
					t.Fatal("the case itself is no JSON")
				}
				return
			}
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("got error %v, want an *Error", err)
			}
			if e.Status != 400 || e.Code.String() != tt.code || e.Param != tt.param {
				t.Errorf("got status %d, code %q, param %q; want 400, %q, %q", e.Status, e.Code, e.Param, tt.code, tt.param)
			}
			if o.Len() != 0 || o.Raw() != nil {
				t.Error("a refused body is still there")
			}
		})
	}
}

func TestObjectMembers(t *testing.T) {
	body := []byte(` {"model":"m", "a\u002fb" :[1, 2] ,"":null,"Model":1e400}`)
	var o Object
	if err := o.Parse(body); err != nil {
		t.Fatal(err)
	}
	var got []string
	for k, v := range o.Members {
		got = append(got, k+"="+string(v))
	}
	want := []string{`model="m"`, `a/b=[1, 2]`, `=null`, `Model=1e400`}
	if !slices.Equal(got, want) {
		t.Errorf("members %q, want %q", got, want)
	}
	for range o.Members {
		break
	}
	if o.Len() != 4 || &o.Raw()[0] != &body[0] {
		t.Error("Len or Raw is wrong")
	}
	for key, want := range map[string]string{"model": `"m"`, "a/b": `[1, 2]`, "": "null", "Model": "1e400"} {
		v, ok := o.Get(key)
		if !ok || string(v) != want {
			t.Errorf("Get(%q) = %q, %v", key, v, ok)
		}
		if _ = append(v, "!!!!"...); !bytes.HasSuffix(body, []byte("1e400}")) {
			t.Fatal("appending to a value changed the body")
		}
	}
	for _, key := range []string{"MODEL", "a\\u002fb", "b"} {
		if _, ok := o.Get(key); ok {
			t.Errorf("Get(%q) found something", key)
		}
	}
	o.Reset()
	if _, ok := o.Get("model"); ok || o.Len() != 0 || o.Raw() != nil {
		t.Error("the Object is not empty after Reset")
	}
}

// The scratch memory of a huge body must not stay in a pool.
func TestResetDropsLargeScratch(t *testing.T) {
	var b strings.Builder
	b.WriteString(`{"x":{`)
	for i := range 3000 {
		fmt.Fprintf(&b, `"\u0061%d":0,`, i)
	}
	b.WriteString(`"z":0}`)
	for i := range 3000 {
		fmt.Fprintf(&b, `,"\u0061%d":0`, i)
	}
	b.WriteString(`}`)
	var o Object
	if err := o.Parse([]byte(b.String())); err != nil {
		t.Fatal(err)
	}
	if v, ok := o.Get("a2999"); !ok || string(v) != "0" {
		t.Fatal("the last member is missing")
	}
	o.Reset()
	if cap(o.members) > keepScratch || cap(o.keys) > keepScratch {
		t.Errorf("memory after Reset: %d members, %d keys", cap(o.members), cap(o.keys))
	}
}

// TestParseDropsScratch: when Parse returns, the scratch memory of the scan is freed, and
// every member is still found.
func TestParseDropsScratch(t *testing.T) {
	wide := func(key string, n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, `"%s%d":0,`, key, i)
		}
		return b.String()
	}
	tests := []struct {
		name, body string
		most       int // bound of the memory in bytes
	}{
		{"a wide object inside", `{"\u0061":{` + wide("k", 20000) + `"z":0},"b":1}`, 4 << 10},
		{"the same with escapes", `{"\u0061":{` + wide(`\u006b`, 20000) + `"z":0},"b":1}`, 4 << 10},
		{"a wide object in an array", `{"\u0061":[[{` + wide("k", 20000) + `"z":0}]],"b":1}`, 4 << 10},
		{"wide at the top", `{"\u0061":1,` + wide("k", 4000) + `"b":1}`, 4002 * 36},
	}
	for _, tt := range tests {
		var o Object
		if err := o.Parse([]byte(tt.body)); err != nil {
			t.Fatal(tt.name, err)
		}
		if n := o.Size(); n > tt.most {
			t.Errorf("%s: the Object keeps %d bytes, want at most %d", tt.name, n, tt.most)
		}
		for _, key := range []string{"a", "b"} {
			if v, ok := o.Get(key); !ok || len(v) == 0 {
				t.Errorf("%s: %s is missing", tt.name, key)
			}
		}
	}
}

// strict is an independent, slow definition of the bodies that Parse accepts.
func strict(body []byte) bool {
	if !json.Valid(body) || !utf8.Valid(body) || loneSurrogate(body) {
		return false
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	type level struct {
		keys  map[string]bool // keys so far; nil: an array
		value bool            // the next token is a value, not a key
	}
	var open []level
	for first := true; ; first = false {
		tok, err := d.Token()
		if err == io.EOF {
			return true
		}
		if err != nil || first && tok != json.Delim('{') {
			return false
		}
		if n := len(open); n > 0 && open[n-1].keys != nil && tok != json.Delim('}') {
			if l := &open[n-1]; l.value {
				l.value = false
			} else {
				key := tok.(string)
				if l.keys[key] {
					return false
				}
				l.keys[key], l.value = true, true
				continue
			}
		}
		switch tok {
		case json.Delim('{'):
			open = append(open, level{keys: map[string]bool{}})
		case json.Delim('['):
			open = append(open, level{})
		case json.Delim('}'), json.Delim(']'):
			open = open[:len(open)-1]
		}
		if len(open) > 256 {
			return false
		}
	}
}

// loneSurrogate searches the escapes of valid JSON for a lone surrogate.
func loneSurrogate(body []byte) bool {
	var half bool
	for i := 0; i < len(body); i++ {
		var r rune
		if body[i] == '\\' {
			i++
			if body[i] == 'u' {
				fmt.Sscanf(string(body[i+1:i+5]), "%04x", &r)
				i += 4
			}
		}
		low := r >= 0xDC00 && r < 0xE000
		if low != half {
			return true
		}
		half = r >= 0xD800 && r < 0xDC00
	}
	return half
}

var seeds = []string{
	`{}`, ` { } `, `{"a":1}`, `{"a":1,"b":[1,2,{"c":null}],"d":"x\"y\\"}`,
	`{"max_tokens" : 7 , "max\u005ftokens":1}`, `{"a":{"b":1,"b":2}}`, `{"a":"\ud83d\ude00","b":"\ud83d"}`,
	`{"p":[1,2,3,45678,901234,5678901,23456789,0,00,1.5,-3]}`, `{"p": [ 1, 22, 333, 4444, 55555, 666666, 7777777]}`,
	`{"t":"a long string of text with an escape \n in it, é, 中文, 😀 and so on"}`,
	`{"n":123456789012345678901234567890,"m":-0.0e-10}`, "{\"a\":\"\xed\xa0\x80\"}", "\xef\xbb\xbf{}",
	`{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}`,
}

func addSeeds(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Add(textBody(600, english))
	f.Add(textBody(600, chinese))
	f.Add(tokenBody(300, ","))
}

// FuzzParse compares the scan with strict and encoding/json: it accepts exactly the
// bodies that strict accepts, and finds the same members as encoding/json.
func FuzzParse(f *testing.F) {
	addSeeds(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		var o Object
		err := o.Parse(body)
		if want := strict(body); (err == nil) != want {
			t.Fatalf("Parse: %v, accepted should be %v", err, want)
		}
		if err != nil {
			return
		}
		var want map[string]json.RawMessage
		if err := json.Unmarshal(body, &want); err != nil {
			t.Fatal(err)
		}
		got := map[string]json.RawMessage{}
		for k, v := range o.Members {
			got[strings.Clone(k)] = v
		}
		if !maps.EqualFunc(got, want, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
			t.Fatalf("members %q, want %q", got, want)
		}
	})
}
