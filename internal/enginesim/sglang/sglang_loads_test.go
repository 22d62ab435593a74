package sglang

import (
	"encoding/hex"
	"testing"
)

// TestLoadStat: the bytes of msgspec for LoadStat(3, 2, 4096, 65536, 1, 512, 5120, 256).
func TestLoadStat(t *testing.T) {
	l := loadStat{running: 3, waiting: 2, used: 4096, capacity: 65536, uncached: 512, total: 5120, maxRunning: 256}
	const want = "9ba84c6f6164537461740302cd1000ce0001000001cd0200cd1400cd01000000"
	if got := hex.EncodeToString(l.wire(1)); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
