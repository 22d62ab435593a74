package tokens

import (
	"errors"
	"fmt"
	"math"
)

// errAnswer reports that an engine's answer is not a list of token ids.
var errAnswer = errors.New("not a list of token ids")

// AppendIDs appends the token ids of a raw JSON array of integers from 0 to 2^32-1.
// White space is allowed as in JSON. Anything else, including an empty array, is an
// error that names the element by its index. It allocates only room in dst.
func AppendIDs(dst []uint32, raw []byte) ([]uint32, error) {
	start := len(dst)
	i := skipSpace(raw, 0)
	if i == len(raw) || raw[i] != '[' {
		return dst, fmt.Errorf("%w: no array", errAnswer)
	}
	for {
		i = skipSpace(raw, i+1)
		first, n := i, uint64(0)
		for i < len(raw) {
			d := raw[i] - '0'
			if d > 9 {
				break
			}
			n = n*10 + uint64(d)
			if i++; n > math.MaxUint32 {
				return dst, fmt.Errorf("%w: element %d is above 2^32-1", errAnswer, len(dst)-start)
			}
		}
		if i == first || raw[first] == '0' && i > first+1 {
			return dst, fmt.Errorf("%w: element %d is not an integer", errAnswer, len(dst)-start)
		}
		dst = append(dst, uint32(n))
		i = skipSpace(raw, i)
		if i == len(raw) {
			return dst, fmt.Errorf("%w: cut off after element %d", errAnswer, len(dst)-start-1)
		}
		switch raw[i] {
		case ',':
			continue
		case ']':
			if skipSpace(raw, i+1) != len(raw) {
				return dst, fmt.Errorf("%w: bytes after the array", errAnswer)
			}
			return dst, nil
		}
		return dst, fmt.Errorf("%w: element %d is not an integer", errAnswer, len(dst)-start-1)
	}
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}
