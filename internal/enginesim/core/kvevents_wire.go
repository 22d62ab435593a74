package core

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// mediumGPU is the only memory tier of the simulator's events.
const mediumGPU = "GPU"

// KVWire writes a batch of events as an engine does.
type KVWire func(at time.Time, rank int, events []KVEvent) []byte

// VLLMNaming names blocks as an engine without PYTHONHASHSEED: with digests
// that no other process can compute and that change with each start.
type VLLMNaming struct{ Seed string }

func (VLLMNaming) Root(string) BlockName { return BlockName{} }

func (n VLLMNaming) Next(_ BlockName, _ bool, _ string, _ []Token, hash BlockHash) BlockName {
	return sha256.Sum256(binary.BigEndian.AppendUint64([]byte(n.Seed), uint64(hash)))
}

// VLLMWire is vLLM's EventBatch (vllm/distributed/kv_events.py): an array of
// time, events and rank. Events are maps with the key "type", or arrays. Maps
// omit fields with default values; arrays omit them only at the end.
type VLLMWire struct{ Arrays, Digests bool }

func (w VLLMWire) Batch(at time.Time, rank int, events []KVEvent) []byte {
	n := 0
	for _, e := range events {
		n += w.count(e)
	}
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, seconds(at))
	b = msgp.AppendArrayHeader(b, uint32(n))
	for _, e := range events {
		b = w.Event(b, e)
	}
	return AppendInt(b, int64(rank))
}

// seconds is a time as Python's time.time().
func seconds(at time.Time) float64 { return float64(at.UnixNano()) / 1e9 }

// count returns the number of vLLM's events: each removed block has its own event.
func (VLLMWire) count(e KVEvent) int {
	if e.Kind == KVRemoved {
		return len(e.Names)
	}
	return 1
}

func (w VLLMWire) Event(b []byte, e KVEvent) []byte {
	switch e.Kind {
	case KVRemoved:
		for _, name := range e.Names {
			b = w.open(b, "BlockRemoved", 3)
			b = w.hashes(w.key(b, "block_hashes"), []BlockName{name})
			b = msgp.AppendString(w.key(b, "medium"), mediumGPU)
			b = AppendInt(w.key(b, "group_idx"), 0)
		}
		return b
	case KVCleared:
		return w.open(b, "AllBlocksCleared", 0)
	}
	b = w.open(b, "BlockStored", 9)
	b = w.hashes(w.key(b, "block_hashes"), e.Names)
	if b = w.key(b, "parent_block_hash"); e.Root {
		b = msgp.AppendNil(b)
	} else {
		b = w.hash(b, e.Parent)
	}
	b = appendTokens(w.key(b, "token_ids"), e.Tokens)
	b = AppendInt(w.key(b, "block_size"), int64(e.Size))
	b = msgp.AppendNil(w.key(b, "lora_id"))
	b = msgp.AppendString(w.key(b, "medium"), mediumGPU)
	if _, adapter, ok := strings.Cut(e.Salt, loraKey); ok {
		b = msgp.AppendString(w.key(b, "lora_name"), adapter)
	} else {
		b = msgp.AppendNil(w.key(b, "lora_name"))
	}
	b = w.extraKeys(w.key(b, "extra_keys"), e)
	return AppendInt(w.key(b, "group_idx"), 0)
}

// open begins an event of n fields besides its tag.
func (w VLLMWire) open(b []byte, tag string, n uint32) []byte {
	if w.Arrays {
		return msgp.AppendString(msgp.AppendArrayHeader(b, n+1), tag)
	}
	return msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, n+1), "type"), tag)
}

func (w VLLMWire) key(b []byte, name string) []byte {
	if w.Arrays {
		return b
	}
	return msgp.AppendString(b, name)
}

func (w VLLMWire) hashes(b []byte, names []BlockName) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(names)))
	for _, name := range names {
		b = w.hash(b, name)
	}
	return b
}

// hash writes a digest, or its last 8 bytes as an unsigned integer
// (maybe_convert_block_hash in vllm/v1/core/kv_cache_utils.py).
func (w VLLMWire) hash(b []byte, name BlockName) []byte {
	if w.Digests {
		return msgp.AppendBytes(b, name[:])
	}
	return msgp.AppendUint64(b, binary.BigEndian.Uint64(name[24:]))
}

// extraKeys writes an entry for each block: its LoRA adapter, and the salt for the first block
// of a chain; nil without either. Source: vLLM v1/core/kv_cache_utils.py,
// generate_block_hash_extra_keys.
func (VLLMWire) extraKeys(b []byte, e KVEvent) []byte {
	salt, adapter, _ := strings.Cut(e.Salt, loraKey)
	b = msgp.AppendArrayHeader(b, uint32(len(e.Names)))
	for i := range e.Names {
		var keys []string
		if adapter != "" {
			keys = append(keys, adapter)
		}
		if i == 0 && e.Root && salt != "" {
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

// AppendInt writes an integer in its shortest form, as msgspec does: unsigned
// unless it is negative.
func AppendInt(b []byte, v int64) []byte {
	if v < 0 {
		return msgp.AppendInt64(b, v)
	}
	return msgp.AppendUint64(b, uint64(v))
}

func appendTokens(b []byte, tokens []Token) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, t := range tokens {
		b = msgp.AppendUint32(b, uint32(t))
	}
	return b
}

// SGLangNaming is SGLang's page hash: SHA-256 over the previous digest, absent
// for the first page, and over each token as 4 little-endian bytes
// (srt/mem_cache/utils.py, get_hash_str; compute_node_event_hash_values for
// salts).
type SGLangNaming struct{}

func (SGLangNaming) Root(salt string) BlockName {
	if salt == "" {
		return BlockName{}
	}
	return sha256.Sum256([]byte("sglang-cache-salt-v1\x00" + salt))
}

func (SGLangNaming) Next(parent BlockName, first bool, salt string, tokens []Token, _ BlockHash) BlockName {
	var b []byte
	if !first || salt != "" {
		b = append(b, parent[:]...)
	}
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	return sha256.Sum256(b)
}

// SGLangWire is SGLang's EventBatch (srt/disaggregation/kv_events.py): all
// values are arrays, none shortened. An event with a salt has an additional map
// at its end. Hashes are the first 8 bytes of the digest as a signed integer.
func SGLangWire(at time.Time, rank int, events []KVEvent) []byte {
	b := msgp.AppendArrayHeader(nil, 3)
	b = msgp.AppendFloat64(b, seconds(at))
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for _, e := range events {
		b = sglangEvent(b, e)
	}
	return AppendInt(b, int64(rank))
}

func sglangEvent(b []byte, e KVEvent) []byte {
	switch e.Kind {
	case KVRemoved:
		b = msgp.AppendString(msgp.AppendArrayHeader(b, 3), "BlockRemoved")
		return msgp.AppendString(sglangHashes(b, e.Names), mediumGPU)
	case KVCleared:
		return msgp.AppendString(msgp.AppendArrayHeader(b, 1), "AllBlocksCleared")
	}
	fields := uint32(7)
	if e.Salt != "" {
		fields++
	}
	b = msgp.AppendString(msgp.AppendArrayHeader(b, fields), "BlockStored")
	b = sglangHashes(b, e.Names)
	if e.Root {
		b = msgp.AppendNil(b)
	} else {
		b = AppendInt(b, SGLangHash(e.Parent))
	}
	b = appendTokens(b, e.Tokens)
	b = AppendInt(b, int64(e.Size))
	b = msgp.AppendNil(b)
	b = msgp.AppendString(b, mediumGPU)
	if e.Salt != "" {
		b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 1), "cache_salt"), e.Salt)
	}
	return b
}

func sglangHashes(b []byte, names []BlockName) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(names)))
	for _, name := range names {
		b = AppendInt(b, SGLangHash(name))
	}
	return b
}

func SGLangHash(name BlockName) int64 { return int64(binary.BigEndian.Uint64(name[:])) }
