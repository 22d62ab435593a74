package host

import (
	"bytes"
	"encoding/hex"
	"slices"
	"strings"
	"testing"
)

func TestPairsGolden(t *testing.T) {
	tests := []struct {
		name  string
		pairs Pairs
		hex   string
	}{
		{"none", nil, ""},
		// The example of the specification, with its lengths as raw bytes.
		{"two", Pairs{{"a", "1"}, {"b", "22"}},
			"02000000" + "01000000" + "01000000" + "01000000" + "02000000" + "6100" + "3100" + "6200" + "323200"},
		{"empty strings", Pairs{{"", ""}}, "01000000" + "00000000" + "00000000" + "00" + "00"},
		{"NUL inside", Pairs{{"k", "a\x00b"}}, "01000000" + "01000000" + "03000000" + "6b00" + "61006200"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			want, err := hex.DecodeString(tt.hex)
			if err != nil {
				t.Fatal(err)
			}
			got := tt.pairs.Append(nil)
			if !bytes.Equal(got, want) || tt.pairs.EncodedSize() != len(want) {
				t.Errorf("encoded %x (%d), want %x", got, tt.pairs.EncodedSize(), want)
			}
			back, err := DecodePairs(want)
			if err != nil || !slices.Equal(back, tt.pairs) {
				t.Errorf("decoded %q, %v", back, err)
			}
		})
	}
	if p, err := DecodePairs([]byte{0}); p != nil || err != nil {
		t.Errorf("DecodePairs of one NUL byte: %v, %v", p, err)
	}
}

func TestPairsLimits(t *testing.T) {
	many := func(n int) []byte { return slices.Repeat(Pairs{{"k", "v"}}, n).Append(nil) }
	long := func(n int) []byte { return Pairs{{"k", strings.Repeat("v", n)}}.Append(nil) }
	two := Pairs{{"a", "1"}, {"b", "22"}}.Append(nil)
	changed := func(at int, b byte) []byte {
		c := slices.Clone(two)
		c[at] = b
		return c
	}
	tests := []struct {
		name string
		data []byte
		err  string
	}{
		{"1024 pairs", many(1024), ""},
		{"1025 pairs", many(1025), "more than 1024 pairs"},
		{"1 MiB", long(1<<20 - 15), ""},
		{"1 MiB and 1", long(1<<20 - 14), "more than 1 MiB"},
		{"one byte", []byte{1}, "no count"},
		{"three bytes", []byte{1, 0, 0}, "no count"},
		{"count only", []byte{1, 0, 0, 0}, "lengths are cut off"},
		{"huge count", []byte{255, 255, 255, 255}, "more than 1024 pairs"},
		{"cut off", two[:len(two)-1], "a length is beyond the end"},
		{"byte left over", append(slices.Clone(two), 0), "bytes are left over"},
		{"no NUL after key", changed(21, 'x'), "a NUL is missing"},
		{"no NUL after value", changed(23, 'x'), "a NUL is missing"},
		{"huge length", changed(7, 255), "a length is beyond the end"},
		{"length too large by one", changed(16, 3), "a length is beyond the end"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pairs, err := DecodePairs(tt.data)
			if tt.err == "" {
				if err != nil || !bytes.Equal(pairs.Append(nil), tt.data) {
					t.Errorf("got %v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.err) || pairs != nil {
				t.Errorf("got %v, want %q", err, tt.err)
			}
		})
	}
}

func FuzzDecodePairs(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte{0})
	f.Add(Pairs{{"a", "1"}, {"b", "22"}}.Append(nil))
	f.Add(Pairs{{":method", "GET"}, {"", ""}, {"x", "a\x00b"}}.Append(nil))
	f.Add([]byte{1, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, data []byte) {
		pairs, err := DecodePairs(data)
		if err != nil {
			if pairs != nil {
				t.Fatal("an error and pairs")
			}
			return
		}
		// One NUL byte and a count of zero both mean an empty map. No other
		// value has two encodings.
		if again := pairs.Append(nil); len(pairs) > 0 && !bytes.Equal(again, data) || len(pairs) == 0 && strings.Trim(string(data), "\x00") != "" {
			t.Fatalf("%x decodes to %q and encodes to %x", data, pairs, again)
		}
	})
}
