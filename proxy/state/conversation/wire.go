package conversation

import "github.com/pdproxy/pdproxy/proxy/fleetpb"

// Message returns the turn for ReadTurn in this process or another. The instances of its homes
// keep the numbers of this process.
func (turn *Turn) Message() *fleetpb.Turn {
	m := fleetpb.TurnFromVTPool()
	m.Key, m.Number, m.LastUse = uint64(turn.Key), turn.Number, turn.LastUse
	m.Prefill, m.Decode = turn.Prefill.message(), turn.Decode.message()
	m.Hash, m.Block, m.Mark, m.Parent = turn.hash, turn.block, turn.mark, turn.parent
	m.Kept, m.ById, m.Continues = turn.kept, turn.byID, turn.continues
	return m
}

// ReadTurn returns the turn of a message.
func ReadTurn(m *fleetpb.Turn) Turn {
	return Turn{
		Key: Key(m.Key), Number: m.Number, LastUse: m.LastUse, Prefill: readTarget(m.Prefill), Decode: readTarget(m.Decode),
		hash: m.Hash, block: m.Block, mark: m.Mark, parent: m.Parent, kept: m.Kept, byID: m.ById, continues: m.Continues,
	}
}

func (t Target) message() uint64 { return uint64(uint32(t.Rank))<<32 | uint64(t.Instance) }

func readTarget(v uint64) Target {
	return Target{Instance: uint32(v), Rank: int32(v >> 32 & (1<<31 - 1))}
}
