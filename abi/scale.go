package abi

// Scale is the meaning of the scores of a placement, for explain: which score is better, and the
// unit. Its bits are those of the header's out flags. 0: the policy states neither.
type Scale uint32

// The bits of a Scale: at most one direction and one unit.
const (
	LowWins      Scale = 1 << 1 // a lower score is better
	HighWins     Scale = 2 << 1
	UnitSeconds  Scale = 1 << 8
	UnitTokens   Scale = 2 << 8
	UnitRequests Scale = 3 << 8
	UnitBlocks   Scale = 4 << 8 // KV blocks
	UnitShare    Scale = 5 << 8 // from 0 to 1

	directionBits Scale = 3 << 1
	unitBits      Scale = 0xff << 8
)

// Better returns which score is better, "low" or "high"; "": not known.
func (s Scale) Better() string {
	switch s & directionBits {
	case LowWins:
		return "low"
	case HighWins:
		return "high"
	}
	return ""
}

// Unit returns the unit of the scores, "s", "tokens", "requests", "blocks" or "share"; "": none, or not known.
func (s Scale) Unit() string {
	switch s & unitBits {
	case UnitSeconds:
		return "s"
	case UnitTokens:
		return "tokens"
	case UnitRequests:
		return "requests"
	case UnitBlocks:
		return "blocks"
	case UnitShare:
		return "share"
	}
	return ""
}
