package upstream

import (
	"errors"
	"testing"
)

// TestChunkFraming decodes bodies at once and byte by byte.
func TestChunkFraming(t *testing.T) {
	for _, tt := range []struct {
		name, body, want string
		err              error
	}{
		{"two chunks", "5\r\nhello\r\n1;x=y\r\n!\r\n0\r\n\r\n", "hello!", nil},
		{"padded size", "1 \t\r\na\r\n0\r\n\r\n", "a", nil},
		{"trailers", "0\r\nA: b\r\n\r\n", "", nil},
		{"data that ends without CR", "5\r\nhelloX\n0\r\n\r\n", "hello", errChunkEnd},
		{"data that ends without LF", "5\r\nhello\rX0\r\n\r\n", "hello", errChunkEnd},
		{"data longer than its size", "2\r\nhello\r\n0\r\n\r\n", "he", errChunkEnd},
		{"no size", "\r\n\r\n", "", errChunkSize},
		{"an extension without a size", ";x\r\n\r\n", "", errChunkSize},
		{"white space without a size", " \r\n\r\n", "", errChunkSize},
		{"a size without CR", "1\na\r\n0\r\n\r\n", "", errChunkSize},
		{"a sign", "+1\r\na\r\n0\r\n\r\n", "", errChunkSize},
		{"a size beyond 63 bits", "8000000000000000\r\n", "", errChunkSize},
		{"17 digits", "00000000000000001\r\na\r\n0\r\n\r\n", "", errChunkSize},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, step := range []int{len(tt.body), 1} {
				d := framing{kind: byChunks, state: inSize}
				var got []byte
				var err error
				for at := 0; at < len(tt.body) && err == nil; at += step {
					piece := []byte(tt.body[at : at+step])
					n, _, failed := d.decode(piece)
					got, err = append(got, piece[:n]...), failed
				}
				if string(got) != tt.want || !errors.Is(err, tt.err) || (d.state == inEnd) != (tt.err == nil) {
					t.Errorf("by %d: %q, %v, done %v; want %q, %v", step, got, err, d.state == inEnd, tt.want, tt.err)
				}
			}
		})
	}
}
