package conversation

import (
	"encoding/binary"

	"github.com/pdproxy/pdproxy/proxy/wire"
)

// turnSize is the size of an encoded Turn.
const turnSize = 8 + 4 + 2*8 + 8 + 4*8 + 1

const (
	turnKept = 1 << iota
	turnByID
	turnContinues
)

// Append appends the turn in turnSize bytes, for ReadTurn in this process or another. The
// instances of its homes keep the numbers of this process.
func (turn *Turn) Append(dst []byte) []byte {
	le := binary.LittleEndian
	dst = le.AppendUint64(dst, uint64(turn.Key))
	dst = le.AppendUint32(dst, uint32(turn.Number))
	for _, home := range [...]Target{turn.Prefill, turn.Decode} {
		dst = le.AppendUint32(dst, home.Instance)
		dst = le.AppendUint32(dst, uint32(home.Rank))
	}
	dst = le.AppendUint64(dst, uint64(turn.LastUse))
	for _, hash := range [...]uint64{turn.hash, turn.block, turn.mark, turn.parent} {
		dst = le.AppendUint64(dst, hash)
	}
	var flags byte
	for i, set := range [...]bool{turn.kept, turn.byID, turn.continues} {
		if set {
			flags |= 1 << i
		}
	}
	return append(dst, flags)
}

// ReadTurn reads a turn that Append wrote. r fails when there is none.
func ReadTurn(r *wire.Reader) Turn {
	b := r.Bytes(turnSize)
	if b == nil || b[turnSize-1] >= turnContinues<<1 {
		r.Fail()
		return Turn{}
	}
	le := binary.LittleEndian
	home := func(b []byte) Target {
		return Target{Instance: le.Uint32(b), Rank: int32(le.Uint32(b[4:]))}
	}
	flags := b[turnSize-1]
	return Turn{
		Key: Key(le.Uint64(b)), Number: int32(le.Uint32(b[8:])),
		Prefill: home(b[12:]), Decode: home(b[20:]), LastUse: int64(le.Uint64(b[28:])),
		hash: le.Uint64(b[36:]), block: le.Uint64(b[44:]), mark: le.Uint64(b[52:]), parent: le.Uint64(b[60:]),
		kept: flags&turnKept != 0, byID: flags&turnByID != 0, continues: flags&turnContinues != 0,
	}
}
