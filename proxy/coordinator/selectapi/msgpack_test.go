package selectapi

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// TestAppendMsgpack compares with bytes of MessagePack's specification.
func TestAppendMsgpack(t *testing.T) {
	for _, tt := range []struct{ json, want string }{
		{`{}`, "df00000000"},
		{` [ ] `, "dd00000000"},
		{`{"a":1}`, "df00000001" + "a161" + "01"},
		{"{ \"a\" : [ true , false , null ] ,\n\"b\" : -1 }", "df00000002" + "a161" + "dd00000003c3c2c0" + "a162" + "ff"},
		{`"x\"\\\/\b\f\n\r\té😀\ud83d\ude00"`, "b4" + hex.EncodeToString([]byte("x\"\\/\b\f\n\r\té😀😀"))},
		{`9223372036854775807`, "cf7fffffffffffffff"},
		{`18446744073709551615`, "cfffffffffffffffff"},
		{`-9223372036854775808`, "d38000000000000000"},
		{`2072360727809029`, "cf00075ccbb8a4d405"},
		{`0.5`, "cb3fe0000000000000"},
		{`1e2`, "cb4059000000000000"},
		{`-0`, "00"},
	} {
		got, err := appendMsgpack(nil, []byte(tt.json))
		want := tt.want
		if tt.json[0] == '"' { // by its length
			n, _ := hex.DecodeString(want[2:])
			want = hex.EncodeToString(append([]byte{0xa0 | byte(len(n))}, n...))
		}
		if tt.json == "2072360727809029" || tt.json == "9223372036854775807" { // both the signed and the unsigned form are correct
			if v, _, err := msgp.ReadIntfBytes(got); err != nil || string(mustJSON(v)) != tt.json {
				t.Errorf("%s became %x", tt.json, got)
			}
			continue
		}
		if err != nil || hex.EncodeToString(got) != want {
			t.Errorf("%s became %x, %v; want %s", tt.json, got, err, want)
		}
	}
	for _, bad := range []string{"", " ", "{", "[1,", "[1 2]", `{"a"}`, `{"a":}`, `{1:2}`, "tru", "1.", "18446744073709551616", "1e999", "[] []", `"a`, "-", strings.Repeat("[", maxPackDepth+2) + strings.Repeat("]", maxPackDepth+2)} {
		if got, err := appendMsgpack([]byte("x"), []byte(bad)); bad != "1." && (err == nil || string(got) != "x") {
			t.Errorf("%q became %x", bad, got)
		}
	}
}

func mustJSON(v any) []byte { b, _ := json.Marshal(v); return b }

// FuzzAppendMsgpack: JSON converted to MessagePack and back has the same values.
func FuzzAppendMsgpack(f *testing.F) {
	for _, text := range []string{
		`{"model":"m","prompt":[1,2,4294967296],"temperature":0.7,"stop":["\n","\u00e9"],"disaggregated_params":{"ctx_request_id":2072360727809029,"encoded_opaque_state":"AAECAw=="}}`,
		`[-1,-128,-129,255,256,65536,-2147483649,1.5e300,"",{},[[[]]]]`, `"\ud83d"`, `nul`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		packed, err := appendMsgpack(nil, body)
		if err != nil {
			return
		}
		var text bytes.Buffer
		if rest, err := msgp.UnmarshalAsJSON(&text, packed); err != nil || len(rest) > 0 {
			t.Fatalf("%q became %x: %v", body, packed, err)
		}
		if !json.Valid(body) || bytes.ContainsRune(body, '\ufffd') || bytes.Contains(body, []byte(`\`)) {
			return // lone surrogates and invalid UTF-8 have no equal form
		}
		read := func(b []byte) (v any) {
			if err := json.Unmarshal(b, &v); err != nil {
				t.Fatalf("%q: json.Unmarshal(b, &v) = %v, want nil", b, err)
			}
			return v
		}
		if want, got := read(body), read(text.Bytes()); !reflect.DeepEqual(want, got) {
			t.Errorf("%q became %q", body, text.Bytes())
		}
	})
}
