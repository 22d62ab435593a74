package openai

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"testing"
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
