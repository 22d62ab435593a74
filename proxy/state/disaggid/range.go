package disaggid

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// Id-time, in Unix ms. It begins with the epoch of the layout and ends before the
// first id that is brought into range onto one of the beginning.
const (
	Epoch = abi.DisaggEpochMilli
	End   = Epoch + int64((abi.MaxDisaggID-abi.MinDisaggID)>>milliShift)
)

// IDs is how many ids a millisecond of id-time has on one line.
const IDs = 1 << counterBits

// Clock is the id-time of a host's clock. One that is outside of id-time, as that
// of a host without a battery, tells nothing: Epoch.
func Clock(t time.Time) int64 {
	if ms := t.UnixMilli(); ms > Epoch && ms < End {
		return ms
	}
	return Epoch
}

// Range is the ids of one line, which is a node and a worker number, with an
// id-time of From or later and before Until. Whoever holds a range is the only
// issuer of its ids, for ever.
type Range struct {
	Node, Worker uint8
	From, Until  int64 // Unix ms
}

// rangeSize is the size of an encoded Range: node, worker, from and until, all
// little-endian.
const rangeSize = 2 + 8 + 8

// Size is the number of ids in r.
func (r Range) Size() int64 { return (r.Until - r.From) << counterBits }

// check says what is wrong with a range that a peer sent.
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

// readRange reads what append wrote.
func readRange(b []byte) Range {
	return Range{
		Node: b[0], Worker: b[1],
		From:  int64(binary.LittleEndian.Uint64(b[2:])),
		Until: int64(binary.LittleEndian.Uint64(b[10:])),
	}
}

// Holder is one Source of a process among all that ask the same Ranges: a number
// drawn when it was made, so that what was granted to a process is not taken for
// the grant of the one that follows it in its place.
type Holder uint64

// Ask is what a Source says to get its next range.
type Ask struct {
	Holder Holder
	Taken  uint32 // how many ranges it has been given so far
}

// Sizes of what travels, all little-endian: an Ask is holder and taken, a row of a
// table holder and Range.
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

// FindRange is the range that an encoded table of Ranges has for holder; false
// without one.
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
