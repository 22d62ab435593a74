//go:build fleetnext

package fleetpb

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Append appends m as a later version of the schema may write it: each message, also a nested
// one, has fields that this version does not know. conformance/fleet builds such a program.
func Append(dst []byte, m proto.Message) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		panic("encode " + string(m.ProtoReflect().Descriptor().Name()) + ": " + err.Error())
	}
	return appendNext(dst, b, m.ProtoReflect().Descriptor())
}

// AppendFast is Append for a message of place.proto.
func AppendFast(dst []byte, m fast) []byte {
	b := make([]byte, m.SizeVT())
	_, _ = m.MarshalToSizedBufferVT(b) // fails for no message
	return appendNext(dst, b, m.ProtoReflect().Descriptor())
}

// appendNext appends the encoded message b with an unknown field of each wire type at every depth.
func appendNext(dst, b []byte, d protoreflect.MessageDescriptor) []byte {
	for len(b) > 0 {
		number, kind, tag := protowire.ConsumeTag(b)
		size := tag + protowire.ConsumeFieldValue(number, kind, b[tag:])
		if f := d.Fields().ByNumber(number); f.Message() != nil {
			value, _ := protowire.ConsumeBytes(b[tag:])
			dst = protowire.AppendBytes(protowire.AppendTag(dst, number, kind), appendNext(nil, value, f.Message()))
		} else {
			dst = append(dst, b[:size]...)
		}
		b = b[size:]
	}
	dst = protowire.AppendVarint(protowire.AppendTag(dst, 1000, protowire.VarintType), 1<<63)
	dst = protowire.AppendFixed64(protowire.AppendTag(dst, 1001, protowire.Fixed64Type), 7)
	dst = protowire.AppendFixed32(protowire.AppendTag(dst, 1002, protowire.Fixed32Type), 7)
	return protowire.AppendString(protowire.AppendTag(dst, 1003, protowire.BytesType), "\xff a field of a later version")
}
