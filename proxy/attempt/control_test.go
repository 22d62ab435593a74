package attempt

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

func TestNearEnd(t *testing.T) {
	for _, tt := range []struct {
		name    string
		elapsed time.Duration
		tokens  int64
		micros  float32
		want    bool
	}{
		{"the speed is not known", 0, 1 << 20, 0, true},
		{"a short prompt", 0, 500, 100, true},
		{"no prompt", 0, 0, 100, true},
		{"long, has just begun", 0, 100_000, 100, false}, // 5 s at the least
		{"long, not near its end even at twice the speed", 2 * time.Second, 100_000, 100, false},
		{"long, would be near its end at twice the speed", 3 * time.Second, 100_000, 100, true},
		{"late", time.Hour, 100_000, 100, true},
		{"just within the time that the proxy waits", 0, 40_000, 100, true}, // 2 s at the least
		{"a little longer", 0, 40_100, 100, false},
		{"more tokens than a duration can express", 0, 1 << 62, 1e6, false},
	} {
		if got := nearEnd(tt.elapsed, tt.tokens, tt.micros); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// A worker of a fleet sends the prefill leg although the first state of the decode engine has
// not arrived: the coordinator has seen that the engine is ready.
func TestPrefillForANewDecodeEngine(t *testing.T) {
	a := &attempt{owed: owed{p: &coordinator.Placement{Decode: engine.Target{Instance: new(engine.Instance)}}}}
	if !a.decodeWaits() {
		t.Error("the prefill leg is not wanted")
	}
}
