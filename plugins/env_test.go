package plugins

import (
	"encoding/binary"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/filter"
)

// tallies makes counters that only count.
type tallies struct{}

func (tallies) Define(host.MetricKind, string) (filter.Metric, error) { return new(tally), nil }

type tally uint64

func (n *tally) Add(delta int64)     { *n += tally(delta) }
func (n *tally) Record(value uint64) { *n = tally(value) }
func (n *tally) Value() uint64       { return uint64(*n) }

func TestForeignCounter(t *testing.T) {
	e := &policyEnv{metrics: &metricTable{maker: tallies{}}}
	add := func(delta int64, name string) []byte {
		return append(binary.LittleEndian.AppendUint64(nil, uint64(delta)), name...)
	}
	for _, tt := range []struct {
		args   []byte
		value  uint64
		status host.Status
	}{
		{add(3, "turns"), 3, host.OK},
		{add(4, "turns"), 7, host.OK},
		{add(0, "others"), 0, host.OK},
		{add(-1, "turns"), 0, host.BadArgument}, // a counter does not shrink
		{add(1, ""), 0, host.BadArgument},
		{[]byte("short"), 0, host.BadArgument},
		{nil, 0, host.BadArgument},
	} {
		result, status := e.Foreign(0, abi.ForeignCounter, tt.args)
		if status != tt.status || status == host.OK && binary.LittleEndian.Uint64(result) != tt.value {
			t.Errorf("%q: %v, status %d", tt.args, result, status)
		}
	}
	if _, status := e.Foreign(0, "pdproxy.v1.unheard_of", nil); status != host.NotFound {
		t.Errorf("an unknown function: status %d", status)
	}
}
