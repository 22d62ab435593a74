//go:build !fleetnext

package fleetpb

import (
	"slices"

	"google.golang.org/protobuf/proto"
)

// Append appends the encoding of m, a message of fleet.proto.
func Append(dst []byte, m proto.Message) []byte {
	b, err := proto.MarshalOptions{}.MarshalAppend(dst, m)
	if err != nil {
		panic("encode " + string(m.ProtoReflect().Descriptor().Name()) + ": " + err.Error())
	}
	return b
}

// AppendFast is Append for a message of place.proto, whose texts may be any bytes.
func AppendFast(dst []byte, m fast) []byte {
	size := m.SizeVT()
	dst = slices.Grow(dst, size)
	_, _ = m.MarshalToSizedBufferVT(dst[len(dst) : len(dst)+size]) // fails for no message
	return dst[:len(dst)+size]
}
