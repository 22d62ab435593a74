package openai

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"math/bits"
	"slices"
)

// pairwiseKeys is the number of keys up to which an object's keys are compared
// pairwise. The keys of a larger object are sorted once, by hashes.
const pairwiseKeys = 32

// keyRef is one key of an object that is still open: 32 bits that are equal for equal keys of
// the object, and the index of the key's opening quote. The bits are a fingerprint in an object
// of at most pairwiseKeys keys, otherwise a hash. A key costs a scan 8 bytes, and the shortest
// member has 5 bytes in the body.
type keyRef uint64

const keySize = 8 // bytes of a keyRef

func (k keyRef) at() int { return int(uint32(k)) }

// keySeed makes the hashes unknown to clients, so that no body has many equal ones.
var keySeed = maphash.MakeSeed()

// Memory counts the scratch memory of scans.
type Memory interface {
	// TakeScratch counts n bytes until ReleaseMemory. On an error it counts nothing.
	TakeScratch(n int64) error
	// ReleaseMemory gives back n bytes.
	ReleaseMemory(n int64)
}

// take counts the memory for n entries of size bytes before the scan allocates them.
// Slices of at most free entries are not counted: each Object keeps them. On an error it
// returns false and sets full.
func (s *scanner) take(n, free int, size int64) bool {
	if s.memory == nil || n <= free {
		return true
	}
	if s.full = s.memory.TakeScratch(int64(n) * size); s.full != nil {
		s.fail(0, "no memory")
		return false
	}
	s.taken += int64(n) * size
	return true
}

// release gives back what take has counted.
func (s *scanner) release() {
	if s.taken > 0 {
		s.memory.ReleaseMemory(s.taken)
		s.taken = 0
	}
}

const (
	duplicateKey = "a key occurs twice"
	tooManyKeys  = "too many members in objects"
)

// addKey reads the key that opens at i and adds it to the keys of the open object,
// which begin at first. top is set for the outermost object.
func (s *scanner) addKey(i, first int, top bool) (end int, escaped bool) {
	if end, escaped = s.str(i); end < 0 {
		return -1, escaped
	}
	k, key := keyRef(i), s.b[i+1:end-1]
	if open := s.keys[first:]; len(open) < pairwiseKeys {
		k |= keyRef(fingerprint(key, escaped)) << 32
		for _, o := range open {
			if (o^k)>>32 == 0 && s.sameKey(o, k) {
				return s.duplicate(k, top, i), escaped
			}
		}
	} else {
		if len(open) == pairwiseKeys {
			for n, o := range open {
				name := s.key(o)
				open[n] = keyRef(hashKey(name, hasEscape(name)))<<32 | o&(1<<32-1)
			}
		}
		k |= keyRef(hashKey(key, escaped)) << 32
	}
	switch n := len(s.keys); n {
	case maxKeys:
		return s.fail(i, tooManyKeys), escaped
	case cap(s.keys):
		room := min(2*max(n, pairwiseKeys), maxKeys)
		if !s.take(room, keepScratch, keySize) {
			return -1, escaped
		}
		s.keys = append(make([]keyRef, 0, room), s.keys...)
	}
	s.keys = append(s.keys, k)
	return end, escaped
}

// distinct checks the keys of an object that is too large for pairwise comparison. It
// changes their order.
func (s *scanner) distinct(keys []keyRef, top bool) bool {
	if len(keys) <= pairwiseKeys {
		return true
	}
	slices.Sort(keys)
	for i, k := range keys {
		for j := i - 1; j >= 0 && (keys[j]^k)>>32 == 0; j-- { // equal hashes of other keys are rare
			if s.sameKey(keys[j], k) {
				s.duplicate(k, top, 0)
				return false
			}
		}
	}
	return true
}

// duplicate is fail for the second one of two equal keys.
func (s *scanner) duplicate(k keyRef, top bool, offset int) int {
	if top {
		key := s.key(k)
		s.field, s.inField = span{uint32(k.at()) + 1, uint32(k.at() + 1 + len(key))}, true
	}
	return s.fail(offset, duplicateKey)
}

// key returns the bytes of a key, as written.
func (s *scanner) key(k keyRef) []byte {
	return s.b[k.at()+1 : skipString(s.b, k.at())-1]
}

// sameKey compares two keys.
func (s *scanner) sameKey(j, k keyRef) bool {
	a, b := s.key(j), s.key(k)
	if !hasEscape(a) && !hasEscape(b) {
		return bytes.Equal(a, b)
	}
	for len(a) > 0 && len(b) > 0 {
		var left, right [4]byte
		x, y := 0, 0
		x, a = unescapeFirst(&left, a)
		y, b = unescapeFirst(&right, b)
		if x != y || left != right {
			return false
		}
	}
	return len(a) == len(b)
}

// hasEscape reports whether a key has escapes.
func hasEscape(key []byte) bool { return bytes.IndexByte(key, '\\') >= 0 }

// fingerprint is cheap to compute: it depends on the length of the unescaped key and on its
// first and last bytes.
func fingerprint(key []byte, escaped bool) uint32 {
	switch n := len(key); {
	case escaped:
		return escapedFingerprint(key)
	case n >= 8:
		return mixed(n, binary.LittleEndian.Uint64(key), binary.LittleEndian.Uint32(key[n-4:]))
	case n >= 4:
		return mixed(n, uint64(binary.LittleEndian.Uint32(key)), binary.LittleEndian.Uint32(key[n-4:]))
	default:
		first := uint32(0)
		for i, c := range key {
			first |= uint32(c) << (8 * i)
		}
		return mixed(n, uint64(first), first<<(32-8*n))
	}
}

// escapedFingerprint is fingerprint for a key that it reads character by character.
func escapedFingerprint(key []byte) uint32 {
	n, first, final := 0, uint64(0), uint32(0)
	for len(key) > 0 {
		var text [4]byte
		size := 0
		size, key = unescapeFirst(&text, key)
		for _, c := range text[:size] {
			if n < 8 {
				first |= uint64(c) << (8 * n)
			}
			final = final>>8 | uint32(c)<<24
			n++
		}
	}
	if n < 8 {
		first &= 1<<32 - 1
	}
	return mixed(n, first, final)
}

// mixed returns a fingerprint of a key of n bytes with these first eight bytes (four, if the
// key has fewer than eight) and last four bytes.
func mixed(n int, first uint64, final uint32) uint32 {
	return uint32(n)<<24 ^ uint32(first) ^ bits.RotateLeft32(uint32(first>>32), 13) ^ bits.RotateLeft32(final, 7)
}

// hashKey hashes the unescaped text of a key.
func hashKey(key []byte, escaped bool) uint64 {
	if !escaped {
		return maphash.Bytes(keySeed, key)
	}
	var h maphash.Hash
	h.SetSeed(keySeed)
	for len(key) > 0 {
		var text [4]byte
		n := 0
		n, key = unescapeFirst(&text, key)
		_, _ = h.Write(text[:n]) // never fails
	}
	return h.Sum64()
}
