package shared

import (
	"encoding/binary"

	"github.com/pdproxy/pdproxy/abi/host"
)

// Conversations stores a small value for each conversation. All plugins share
// it. It is safe for concurrent use.
type Conversations interface {
	// Value appends the value of a key to dst.
	Value(dst []byte, key string) (value []byte, ok bool)
	// SetValue stores a copy of value. It returns an error when the value is
	// too long.
	SetValue(key string, value []byte) error
}

// ConversationGet is the foreign function of that name. It reads from c; nil
// has no values.
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

// ConversationPut is the foreign function of that name. It writes to c; nil
// stores nothing.
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
