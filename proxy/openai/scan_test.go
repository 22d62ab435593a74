package openai

import (
	"fmt"
	"strings"
	"testing"
)

// TestHashKey: a key has the same hash in each way to write it, and keys that differ have
// different ones.
func TestHashKey(t *testing.T) {
	seen := map[uint64]string{}
	for n := range 12 {
		key := ""
		for _, c := range []rune("aé中😀z0123456")[:n] {
			key += string(c)
		}
		var escaped strings.Builder
		for _, c := range key {
			if c > 0xffff {
				escaped.WriteString(`\ud83d\ude00`)
			} else {
				fmt.Fprintf(&escaped, `\u%04x`, c)
			}
		}
		hash := hashKey([]byte(key), false)
		for _, form := range []string{key, escaped.String()} {
			if got := hashKey([]byte(form), true); got != hash {
				t.Errorf("%s: %#x, want the hash of %s, %#x", form, got, key, hash)
			}
		}
		if other, found := seen[hash]; found {
			t.Errorf("%s and %s have the same hash", key, other)
		}
		seen[hash] = key
	}
}

// BenchmarkWide scans objects with many keys, which cost the most for each byte of a body.
func BenchmarkWide(b *testing.B) {
	for _, keys := range []int{10, 300, 200_000} {
		object := "{"
		var o strings.Builder
		for i := range keys {
			fmt.Fprintf(&o, `"%x":1,`, i)
		}
		object += strings.TrimSuffix(o.String(), ",") + "}"
		body := []byte(`{"z":[` + strings.TrimSuffix(strings.Repeat(object+",", max(1, 4<<20/len(object))), ",") + `]}`)
		b.Run(fmt.Sprint(keys), func(b *testing.B) {
			var o Object
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if err := o.Parse(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
