package edge

import (
	"net"
	"slices"
	"strings"
	"testing"
)

// The server writes GOAWAY once, between two frames and never before the first one, for
// all sizes of writes.
func TestGoAway(t *testing.T) {
	frame := func(kind byte, payload string) string {
		return string([]byte{0, 0, byte(len(payload)), kind, 0, 0, 0, 0, 1}) + payload
	}
	frames := []string{frame(4, ""), frame(1, "head"), frame(0, strings.Repeat("x", 200)), frame(8, "1234"), frame(0, "")}
	all := strings.Join(frames, "")
	for size := 1; size <= len(all); size++ {
		for wanted := 0; wanted <= len(all); wanted += size {
			var g goAway
			conn := &sink{}
			for i := 0; i < len(all); i += size {
				if i == wanted {
					g.wanted.Store(true)
					g.put(conn)
				}
				if n, err := g.write(conn, []byte(all[i:min(i+size, len(all))])); err != nil || n != min(size, len(all)-i) {
					t.Fatal(n, err)
				}
			}
			if wanted >= len(all) {
				g.wanted.Store(true)
				g.put(conn)
			}
			got := conn.text.String()
			before, after, found := strings.Cut(got, string(goAwayFrame))
			if !found || before+after != all || !slices.Contains(ends(frames), len(before)) {
				t.Fatalf("writes of %d bytes, GOAWAY requested after %d: got %q", size, wanted, got)
			}
		}
	}
}

// sink stores the written bytes.
type sink struct {
	net.Conn
	text strings.Builder
}

func (s *sink) Write(p []byte) (int, error) { return s.text.Write(p) }

// ends returns the positions at which frames end.
func ends(frames []string) (at []int) {
	n := 0
	for _, f := range frames {
		n += len(f)
		at = append(at, n)
	}
	return at
}
