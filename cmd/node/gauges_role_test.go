package node

import (
	"math"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// TestRoleLoad: prefill counts the queue by the measured time of a token, or by that of the
// fleet without a measurement; decode counts its tokens by kv_aware's cost.
func TestRoleLoad(t *testing.T) {
	now := time.Now()
	var measured, fresh load.Counter
	measured.Prefill.Measure(1000, time.Second) // 1 ms for a token
	measured.HoldPrefill(3000, 2000)
	fresh.HoldPrefill(3000, 2000)
	var streams load.Counter
	streams.Hold(1_000_000)
	for _, tt := range []struct {
		name    string
		counter *load.Counter
		role    abi.Role
		want    float64 // seconds
	}{
		{"measured", &measured, abi.RolePrefill, 2},
		{"by the fleet", &fresh, abi.RolePrefill, 4},
		{"no queue at decode", &measured, abi.RoleDecode, 0},
		{"streams", &streams, abi.RoleDecode, costs.DecodeMicros},
		{"both", &measured, abi.RoleBoth, 2},
	} {
		var l roleLoad
		l.add(tt.counter, tt.role, 2000, now)
		if math.Abs(l.seconds-tt.want) > 0.01 || l.running != 1 {
			t.Errorf("%s: %.3f s with %d requests, want %.3f s with 1", tt.name, l.seconds, l.running, tt.want)
		}
	}
}
