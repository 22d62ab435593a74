package kvevents

import (
	"errors"
	"strconv"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// The errors of a batch and of an event.
var (
	errBatch = errors.New("read batch: neither an array nor a map of events")
	errEvent = errors.New("read event: not a tagged array or map")
	errField = errors.New("read event: a field has another type")
)

// batches decodes the payloads that vLLM and SGLang publish, and passes their events to
// one target's feed. It reuses all its memory: it allocates only if an event is longer
// than all before, or has another LoRA or salt than the last one. Source: vLLM
// vllm/distributed/kv_events.py, SGLang srt/disaggregation/kv_events.py.
type batches struct {
	to     feed
	filter eventFilter

	blocks    int // blocks stored, removed or moved so far
	refused   int // stored blocks for which the index had no room
	malformed int // events that could not be read so far

	e    event
	lora string // the last LoRA and salt, to avoid an allocation
	salt string
}

// event is one decoded event.
type event struct {
	tag       tag
	stored    kvindex.Stored
	group     group
	remote    bool   // the blocks are not in the engine itself
	mooncake  bool   // from vLLM's MooncakeStoreConnector
	loraID    uint64 // from engines that do not send the name; 0 none
	extraKeys []byte // raw: their meaning depends on other fields
}

type tag uint8

const (
	tagUnknown tag = iota
	tagStored
	tagRemoved
	tagCleared
)

func tagOf(name []byte) tag {
	switch string(name) {
	case "BlockStored":
		return tagStored
	case "BlockRemoved":
		return tagRemoved
	case "AllBlocksCleared":
		return tagCleared
	}
	return tagUnknown
}

// decode applies a batch: [ts, events, rank], or a map with the same members. It
// ignores the rank, because each rank has its own socket. An event that cannot be read
// is skipped and counted. An error means that the batch ended too early, or may have
// removed unknown blocks. The events before the error are applied.
func (d *batches) decode(b []byte) (err error) {
	var n uint32
	switch msgp.NextType(b) {
	case msgp.ArrayType:
		if n, b, err = msgp.ReadArrayHeaderBytes(b); err != nil {
			return err
		}
		if n < 2 {
			return errBatch
		}
		if b, err = msgp.Skip(b); err != nil {
			return err
		}
		_, err = d.events(b)
		return err
	case msgp.MapType:
		if n, b, err = msgp.ReadMapHeaderBytes(b); err != nil {
			return err
		}
		for ; n > 0; n-- {
			var key []byte
			if key, b, err = msgp.ReadStringZC(b); err != nil {
				return err
			}
			if string(key) == "events" {
				_, err = d.events(b)
				return err
			}
			if b, err = msgp.Skip(b); err != nil {
				return err
			}
		}
	}
	return errBatch
}

func (d *batches) events(b []byte) ([]byte, error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var rest []byte
		if rest, err = d.event(b); err == nil {
			b = rest
			d.apply()
			continue
		}
		lost := d.e.tag == tagRemoved || d.e.tag == tagCleared
		d.malformed++
		if rest, skip := msgp.Skip(b); skip == nil && !lost {
			b, err = rest, nil
		}
	}
	return b, err
}

// The fields of an event, in the order of the array forms.
type field uint8

const (
	fieldOther field = iota
	fieldHashes
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldLoraID
	fieldMedium
	fieldLoraName
	fieldExtraKeys
	fieldGroup
	fieldSpecKind
	fieldLocality
	fieldSalt // SGLang from 0.5.20 on
	fieldType
)

var storedFields = [...]field{fieldHashes, fieldParent, fieldTokens, fieldBlockSize, fieldLoraID, fieldMedium,
	fieldLoraName, fieldExtraKeys, fieldGroup, fieldSpecKind, fieldOther, fieldLocality}

var removedFields = [...]field{fieldHashes, fieldMedium, fieldGroup, fieldLocality}

func fieldOf(key []byte) field {
	switch string(key) {
	case "type":
		return fieldType
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldBlockSize
	case "lora_id":
		return fieldLoraID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoraName
	case "extra_keys":
		return fieldExtraKeys
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldSpecKind
	case "locality":
		return fieldLocality
	case "cache_salt":
		return fieldSalt
	}
	return fieldOther
}

// event decodes one event into d.e.
func (d *batches) event(b []byte) ([]byte, error) {
	s := &d.e.stored
	d.e = event{group: group{noGroup, meritUnknown}, stored: kvindex.Stored{Hashes: s.Hashes[:0], Tokens: s.Tokens[:0]}}
	switch msgp.NextType(b) {
	case msgp.ArrayType:
		return d.arrayEvent(b)
	case msgp.MapType:
		return d.mapEvent(b)
	}
	return b, errEvent
}

func (d *batches) arrayEvent(b []byte) ([]byte, error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil || n == 0 {
		return b, errEvent
	}
	name, b, err := msgp.ReadStringZC(b)
	if err != nil {
		return b, err
	}
	d.e.tag = tagOf(name)
	var fields []field
	switch d.e.tag {
	case tagStored:
		fields = storedFields[:]
	case tagRemoved:
		fields = removedFields[:]
	}
	for i := 0; i < int(n)-1 && err == nil; i++ {
		switch {
		case i >= len(fields):
			b, err = msgp.Skip(b)
		case msgp.NextType(b) == msgp.MapType:
			b, err = d.metadata(b)
		default:
			b, err = d.field(fields[i], b)
		}
	}
	return b, err
}

func (d *batches) mapEvent(b []byte) ([]byte, error) {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			return b, err
		}
		b, err = d.field(fieldOf(key), b)
	}
	return b, err
}

// metadata reads the map that SGLang up to 0.5.19 appends to the fields of a block with a salt.
func (d *batches) metadata(b []byte) ([]byte, error) {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	for ; n > 0 && err == nil; n-- {
		var key, salt []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			return b, err
		}
		if string(key) != "cache_salt" || msgp.NextType(b) != msgp.StrType {
			b, err = msgp.Skip(b)
			continue
		}
		if salt, b, err = msgp.ReadStringZC(b); err == nil {
			d.e.stored.Salt = intern(&d.salt, salt)
		}
	}
	return b, err
}

// field reads one field. Nil means absent.
func (d *batches) field(f field, b []byte) (rest []byte, err error) {
	if msgp.IsNil(b) {
		return msgp.ReadNilBytes(b)
	}
	var text []byte
	s := &d.e.stored
	switch f {
	case fieldHashes:
		s.Hashes, rest, err = appendHashes(s.Hashes, b)
	case fieldParent:
		s.HasParent = true
		s.Parent, rest, err = readHash(b)
	case fieldTokens:
		s.Tokens, rest, err = appendTokens(s.Tokens, b)
	case fieldBlockSize:
		s.BlockTokens, rest, err = msgp.ReadIntBytes(b)
	case fieldLoraID:
		if msgp.NextType(b) == msgp.StrType {
			return d.field(fieldLoraName, b)
		}
		d.e.loraID, rest, err = readHash(b)
	case fieldLoraName:
		if text, rest, err = msgp.ReadStringZC(b); err == nil {
			s.Lora = intern(&d.lora, text)
		}
	case fieldSalt:
		if text, rest, err = msgp.ReadStringZC(b); err == nil {
			s.Salt = intern(&d.salt, text)
		}
	case fieldMedium:
		if text, rest, err = msgp.ReadStringZC(b); err == nil {
			s.Tier = tierOf(text)
			d.e.mooncake = string(text) == "cpu"
		}
	case fieldGroup:
		d.e.group.id, rest, err = msgp.ReadUint64Bytes(b)
	case fieldSpecKind:
		if text, rest, err = msgp.ReadStringZC(b); err == nil {
			d.e.group.merit = meritOf(text)
		}
	case fieldLocality:
		if text, rest, err = msgp.ReadStringZC(b); err == nil {
			d.e.remote = string(text) == "REMOTE"
		}
	case fieldType:
		if text, rest, err = msgp.ReadStringZC(b); err == nil {
			d.e.tag = tagOf(text)
		}
	default:
		rest, err = msgp.Skip(b)
		if f == fieldExtraKeys && err == nil {
			d.e.extraKeys = b[:len(b)-len(rest)]
		}
	}
	return rest, err
}

// apply passes the event to the feed if it counts.
func (d *batches) apply() {
	e, s := &d.e, &d.e.stored
	if e.remote {
		s.Tier = kvindex.Disk
	}
	switch e.tag {
	case tagStored:
		d.store()
	case tagRemoved:
		if d.filter.counts(e.group.id) && len(s.Hashes) > 0 {
			d.to.Removed(s.Tier, s.Hashes)
			d.blocks += len(s.Hashes)
		}
	case tagCleared:
		d.to.Cleared()
	}
}

func (d *batches) store() {
	e, s := &d.e, &d.e.stored
	if s.Lora == "" && e.loraID != 0 {
		s.Lora = intern(&d.lora, strconv.AppendUint([]byte("lora id "), e.loraID, 10))
	}
	if e.mooncake && !s.HasParent {
		// MooncakeStoreConnector names no parent for the first block of a store,
		// wherever in the prompt the block is. The engine's own events have named it.
		s.Tokens, s.BlockTokens = s.Tokens[:0], 0
	}
	n, err := d.plain(e.extraKeys, len(s.Hashes))
	if err != nil {
		d.malformed++
		return
	}
	if len(s.Tokens) > 0 {
		// If there are fewer hashes than blocks of tokens, some blocks are missing, as
		// behind a sliding window, and the event does not say which.
		if s.BlockTokens <= 0 || s.BlockTokens > len(s.Tokens) || len(s.Hashes)*s.BlockTokens != len(s.Tokens) {
			return
		}
		s.Tokens = s.Tokens[:n*s.BlockTokens]
	}
	s.Hashes = s.Hashes[:n]
	if n > 0 && d.filter.admit(e.group, s, d.to) {
		applied, refused := d.to.Stored(s)
		d.blocks += applied
		d.refused += refused
	}
}

// plain reads vLLM's extra keys. There is one entry for each block: nil, or a list of
// the LoRA's name, the images and similar inputs in the block (name and offset; only
// the name before 2026-03), the salt if the block is the prompt's first, and the digest
// of embeddings. It returns how many of the n blocks, from the first on, are determined
// by their tokens alone. Source: vLLM v1/core/kv_cache_utils.py
// generate_block_hash_extra_keys.
func (d *batches) plain(keys []byte, n int) (int, error) {
	if keys == nil {
		return n, nil
	}
	entries, b, err := msgp.ReadArrayHeaderBytes(keys)
	for i := 0; i < int(entries) && err == nil; i++ {
		if msgp.IsNil(b) {
			b = b[1:]
			continue
		}
		var plain bool
		if plain, b, err = d.plainBlock(b, i == 0 && !d.e.stored.HasParent); err == nil && !plain {
			if int(entries) != n {
				return 0, nil
			}
			return min(i, n), nil
		}
	}
	return n, err
}

// plainBlock reads the entry of one block.
func (d *batches) plainBlock(b []byte, first bool) (plain bool, rest []byte, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	plain = true
	for i := uint32(0); i < n && err == nil; i++ {
		if msgp.NextType(b) != msgp.StrType {
			plain = false
			b, err = msgp.Skip(b)
			continue
		}
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			break
		}
		switch s := &d.e.stored; {
		case i == 0 && string(key) == s.Lora:
		case first && s.Salt == "":
			s.Salt = intern(&d.salt, key)
		default:
			plain = false
		}
	}
	return plain, b, err
}

// Values of a group's merit, by the part of a prefix that its layers need: only the end of the
// prefix, unknown, or the whole prefix.
const (
	meritPart uint32 = iota
	meritUnknown
	meritAll
)
