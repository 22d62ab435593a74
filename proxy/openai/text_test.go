package openai

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// The word-wise tests must have the same result as a byte-wise test, for every byte at
// every position and for any following bytes.
func TestStops(t *testing.T) {
	for c := range 256 {
		want := c < 0x20 || c == '"' || c == '\\' || c >= 0x80
		for at := range 8 {
			for _, behind := range []byte{'a', ' ', '!', '#', '[', ']', 0x7f, 0, '"', '\\', 0x80, 0xdc, 0xff} {
				text := append(bytes.Repeat([]byte{'x'}, at), byte(c))
				for len(text) < 8 {
					text = append(text, behind)
				}
				m := stops(binary.LittleEndian.Uint64(text))
				if got := bits.TrailingZeros64(m)>>3 == at; got != want {
					t.Fatalf("byte %#x at %d before %#x: %v", c, at, behind, got)
				}
			}
		}
	}
}

func TestInts(t *testing.T) {
	for _, tt := range []struct {
		text string
		n    int
		rest string
	}{
		{"1,22,333,4444,55555,666666,7777777,1]..........", 7, "1].........."},
		{"1, 2,  3,4..........", 2, " 3,4.........."},
		{"12345678,1..........", 0, "12345678,1.........."},
		{"0,00,1..........", 1, "00,1.........."},
		{"1,-2,3..........", 1, "-2,3.........."},
		{"1,2.5,3..........", 1, "2.5,3.........."},
		{"1,2e5,3..........", 1, "2e5,3.........."},
		{"1,2 ,3..........", 1, "2 ,3.........."},
		{"\"a\",1..........", 0, "\"a\",1.........."},
		{"1,2,3", 0, "1,2,3"},
		{"1,/,3..........", 1, "/,3.........."},
		{"1,:,3..........", 1, ":,3.........."},
		{"1,\xb0\xff,3..........", 1, "\xb0\xff,3.........."},
	} {
		s := scanner{b: []byte(tt.text)}
		if n, i := s.ints(0); n != tt.n || tt.text[i:] != tt.rest {
			t.Errorf("%q: %d, then %q", tt.text, n, tt.text[i:])
		}
	}
}

func TestString(t *testing.T) {
	for _, tt := range []struct {
		raw, want string
		ok        bool
	}{
		{`""`, "", true},
		{`"abc"`, "abc", true},
		{`"中文"`, "中文", true},
		{`"\"\\\/\b\f\n\r\t\u0041\ud83d\ude00!"`, "\"\\/\b\f\n\r\tA😀!", true},
		{`"abc`, "", false},
		{`"a"b"`, "", false},
		{`"\ud83d"`, "", false},
		{`1`, "", false},
		{`null`, "", false},
		{``, "", false},
		{`"`, "", false},
	} {
		got, ok := String([]byte(tt.raw))
		if got != tt.want || ok != tt.ok {
			t.Errorf("String(%s) = %q, %v", tt.raw, got, ok)
		}
	}
}

func TestInt64(t *testing.T) {
	for _, n := range []int64{0, 1, -1, 42, 1<<53 + 1, math.MaxInt64, math.MinInt64, math.MaxInt64 - 7} {
		if got, ok := Int64(strconv.AppendInt(nil, n, 10)); !ok || got != n {
			t.Errorf("Int64(%d) = %d, %v", n, got, ok)
		}
	}
	if n, ok := Int64([]byte("-0")); n != 0 || !ok {
		t.Error("-0 is no number")
	}
	for _, raw := range []string{
		"", "-", "01", "-01", "1.0", "1e3", "1 ", " 1", "0x1", `"1"`, "null", "true", "+1", "--1",
		"9223372036854775808", "-9223372036854775809", "18446744073709551616", "99999999999999999999999",
	} {
		if n, ok := Int64([]byte(raw)); ok {
			t.Errorf("Int64(%s) = %d", raw, n)
		}
	}
}

// TestInt64OfManyDigits: the digits of a client are not copied.
func TestInt64OfManyDigits(t *testing.T) {
	raw := bytes.Repeat([]byte{'9'}, 1<<20)
	if n := testing.AllocsPerRun(10, func() { Int64(raw) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestBoolAndNull(t *testing.T) {
	for raw, want := range map[string][2]bool{
		"true": {true, true}, "false": {false, true}, "1": {}, `"true"`: {}, "null": {}, "": {}, "True": {},
	} {
		if truth, ok := Bool([]byte(raw)); truth != want[0] || ok != want[1] {
			t.Errorf("Bool(%s) = %v, %v", raw, truth, ok)
		}
	}
	for raw, want := range map[string]bool{"null": true, "": true, "0": false, `""`: false, "nul": false} {
		if IsNull([]byte(raw)) != want {
			t.Errorf("IsNull(%s) = %v", raw, !want)
		}
	}
}

func FuzzQuoted(f *testing.F) {
	for _, s := range []string{"", "a", "\"\\/\x00\x1f\n\r\t\x7f", "é中😀\u2028", "\xff\xed\xa0\x80"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		raw := AppendQuoted(nil, s)
		var want string
		if err := json.Unmarshal(raw, &want); err != nil {
			t.Fatalf("%q became %s: %v", s, raw, err)
		}
		got, ok := String(raw)
		if !ok || got != want || utf8.ValidString(s) && got != s {
			t.Fatalf("%q became %s, read as %q", s, raw, got)
		}
	})
}

func FuzzInt64(f *testing.F) {
	for _, s := range []string{"0", "-9223372036854775808", "9223372036854775808", "-0", "00", "1e1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var want int64
		wanted := strings.TrimSpace(s) == s && json.Valid([]byte(s)) && json.Unmarshal([]byte(s), &want) == nil && (s[0] == '-' || s[0] >= '0' && s[0] <= '9')
		if got, ok := Int64([]byte(s)); ok != wanted || ok && got != want {
			t.Fatalf("Int64(%q) = %d, %v; want %d, %v", s, got, ok, want, wanted)
		}
	})
}
