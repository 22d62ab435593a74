package shared

import (
	"encoding/binary"

	"github.com/pdproxy/pdproxy/abi/host"
)

// Conversations is where plugins keep a small value for a conversation, all of
// them the same one. It is safe for concurrent use.
type Conversations interface {
	// Value appends the value that is kept under a key.
	Value(dst []byte, key string) (value []byte, ok bool)
	// SetValue keeps a copy; the error is that the value is too long.
	SetValue(key string, value []byte) error
}

// ConversationGet is the foreign function of that name, over c; nil: none.
func ConversationGet(c Conversations, args []byte) ([]byte, host.Status) {
	if c == nil {
		return nil, host.NotFound
	}
	if len(args) > host.MaxName {
		return nil, host.NotFound
	}
	value, ok := c.Value(nil, string(args))
	if !ok {
		return nil, host.NotFound
	}
	return value, host.OK
}

// ConversationPut is the foreign function of that name, over c; nil: none.
func ConversationPut(c Conversations, args []byte) ([]byte, host.Status) {
	if c == nil {
		return nil, host.NotFound
	}
	if len(args) < 4 || uint64(binary.LittleEndian.Uint32(args)) > uint64(len(args)-4) {
		return nil, host.BadArgument
	}
	end := 4 + binary.LittleEndian.Uint32(args)
	if end > 4+host.MaxName {
		return nil, host.BadArgument
	}
	if c.SetValue(string(args[4:end]), args[end:]) != nil {
		return nil, host.BadArgument
	}
	return nil, host.OK
}
