package replica

import (
	"errors"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

const (
	maxName = 1 << 10 // bytes of a name; no instance has a longer name
	// maxRecords bounds the records of an answer: each entry names at most 2 instances.
	maxRecords = 3 * most
)

var errMalformed = errors.New("malformed")

func appendQuestion(dst []byte, of, since uint64) []byte {
	return fleetpb.Append(dst, &fleetpb.HomesQuestion{Table: of, Since: since})
}

func readQuestion(b []byte) (of, since uint64, err error) {
	var m fleetpb.HomesQuestion
	if fleetpb.Unmarshal(b, &m, 1) != nil {
		return 0, 0, errMalformed
	}
	return m.Table, m.Since, nil
}

// naming assigns numbers to the instances of one answer.
type naming struct {
	name    func(uint32) string
	numbers map[uint32]uint32
	names   []string
}

func (n *naming) of(instance uint32) uint32 {
	if instance == 0 {
		return 0
	}
	number, known := n.numbers[instance]
	if known {
		return number
	}
	if name := n.name(instance); name != "" && len(name) <= maxName {
		n.names = append(n.names, name)
		number = uint32(len(n.names))
	}
	n.numbers[instance] = number
	return number
}

func appendAnswer(dst []byte, of, until uint64, entries []conversation.Entry, name func(uint32) string) []byte {
	names := naming{name: name, numbers: map[uint32]uint32{}}
	m := &fleetpb.Homes{Table: of, Until: until, Homes: make([]*fleetpb.Home, len(entries))}
	homes := make([]fleetpb.Home, len(entries))
	for i := range entries {
		e, h := &entries[i], &homes[i]
		h.Hash, h.Block, h.Mark, h.Key, h.LastUse = e.Hash, e.Block, e.Mark, uint64(e.Key), e.LastUse
		h.Turn, h.Branches, h.Spent, h.ById = e.Turn, uint32(e.Branches), e.Spent, e.ByID
		h.Prefill, h.PrefillRank = names.of(e.Prefill.Instance), e.Prefill.Rank
		h.Decode, h.DecodeRank = names.of(e.Decode.Instance), e.Decode.Rank
		m.Homes[i] = h
	}
	m.Names = names.names
	return fleetpb.Append(dst, m)
}

// readAnswer reads an answer and gives its instances the copy's numbers. The entries are
// valid until the next answer. An answer without a table is that of a process that does not know
// the question.
func (c *Copy) readAnswer(b []byte) (of, until uint64, entries []conversation.Entry, err error) {
	var m fleetpb.Homes
	if fleetpb.Unmarshal(b, &m, maxRecords) != nil || m.Table == 0 || len(m.Homes) > most || len(m.Names) > 2*most {
		return 0, 0, nil, errMalformed
	}
	numbers := make([]uint32, 1+len(m.Names))
	for i, name := range m.Names {
		if name == "" || len(name) > maxName {
			return 0, 0, nil, errMalformed
		}
		numbers[1+i] = c.number(name)
	}
	c.batch = c.batch[:0]
	for _, h := range m.Homes {
		e, ok := readEntry(h, numbers)
		if !ok {
			return 0, 0, nil, errMalformed
		}
		c.batch = append(c.batch, e)
	}
	return m.Table, m.Until, c.batch, nil
}

func readEntry(m *fleetpb.Home, numbers []uint32) (e conversation.Entry, ok bool) {
	if m.Turn < 1 || m.PrefillRank < 0 || m.DecodeRank < 0 || m.Prefill >= uint32(len(numbers)) || m.Decode >= uint32(len(numbers)) {
		return e, false
	}
	e = conversation.Entry{
		Hash: m.Hash, Block: m.Block, Mark: m.Mark, Key: conversation.Key(m.Key), LastUse: m.LastUse,
		Turn: m.Turn, Branches: uint8(min(m.Branches, conversation.MaxBranches)), Spent: m.Spent, ByID: m.ById,
	}
	if n := numbers[m.Prefill]; n != 0 {
		e.Prefill = conversation.Target{Instance: n, Rank: m.PrefillRank}
	}
	if n := numbers[m.Decode]; n != 0 {
		e.Decode = conversation.Target{Instance: n, Rank: m.DecodeRank}
	}
	return e, true
}
