// Package fleetpb has the messages between pdproxy's processes, generated from its .proto files
// by `make proto`.
//
// The decisions behind this package are in docs/design/fleet.md.
package fleetpb

import (
	"errors"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// small is the size in bytes up to which a message is decoded without a count of its records.
// The largest record takes about 500 bytes of memory for 2 bytes of a message.
const small = 64 << 10

var errRecords = errors.New("message with too many records")

// fast is a message of place.proto.
type fast interface {
	proto.Message
	UnmarshalVTUnsafe(b []byte) error
	SizeVT() int
	MarshalToSizedBufferVT(b []byte) (int, error)
}

// Unmarshal decodes b into m, which must be empty. It decodes nothing if b has more than most
// nested messages and members of lists. So a peer cannot make this process allocate much more
// memory than the peer sends.
func Unmarshal(b []byte, m proto.Message, most int) error {
	if err := check(b, m, most); err != nil {
		return err
	}
	return proto.Unmarshal(b, m)
}

// UnmarshalView is Unmarshal for a message of place.proto. The texts of m alias b.
func UnmarshalView(b []byte, m fast, most int) error {
	if err := check(b, m, most); err != nil {
		return err
	}
	return m.UnmarshalVTUnsafe(b)
}

func check(b []byte, m proto.Message, most int) error {
	if len(b) <= small {
		return nil
	}
	return count(b, m.ProtoReflect().Descriptor(), &most)
}

// count subtracts the records of b from left.
func count(b []byte, d protoreflect.MessageDescriptor, left *int) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
			return protowire.ParseError(n)
		}
		f := d.Fields().ByNumber(number)
		if f != nil && kind == protowire.BytesType && (f.Message() != nil || f.IsList() && !f.IsPacked()) {
			if *left--; *left < 0 {
				return errRecords
			}
			if f.Message() != nil {
				value, _ := protowire.ConsumeBytes(b)
				if err := count(value, f.Message(), left); err != nil {
					return err
				}
			}
		}
		b = b[n:]
	}
	return nil
}
