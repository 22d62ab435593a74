package replica

import (
	"encoding/binary"
	"errors"

	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// version is the version of requests and answers. A failover between coordinators of
// different versions loses the homes.
const version = 2

// A question has the version and two numbers of 8 bytes. The first number is that of the
// table in the last answer, 0 before the first answer. The second number is that of the
// last change in this answer. All numbers are little-endian.
const questionBytes = 1 + 8 + 8

// An answer has the version; the number of the table and of the change from which the
// next request continues (8 bytes each); the names of instances; and the conversations.
// The number of names (2 bytes) precedes the names. A name is its length (2 bytes) and
// its text. The number of conversations (4 bytes) precedes the conversations. A
// conversation has entryBytes bytes: hash, block, mark, key, last use, turn (4), branches
// (1), flags (1), and twice the number of a name, counted from 1 (2), and a rank (4).
const (
	headBytes  = 1 + 8 + 8
	entryBytes = 5*8 + 4 + 1 + 1 + 2*(2+4)

	flagSpent, flagByID = 1, 2

	mostName = 1 << 10 // bytes of a name; no instance has a longer name
)

var errMalformed = errors.New("malformed")

func appendQuestion(dst []byte, of, since uint64) []byte {
	dst = append(dst, version)
	dst = binary.LittleEndian.AppendUint64(dst, of)
	return binary.LittleEndian.AppendUint64(dst, since)
}

func readQuestion(b []byte) (of, since uint64, err error) {
	if len(b) != questionBytes || b[0] != version {
		return 0, 0, errMalformed
	}
	return binary.LittleEndian.Uint64(b[1:]), binary.LittleEndian.Uint64(b[9:]), nil
}

// naming assigns numbers to the instances of one answer.
type naming struct {
	name    func(uint32) string
	numbers map[uint32]uint16
	count   uint16
	text    []byte
}

func (n *naming) of(instance uint32) uint16 {
	if instance == 0 {
		return 0
	}
	number, known := n.numbers[instance]
	if known {
		return number
	}
	if name := n.name(instance); name != "" && len(name) <= mostName {
		n.count++
		number = n.count
		n.text = binary.LittleEndian.AppendUint16(n.text, uint16(len(name)))
		n.text = append(n.text, name...)
	}
	n.numbers[instance] = number
	return number
}

func appendAnswer(dst []byte, of, until uint64, entries []conversation.Entry, name func(uint32) string) []byte {
	names := naming{name: name, numbers: map[uint32]uint16{}}
	for i := range entries { // an entry names at most 2 instances, so 16 bits are enough for the number of names
		names.of(entries[i].Prefill.Instance)
		names.of(entries[i].Decode.Instance)
	}
	dst = append(dst, version)
	dst = binary.LittleEndian.AppendUint64(dst, of)
	dst = binary.LittleEndian.AppendUint64(dst, until)
	dst = binary.LittleEndian.AppendUint16(dst, names.count)
	dst = append(dst, names.text...)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(entries)))
	for i := range entries {
		dst = appendEntry(dst, &entries[i], &names)
	}
	return dst
}

func appendEntry(dst []byte, e *conversation.Entry, names *naming) []byte {
	for _, n := range [...]uint64{e.Hash, e.Block, e.Mark, uint64(e.Key), uint64(e.LastUse)} {
		dst = binary.LittleEndian.AppendUint64(dst, n)
	}
	dst = binary.LittleEndian.AppendUint32(dst, uint32(e.Turn))
	flags := byte(0)
	if e.Spent {
		flags |= flagSpent
	}
	if e.ByID {
		flags |= flagByID
	}
	dst = append(dst, e.Branches, flags)
	for _, home := range [...]conversation.Target{e.Prefill, e.Decode} {
		dst = binary.LittleEndian.AppendUint16(dst, names.of(home.Instance))
		dst = binary.LittleEndian.AppendUint32(dst, uint32(home.Rank))
	}
	return dst
}

// readAnswer reads an answer and gives its instances the copy's numbers. The entries are
// valid until the next answer.
func (c *Copy) readAnswer(b []byte) (of, until uint64, entries []conversation.Entry, err error) {
	if len(b) < headBytes+2 || b[0] != version {
		return 0, 0, nil, errMalformed
	}
	of, until = binary.LittleEndian.Uint64(b[1:]), binary.LittleEndian.Uint64(b[9:])
	names, b, ok := readNames(b[headBytes:])
	if !ok || len(b) < 4 {
		return 0, 0, nil, errMalformed
	}
	count := binary.LittleEndian.Uint32(b)
	if b = b[4:]; count > most || len(b) != int(count)*entryBytes {
		return 0, 0, nil, errMalformed
	}
	numbers := make([]uint32, 1+len(names))
	for i, name := range names {
		numbers[1+i] = c.number(string(name))
	}
	c.batch = c.batch[:0]
	for ; len(b) > 0; b = b[entryBytes:] {
		e, ok := readEntry(b, numbers)
		if !ok {
			return 0, 0, nil, errMalformed
		}
		c.batch = append(c.batch, e)
	}
	return of, until, c.batch, nil
}

// readNames reads the names, which alias b.
func readNames(b []byte) (names [][]byte, rest []byte, ok bool) {
	count := int(binary.LittleEndian.Uint16(b))
	b = b[2:]
	if count > 2*most {
		return nil, nil, false
	}
	for range count {
		if len(b) < 2 {
			return nil, nil, false
		}
		n := int(binary.LittleEndian.Uint16(b))
		if b = b[2:]; n == 0 || n > mostName || n > len(b) {
			return nil, nil, false
		}
		names, b = append(names, b[:n]), b[n:]
	}
	return names, b, true
}

func readEntry(b []byte, numbers []uint32) (e conversation.Entry, ok bool) {
	u64 := binary.LittleEndian.Uint64
	e = conversation.Entry{
		Hash: u64(b), Block: u64(b[8:]), Mark: u64(b[16:]), Key: conversation.Key(u64(b[24:])), LastUse: int64(u64(b[32:])),
		Turn: int32(binary.LittleEndian.Uint32(b[40:])), Branches: b[44],
		Spent: b[45]&flagSpent != 0, ByID: b[45]&flagByID != 0,
	}
	if e.Turn < 1 || b[45]&^(flagSpent|flagByID) != 0 {
		return e, false
	}
	for i, home := range [...]*conversation.Target{&e.Prefill, &e.Decode} {
		b := b[46+6*i:]
		number, rank := int(binary.LittleEndian.Uint16(b)), int32(binary.LittleEndian.Uint32(b[2:]))
		if number >= len(numbers) || rank < 0 {
			return e, false
		}
		if home.Instance = numbers[number]; home.Instance != 0 {
			home.Rank = rank
		}
	}
	return e, true
}
