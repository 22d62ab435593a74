package openai

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

func set(key, value string) Edit { return Edit{Key: key, Value: []byte(value)} }
func cut(key string) Edit        { return Edit{Key: key, Remove: true} }

func TestAppend(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		edits      []Edit
		want       string
	}{
		{"no edit", ` { "a" : 1 } `, nil, ` { "a" : 1 } `},
		{"replace in place", `{"a":1, "b" : [2] ,"c":3}`, []Edit{set("b", `"x"`)}, `{"a":1, "b" : "x" ,"c":3}`},
		{"replace all", `{"a":1,"b":2}`, []Edit{set("b", "20"), set("a", "10")}, `{"a":10,"b":20}`},
		{"replace under an escaped key", `{"max\u005ftokens":9}`, []Edit{set("max_tokens", "1")}, `{"max\u005ftokens":1}`},
		{"put in first", `{ "a":1}`, []Edit{set("x", "1"), set("y", "2")}, `{"x":1,"y":2, "a":1}`},
		{"put into nothing", `{ }`, []Edit{set("x", "1"), set("y", "2")}, `{"x":1,"y":2 }`},
		{"put in a key that needs escapes", `{}`, []Edit{set("a\"\n", "1")}, `{"a\"\n":1}`},
		{"cut the first", `{ "a":1 , "b":2}`, []Edit{cut("a")}, `{ "b":2}`},
		{"cut the middle", `{"a":1 , "b":2 , "c":3}`, []Edit{cut("b")}, `{"a":1 , "c":3}`},
		{"cut the last", `{"a":1 , "b":2 }`, []Edit{cut("b")}, `{"a":1 }`},
		{"cut the first two", `{"a":1,"b":2,"c":3}`, []Edit{cut("b"), cut("a")}, `{"c":3}`},
		{"cut the last two", `{"a":1,"b":2,"c":3}`, []Edit{cut("c"), cut("b")}, `{"a":1}`},
		{"cut every other", `{"a":1,"b":2,"c":3,"d":4,"e":5}`, []Edit{cut("a"), cut("c"), cut("e")}, `{"b":2,"d":4}`},
		{"cut all", ` { "a":1 , "b":2 } `, []Edit{cut("a"), cut("b")}, ` {  } `},
		{"cut all but put one in", `{"a":1}`, []Edit{cut("a"), set("x", "0")}, `{"x":0}`},
		{"cut of a missing member", `{"a":1}`, []Edit{cut("x")}, `{"a":1}`},
		{"replace before a cut", `{"a":1,"b":2}`, []Edit{set("a", "9"), cut("b")}, `{"a":9}`},
		{"replace behind a cut", `{"a":1,"b":2}`, []Edit{cut("a"), set("b", "9")}, `{"b":9}`},
		{"the last edit of a key counts", `{"a":1}`, []Edit{set("a", "2"), set("x", "3"), set("a", "4"), set("x", "5")}, `{"x":5,"a":4}`},
		{"put in, then cut", `{"a":1}`, []Edit{set("x", "2"), cut("x")}, `{"a":1}`},
		{"an idle edit", `{"a":1}`, []Edit{{Key: "a"}, {Key: "x"}}, `{"a":1}`},
		{"bytes that a decoder would change", `{"a":1,"id":12345678901234567890,"t":"<é\/\u00e9>","f":1.0e+2}`, []Edit{cut("a")},
			`{"id":12345678901234567890,"t":"<é\/\u00e9>","f":1.0e+2}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var o Object
			if err := o.Parse([]byte(tt.body)); err != nil {
				t.Fatal(err)
			}
			if got := string(o.Append([]byte("> "), tt.edits...)); got != "> "+tt.want {
				t.Errorf("got  %s\nwant > %s", got, tt.want)
			}
			if !json.Valid([]byte(tt.want)) {
				t.Error("the case itself is no JSON")
			}
		})
	}
}

func TestAppendUnparsed(t *testing.T) {
	var o Object
	if got := string(o.Append(nil)); got != "{}" {
		t.Errorf("got %s", got)
	}
	if got := string(o.Append(nil, set("a", "1"), cut("b"))); got != `{"a":1}` {
		t.Errorf("got %s", got)
	}
}

// FuzzAppend compares the splice with encoding/json: the result is the edited map, and a
// member without an edit keeps its bytes.
func FuzzAppend(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s), "max_tokens", "a", "b", uint8(0))
		f.Add([]byte(s), "a", "c", "x\"y", uint8(7))
	}
	f.Fuzz(func(t *testing.T, body []byte, k1, k2, k3 string, how uint8) {
		var o Object
		if o.Parse(body) != nil {
			return
		}
		edits := []Edit{set(k1, `{"n":12345678901234567890}`), set(k2, "null"), set(k3, "[1 ,2]")}
		for i := range edits {
			edits[i].Remove = how>>i&1 == 1
		}
		want, raw := decode(t, body), rawMembers(t, body)
		for _, e := range edits {
			key := strings.ToValidUTF8(e.Key, "\ufffd")
			if key != e.Key {
				return // a scanned body has no such key
			}
			delete(want, key)
			delete(raw, key)
			if !e.Remove {
				want[key] = decodeValue(t, e.Value)
				raw[key] = e.Value
			}
		}
		out := o.Append(nil, edits...)
		if again := AppendEdited(nil, body, edits...); !bytes.Equal(again, out) {
			t.Fatalf("%s\nbecame %s, without a list of its members %s", body, out, again)
		}
		if got := decode(t, out); !reflect.DeepEqual(got, want) {
			t.Fatalf("%s\nbecame %s\nwant %v", body, out, want)
		}
		for key, v := range rawMembers(t, out) {
			if !bytes.Equal(v, raw[key]) {
				t.Fatalf("member %q is %s, was %s", key, v, raw[key])
			}
		}
		if err := new(Object).Parse(out); err != nil {
			t.Fatalf("%s\nbecame %s: %v", body, out, err)
		}
	})
}

func decodeValue(t *testing.T, b []byte) (v any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%s: d.Decode(&v) = %v, want nil", b, err)
	}
	return v
}

func decode(t *testing.T, b []byte) map[string]any {
	t.Helper()
	return decodeValue(t, b).(map[string]any)
}

func rawMembers(t *testing.T, b []byte) (m map[string]json.RawMessage) {
	t.Helper()
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return m
}
