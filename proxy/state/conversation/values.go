package conversation

import (
	"errors"
	"sync"

	"github.com/zeebo/xxh3"
)

const (
	// MaxValue is the largest value in bytes.
	MaxValue = 64
	// BytesPerValue is the approximate memory of one value.
	BytesPerValue = 128
)

// ErrValueSize reports that a value is longer than MaxValue.
var ErrValueSize = errors.New("conversation: value of more than 64 bytes")

// values has the values that policies store, by any key.
type values struct {
	mu       sync.Mutex
	capacity int
	numbers  map[uint64]uint32 // by the hash of the key; guarded by mu
	entries  []value           // the first is the list's head; guarded by mu
	list     lru               // guarded by mu
}

type value struct {
	hash uint64
	size uint8
	data [MaxValue]byte
}

func newValues(capacity int) values {
	return values{capacity: capacity, numbers: map[uint64]uint32{}, entries: make([]value, 1), list: newLRU(1)}
}

// Value appends the value that SetValue stored under a key, such as the text of a
// conversation's Key. False: there is no value. Values are independent of turns: a value
// may be set before the first turn is recorded. A table stores as many values as
// conversations, and drops the least recently used value.
func (t *Table) Value(dst []byte, key string) (value []byte, ok bool) {
	v := &t.values
	hash := xxh3.HashString(key)
	v.mu.Lock()
	defer v.mu.Unlock()
	n, ok := v.numbers[hash]
	if !ok {
		return dst, false
	}
	v.list.drop(n)
	v.list.push(0, n)
	e := &v.entries[n]
	return append(dst, e.data[:e.size]...), true
}

// SetValue stores a copy of a value, which may be empty, under a key. It replaces the
// value that was there. The error is ErrValueSize.
func (t *Table) SetValue(key string, data []byte) error {
	if len(data) > MaxValue {
		return ErrValueSize
	}
	v := &t.values
	hash := xxh3.HashString(key)
	v.mu.Lock()
	defer v.mu.Unlock()
	n, known := v.numbers[hash]
	switch {
	case known:
		v.list.drop(n)
	case len(v.entries) <= v.capacity:
		n = uint32(len(v.entries))
		v.entries = grow(v.entries, v.capacity+1)
		v.list.links = grow(v.list.links, v.capacity+1)
	default:
		n = v.list.oldest(0)
		v.list.drop(n)
		delete(v.numbers, v.entries[n].hash)
	}
	if !known {
		v.numbers[hash] = n
	}
	v.list.push(0, n)
	e := &v.entries[n]
	e.hash, e.size = hash, uint8(copy(e.data[:], data))
	return nil
}
