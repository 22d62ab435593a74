package host

import (
	"encoding/binary"
	"errors"
)

// The limits of a serialized map that a guest hands in.
const (
	MaxPairs      = 1024
	MaxPairsBytes = 1 << 20
)

// EncodedSize returns the size of p serialized; 0 for no pairs.
func (p Pairs) EncodedSize() int {
	if len(p) == 0 {
		return 0
	}
	size := 4
	for _, pair := range p {
		size += 8 + len(pair.Key) + 1 + len(pair.Value) + 1
	}
	return size
}

// Append appends p serialized: a u32 count, for each pair the u32 lengths of
// key and value, then for each pair key, NUL, value, NUL; all little-endian. An
// empty p appends nothing.
func (p Pairs) Append(dst []byte) []byte {
	if len(p) == 0 {
		return dst
	}
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(p)))
	for _, pair := range p {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(pair.Key)))
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(pair.Value)))
	}
	for _, pair := range p {
		dst = append(append(dst, pair.Key...), 0)
		dst = append(append(dst, pair.Value...), 0)
	}
	return dst
}

// DecodePairs decodes a serialized map. Empty data and one NUL byte both give
// no pairs. The strings share one copy of data. An error names the violated
// rule: more than 1 MiB, more than 1024 pairs, a length beyond the end, a
// missing NUL, bytes left over.
func DecodePairs(data []byte) (Pairs, error) {
	if len(data) == 0 || len(data) == 1 && data[0] == 0 {
		return nil, nil
	}
	if len(data) > MaxPairsBytes {
		return nil, errors.New("decode pairs: more than 1 MiB")
	}
	if len(data) < 4 {
		return nil, errors.New("decode pairs: no count")
	}
	count := u32(data, 0)
	if count > MaxPairs {
		return nil, errors.New("decode pairs: more than 1024 pairs")
	}
	head := 4 + 8*int(count)
	if head > len(data) {
		return nil, errors.New("decode pairs: lengths are cut off")
	}
	text := string(data[head:])
	// take cuts a NUL-terminated string of a given length off the text.
	take := func(length uint32) (s string, err error) {
		if uint64(length)+1 > uint64(len(text)) {
			return "", errors.New("decode pairs: a length is beyond the end")
		}
		if text[length] != 0 {
			return "", errors.New("decode pairs: a NUL is missing")
		}
		s, text = text[:length], text[length+1:]
		return s, nil
	}
	pairs := make(Pairs, count)
	for i := range pairs {
		var err error
		if pairs[i].Key, err = take(u32(data, 4+8*i)); err != nil {
			return nil, err
		}
		if pairs[i].Value, err = take(u32(data, 8+8*i)); err != nil {
			return nil, err
		}
	}
	if text != "" {
		return nil, errors.New("decode pairs: bytes are left over")
	}
	return pairs, nil
}
