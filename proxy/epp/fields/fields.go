// Package fields reads the fields of an encoded protobuf message without the generated code, which
// copies them.
//
// The decisions behind this package are in docs/design/gateway.md.
package fields

import "google.golang.org/protobuf/encoding/protowire"

// Each calls each for the fields of a message that are a varint or have a length, in the order
// of the bytes. value is the content of a field with a length, else nil; n is the varint. It
// reports false if the message is malformed or each reports false.
func Each(raw []byte, each func(number protowire.Number, value []byte, n uint64) bool) bool {
	for len(raw) > 0 {
		number, kind, n := protowire.ConsumeTag(raw)
		if n < 0 {
			return false
		}
		raw = raw[n:]
		var value []byte
		var varint uint64
		switch kind {
		case protowire.BytesType:
			value, n = protowire.ConsumeBytes(raw)
		case protowire.VarintType:
			varint, n = protowire.ConsumeVarint(raw)
		default:
			n = protowire.ConsumeFieldValue(number, kind, raw)
		}
		if n < 0 || (kind == protowire.BytesType || kind == protowire.VarintType) && !each(number, value, varint) {
			return false
		}
		raw = raw[n:]
	}
	return true
}
