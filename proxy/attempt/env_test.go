package attempt

import (
	"strings"
	"testing"
)

// TestLegID: leg ids have a fixed width, because SGLang aborts by prefix, and are unique.
func TestLegID(t *testing.T) {
	s := NewServices(Options{})
	seen := make(map[string]bool)
	for range 1000 {
		id := s.LegID()
		if len(id) != 32 || strings.Trim(id, "0123456789abcdef") != "" || seen[id] {
			t.Fatalf("bad leg id %q", id)
		}
		seen[id] = true
	}
}
