package lowestyoungest

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestEvict(t *testing.T) {
	for _, tt := range []struct {
		name string
		rows []abi.Evictable
		want int32
	}{
		{"none", nil, abi.EvictNone},
		{"one", []abi.Evictable{{Priority: -1}}, 0},
		{"the lowest class", []abi.Evictable{{Priority: -1, AgeMicros: 1}, {Priority: -3, AgeMicros: 9}, {Priority: -2, AgeMicros: 1}}, 1},
		{"the youngest of a class", []abi.Evictable{{Priority: -3, AgeMicros: 9}, {Priority: -3, AgeMicros: 2}, {Priority: -3, AgeMicros: 5}}, 1},
		{"the first of equals", []abi.Evictable{{Priority: -3, AgeMicros: 2}, {Priority: -3, AgeMicros: 2}}, 0},
	} {
		if got := Evict(&abi.EvictFacts{Running: tt.rows}); got != tt.want {
			t.Errorf("%s: row %d, want %d", tt.name, got, tt.want)
		}
	}
}
