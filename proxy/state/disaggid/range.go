package disaggid

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// Bounds of id-time, in Unix ms. Id-time begins with the epoch of the layout. Later ids
// would exceed the legal range and would be moved into the range, onto ids of the
// beginning. Id-time ends before the first such id.
const (
	Epoch = abi.DisaggEpochMilli
	End   = Epoch + int64((abi.MaxDisaggID-abi.MinDisaggID)>>milliShift)
)

// IDs is the number of ids in a millisecond of id-time of one line.
const IDs = 1 << counterBits

// Clock returns the id-time of a host's clock; Epoch if the clock is outside of id-time,
// as on a host whose clock was reset.
func Clock(t time.Time) int64 {
	if ms := t.UnixMilli(); ms > Epoch && ms < End {
		return ms
	}
	return Epoch
}

// Range is the ids of one line (a node and a worker number) with id-time from From until
// before Until. The holder of a range is permanently the only issuer of its ids.
type Range struct {
	Node, Worker uint8
	From, Until  int64 // Unix ms
}

// Size is the number of ids in r.
func (r Range) Size() int64 { return (r.Until - r.From) << counterBits }

// check returns an error if a range from a peer is invalid.
func (r Range) check() error {
	switch {
	case r.Worker > maxWorker:
		return fmt.Errorf("read id range: worker %d is not in 0 to %d", r.Worker, maxWorker)
	case r.From < Epoch || r.Until > End || r.From >= r.Until:
		return errors.New("read id range: it is outside of id-time, or empty")
	}
	return nil
}

// Holder is a random number of a Source, so that a grant to one process is not taken for a
// grant to the process that replaces it.
type Holder uint64

// Ask is a Source's request for its next range.
type Ask struct {
	Holder Holder
	Taken  uint32 // number of ranges that the coordinator has granted to it
}

// Message returns the ask for AskOf in another process.
func (a Ask) Message() *fleetpb.IDAsk {
	return &fleetpb.IDAsk{Holder: uint64(a.Holder), Taken: a.Taken}
}

// AskOf returns the ask of a message.
func AskOf(m *fleetpb.IDAsk) Ask { return Ask{Holder: Holder(m.GetHolder()), Taken: m.GetTaken()} }

// FindRange returns the range for holder in an encoded table of Ranges; false: none.
func FindRange(table []byte, holder Holder) (Range, bool, error) {
	var m fleetpb.IDRanges
	if err := fleetpb.Unmarshal(table, &m, maxRows); err != nil {
		return Range{}, false, fmt.Errorf("read id grants: %w", err)
	}
	for _, g := range m.Ranges {
		if Holder(g.Holder) == holder {
			r := Range{Node: uint8(g.Node), Worker: uint8(min(g.Worker, math.MaxUint8)), From: g.FromMs, Until: g.UntilMs}
			if g.Node > math.MaxUint8 {
				return r, true, errors.New("read id range: the node is not in 0 to 255")
			}
			return r, true, r.check()
		}
	}
	return Range{}, false, nil
}
