package disaggid

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/abi"
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

// rangeSize is the size of an encoded Range: node, worker, from and until, all
// little-endian.
const rangeSize = 2 + 8 + 8

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

func (r Range) append(b []byte) []byte {
	b = append(b, r.Node, r.Worker)
	b = binary.LittleEndian.AppendUint64(b, uint64(r.From))
	return binary.LittleEndian.AppendUint64(b, uint64(r.Until))
}

// readRange reads the output of append.
func readRange(b []byte) Range {
	return Range{
		Node: b[0], Worker: b[1],
		From:  int64(binary.LittleEndian.Uint64(b[2:])),
		Until: int64(binary.LittleEndian.Uint64(b[10:])),
	}
}

// Holder is a random number of a Source, so that a grant to one process is not taken for a
// grant to the process that replaces it.
type Holder uint64

// Ask is a Source's request for its next range.
type Ask struct {
	Holder Holder
	Taken  uint32 // number of ranges that the coordinator has granted to it
}

// Sizes of the encodings, which are little-endian. An Ask is holder and taken; a row of a
// table is holder and Range.
const (
	askSize = 8 + 4
	rowSize = 8 + rangeSize
)

// Append appends the encoded ask to b.
func (a Ask) Append(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(b, uint64(a.Holder)), a.Taken)
}

// ReadAsk reads an encoded ask.
func ReadAsk(b []byte) (Ask, error) {
	if len(b) != askSize {
		return Ask{}, fmt.Errorf("read id ask: %d bytes, want %d", len(b), askSize)
	}
	return Ask{Holder: Holder(binary.LittleEndian.Uint64(b)), Taken: binary.LittleEndian.Uint32(b[8:])}, nil
}

// FindRange returns the range for holder in an encoded table of Ranges; false: none.
func FindRange(table []byte, holder Holder) (Range, bool, error) {
	if len(table)%rowSize != 0 {
		return Range{}, false, fmt.Errorf("read id grants: %d bytes are no multiple of %d", len(table), rowSize)
	}
	for ; len(table) > 0; table = table[rowSize:] {
		if Holder(binary.LittleEndian.Uint64(table)) == holder {
			r := readRange(table[8:])
			return r, true, r.check()
		}
	}
	return Range{}, false, nil
}
