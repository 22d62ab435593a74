package kvevents

import (
	"bytes"
	"encoding/binary"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// appendHashes reads a list of block hashes.
func appendHashes(dst []uint64, b []byte) (hashes []uint64, rest []byte, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return dst, b, err
	}
	for ; n > 0; n-- {
		var h uint64
		if h, b, err = readHash(b); err != nil {
			return dst, b, err
		}
		dst = append(dst, h)
	}
	return dst, b, nil
}

// readHash reads a block hash: a signed or unsigned 64-bit integer, or a digest, of
// which the last eight bytes count, as in vLLM's own conversion. Source: vLLM
// v1/core/kv_cache_utils.py maybe_convert_block_hash.
func readHash(b []byte) (h uint64, rest []byte, err error) {
	switch msgp.NextType(b) {
	case msgp.IntType:
		var i int64
		i, rest, err = msgp.ReadInt64Bytes(b)
		return uint64(i), rest, err
	case msgp.UintType:
		return msgp.ReadUint64Bytes(b)
	case msgp.BinType, msgp.StrType:
		var digest []byte
		if msgp.NextType(b) == msgp.BinType {
			digest, rest, err = msgp.ReadBytesZC(b)
		} else {
			digest, rest, err = msgp.ReadStringZC(b)
		}
		return fold(digest), rest, err
	}
	return 0, b, errField
}

// fold converts a digest to a number: its last eight bytes.
func fold(digest []byte) uint64 {
	if len(digest) >= 8 {
		return binary.BigEndian.Uint64(digest[len(digest)-8:])
	}
	var h uint64
	for _, c := range digest {
		h = h<<8 | uint64(c)
	}
	return h
}

// appendTokens reads a list of token ids. For models with EAGLE speculation SGLang
// sends pairs of neighbours: the first of each pair is the token.
func appendTokens(dst []uint32, b []byte) (tokens []uint32, rest []byte, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return dst, b, err
	}
	if uint64(n) > uint64(len(b)) {
		return dst, b, msgp.ErrShortBytes
	}
	for ; n > 0; n-- {
		var id int64
		if msgp.NextType(b) != msgp.ArrayType {
			id, b, err = msgp.ReadInt64Bytes(b)
		} else {
			id, b, err = readPair(b)
		}
		if err != nil {
			return dst, b, err
		}
		dst = append(dst, uint32(id))
	}
	return dst, b, nil
}

func readPair(b []byte) (first int64, rest []byte, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil || n == 0 {
		return 0, b, errField
	}
	if first, b, err = msgp.ReadInt64Bytes(b); err != nil {
		return 0, b, err
	}
	for ; n > 1 && err == nil; n-- {
		b, err = msgp.Skip(b)
	}
	return first, b, err
}

// meritOf returns the merit of vLLM's kinds of attention. Source: vLLM
// v1/kv_cache_interface.py KVCacheSpecKind.
func meritOf(kind []byte) uint32 {
	switch string(kind) {
	case "full_attention", "mla_attention", "sink_full_attention":
		return meritAll
	case "", "unknown":
		return meritUnknown
	}
	return meritPart
}

// tierOf returns the tier of a medium: GPU; CPU, cpu, CPU_PINNED; all others, such as
// STORAGE, DISK, OBJ or EXTERNAL, are below the host's memory. An event without a medium
// means GPU: engines without other media send none.
func tierOf(medium []byte) kvindex.Tier {
	switch {
	case len(medium) == 0 || bytes.EqualFold(medium, []byte("GPU")):
		return kvindex.GPU
	case len(medium) >= 3 && bytes.EqualFold(medium[:3], []byte("CPU")):
		return kvindex.CPU
	}
	return kvindex.Disk
}

// intern returns text as a string, and reuses *last if it is the same.
func intern(last *string, text []byte) string {
	if *last != string(text) {
		*last = string(text)
	}
	return *last
}
