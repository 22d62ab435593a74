package enginesim

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// mediumGPU is the only memory tier of the simulator's events.
const mediumGPU = "GPU"

// kvWire writes a batch of events as an engine does.
type kvWire func(at time.Time, rank int, events []kvEvent) []byte

// vllmNaming names blocks as an engine without PYTHONHASHSEED: with digests
// that no other process can compute and that change with each start.
type vllmNaming struct{ seed string }

func (vllmNaming) root(string) blockName { return blockName{} }

func (n vllmNaming) next(_ blockName, _ bool, _ string, _ []token, hash blockHash) blockName {
	return sha256.Sum256(binary.BigEndian.AppendUint64([]byte(n.seed), uint64(hash)))
}

// vllmWire is vLLM's EventBatch (vllm/distributed/kv_events.py): an array of
// time, events and rank. Events are maps with the key "type", or arrays. Maps
// omit fields with default values; arrays omit them only at the end.
type vllmWire struct{ arrays, digests bool }

func (w vllmWire) batch(at time.Time, rank int, events []kvEvent) []byte {
	n := 0
	for _, e := range events {
		n += w.count(e)
	}
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, seconds(at))
	b = msgp.AppendArrayHeader(b, uint32(n))
	for _, e := range events {
		b = w.event(b, e)
	}
	return appendInt(b, int64(rank))
}

// seconds is a time as Python's time.time().
func seconds(at time.Time) float64 { return float64(at.UnixNano()) / 1e9 }

// count returns the number of vLLM's events: each removed block has its own event.
func (vllmWire) count(e kvEvent) int {
	if e.kind == kvRemoved {
		return len(e.names)
	}
	return 1
}

func (w vllmWire) event(b []byte, e kvEvent) []byte {
	switch e.kind {
	case kvRemoved:
		for _, name := range e.names {
			b = w.open(b, "BlockRemoved", 3)
			b = w.hashes(w.key(b, "block_hashes"), []blockName{name})
			b = msgp.AppendString(w.key(b, "medium"), mediumGPU)
			b = appendInt(w.key(b, "group_idx"), 0)
		}
		return b
	case kvCleared:
		return w.open(b, "AllBlocksCleared", 0)
	}
	b = w.open(b, "BlockStored", 9)
	b = w.hashes(w.key(b, "block_hashes"), e.names)
	if b = w.key(b, "parent_block_hash"); e.root {
		b = msgp.AppendNil(b)
	} else {
		b = w.hash(b, e.parent)
	}
	b = appendTokens(w.key(b, "token_ids"), e.tokens)
	b = appendInt(w.key(b, "block_size"), int64(e.size))
	b = msgp.AppendNil(w.key(b, "lora_id"))
	b = msgp.AppendString(w.key(b, "medium"), mediumGPU)
	if _, adapter, ok := strings.Cut(e.salt, loraKey); ok {
		b = msgp.AppendString(w.key(b, "lora_name"), adapter)
	} else {
		b = msgp.AppendNil(w.key(b, "lora_name"))
	}
	b = w.extraKeys(w.key(b, "extra_keys"), e)
	return appendInt(w.key(b, "group_idx"), 0)
}

// open begins an event of n fields besides its tag.
func (w vllmWire) open(b []byte, tag string, n uint32) []byte {
	if w.arrays {
		return msgp.AppendString(msgp.AppendArrayHeader(b, n+1), tag)
	}
	return msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, n+1), "type"), tag)
}

func (w vllmWire) key(b []byte, name string) []byte {
	if w.arrays {
		return b
	}
	return msgp.AppendString(b, name)
}

func (w vllmWire) hashes(b []byte, names []blockName) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(names)))
	for _, name := range names {
		b = w.hash(b, name)
	}
	return b
}

// hash writes a digest, or its last 8 bytes as an unsigned integer
// (maybe_convert_block_hash in vllm/v1/core/kv_cache_utils.py).
func (w vllmWire) hash(b []byte, name blockName) []byte {
	if w.digests {
		return msgp.AppendBytes(b, name[:])
	}
	return msgp.AppendUint64(b, binary.BigEndian.Uint64(name[24:]))
}

// extraKeys writes an entry for each block: its LoRA adapter, and the salt for the first block
// of a chain; nil without either. Source: vLLM v1/core/kv_cache_utils.py,
// generate_block_hash_extra_keys.
func (vllmWire) extraKeys(b []byte, e kvEvent) []byte {
	salt, adapter, _ := strings.Cut(e.salt, loraKey)
	b = msgp.AppendArrayHeader(b, uint32(len(e.names)))
	for i := range e.names {
		var keys []string
		if adapter != "" {
			keys = append(keys, adapter)
		}
		if i == 0 && e.root && salt != "" {
			keys = append(keys, salt)
		}
		if keys == nil {
			b = msgp.AppendNil(b)
			continue
		}
		b = msgp.AppendArrayHeader(b, uint32(len(keys)))
		for _, key := range keys {
			b = msgp.AppendString(b, key)
		}
	}
	return b
}

// appendInt writes an integer in its shortest form, as msgspec does: unsigned
// unless it is negative.
func appendInt(b []byte, v int64) []byte {
	if v < 0 {
		return msgp.AppendInt64(b, v)
	}
	return msgp.AppendUint64(b, uint64(v))
}

func appendTokens(b []byte, tokens []token) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, t := range tokens {
		b = msgp.AppendUint32(b, uint32(t))
	}
	return b
}

// sglangNaming is SGLang's page hash: SHA-256 over the previous digest, absent
// for the first page, and over each token as 4 little-endian bytes
// (srt/mem_cache/utils.py, get_hash_str; compute_node_event_hash_values for
// salts).
type sglangNaming struct{}

func (sglangNaming) root(salt string) blockName {
	if salt == "" {
		return blockName{}
	}
	return sha256.Sum256([]byte("sglang-cache-salt-v1\x00" + salt))
}

func (sglangNaming) next(parent blockName, first bool, salt string, tokens []token, _ blockHash) blockName {
	var b []byte
	if !first || salt != "" {
		b = append(b, parent[:]...)
	}
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	return sha256.Sum256(b)
}

// sglangWire is SGLang's EventBatch (srt/disaggregation/kv_events.py): all
// values are arrays, none shortened. An event with a salt has an additional map
// at its end. Hashes are the first 8 bytes of the digest as a signed integer.
func sglangWire(at time.Time, rank int, events []kvEvent) []byte {
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, seconds(at))
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for _, e := range events {
		b = sglangEvent(b, e)
	}
	return appendInt(b, int64(rank))
}

func sglangEvent(b []byte, e kvEvent) []byte {
	switch e.kind {
	case kvRemoved:
		b = msgp.AppendString(msgp.AppendArrayHeader(b, 3), "BlockRemoved")
		return msgp.AppendString(sglangHashes(b, e.names), mediumGPU)
	case kvCleared:
		return msgp.AppendString(msgp.AppendArrayHeader(b, 1), "AllBlocksCleared")
	}
	fields := uint32(7)
	if e.salt != "" {
		fields++
	}
	b = msgp.AppendString(msgp.AppendArrayHeader(b, fields), "BlockStored")
	b = sglangHashes(b, e.names)
	if e.root {
		b = msgp.AppendNil(b)
	} else {
		b = appendInt(b, sglangHash(e.parent))
	}
	b = appendTokens(b, e.tokens)
	b = appendInt(b, int64(e.size))
	b = msgp.AppendNil(b)
	b = msgp.AppendString(b, mediumGPU)
	if e.salt != "" {
		b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 1), "cache_salt"), e.salt)
	}
	return b
}

func sglangHashes(b []byte, names []blockName) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(names)))
	for _, name := range names {
		b = appendInt(b, sglangHash(name))
	}
	return b
}

func sglangHash(name blockName) int64 { return int64(binary.BigEndian.Uint64(name[:])) }
