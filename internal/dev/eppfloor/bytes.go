package main

import (
	"cmp"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // for health checks
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// frame is a message as bytes.
type frame struct{ parts mem.BufferSlice }

// codec passes frames through, and leaves other messages to protobuf.
type codec struct{}

// Name implements encoding.CodecV2.
func (codec) Name() string { return "proto" }

// Marshal implements encoding.CodecV2. grpc-go gets the references of a frame.
func (codec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(*frame); ok {
		return f.parts, nil
	}
	return encoding.GetCodecV2("proto").Marshal(v)
}

// Unmarshal implements encoding.CodecV2. The frame gets references of its own.
func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	if f, ok := v.(*frame); ok {
		data.Ref()
		f.parts = data
		return nil
	}
	return encoding.GetCodecV2("proto").Unmarshal(data, v)
}

// Field numbers of ProcessingRequest: envoy/service/ext_proc/v3/external_processor.proto.
// ProcessingResponse has its oneof one number below.
const (
	requestHeaders   = 2
	responseHeaders  = 3
	requestBody      = 4
	responseBody     = 5
	requestTrailers  = 6
	responseTrailers = 7
)

// prepared is the encoded decision.
type prepared []byte

// process is the handler of grpc.StreamDesc. It sends the fewest messages that a gateway accepts:
// the decision when the request is whole, the header of the answer, and each body in one message.
func (p prepared) process(_ any, g grpc.ServerStream) error {
	send := func(out []byte) error { return g.SendMsg(&frame{mem.BufferSlice{mem.SliceBuffer(out)}}) }
	var whole []byte // the body of the request, then that of the answer
	for {
		var in frame
		if err := g.RecvMsg(&in); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		raw := in.parts.MaterializeToBuffer(mem.DefaultBufferPool())
		in.parts.Free()
		number, content := kindOf(raw.ReadOnlyData())
		var err error
		switch number {
		case requestHeaders:
			if _, over := field(content, 3); over == 1 {
				err = send(p)
			}
		case requestBody, responseBody:
			part, _ := field(content, 1)
			_, over := field(content, 2)
			if whole = append(whole, part...); over == 1 {
				if number == requestBody {
					err = send(p)
				}
				err = cmp.Or(err, send(body(number-1, whole)))
				whole = whole[:0]
			}
		case responseHeaders:
			err = send(protowire.AppendBytes(protowire.AppendTag(nil, number-1, protowire.BytesType), nil))
		default:
			err = errors.New("trailers, or no part of a request or an answer")
		}
		raw.Free()
		if err != nil {
			return err
		}
	}
}

// kindOf returns the field of the oneof that the message has, with its content; 0 for none.
func kindOf(raw []byte) (protowire.Number, []byte) {
	for number := protowire.Number(requestHeaders); number <= responseTrailers; number++ {
		if content, _ := field(raw, number); content != nil {
			return number, content
		}
	}
	return 0, nil
}

// field returns a field of a message, as bytes or as a varint.
func field(raw []byte, want protowire.Number) (content []byte, n uint64) {
	for len(raw) > 0 {
		number, kind, size := protowire.ConsumeTag(raw)
		if size < 0 {
			return nil, 0
		}
		raw = raw[size:]
		if size = protowire.ConsumeFieldValue(number, kind, raw); size < 0 {
			return nil, 0
		}
		switch {
		case number == want && kind == protowire.BytesType:
			content, _ = protowire.ConsumeBytes(raw)
			return content, 0
		case number == want:
			n, _ = protowire.ConsumeVarint(raw)
			return nil, n
		}
		raw = raw[size:]
	}
	return nil, 0
}

// body returns a body to the gateway, with its end: BodyResponse (response = 1), CommonResponse
// (body_mutation = 3), BodyMutation (streamed_response = 3) and StreamedBodyResponse (body = 1,
// end_of_stream = 2).
func body(number protowire.Number, whole []byte) []byte {
	const room = 48
	streamed := protowire.SizeTag(1) + protowire.SizeBytes(len(whole)) + protowire.SizeTag(2) + protowire.SizeVarint(1)
	mutation := protowire.SizeTag(3) + protowire.SizeBytes(streamed)
	common := protowire.SizeTag(3) + protowire.SizeBytes(mutation)
	response := protowire.SizeTag(1) + protowire.SizeBytes(common)
	b := make([]byte, 0, len(whole)+room)
	for _, level := range []struct {
		number protowire.Number
		size   int
	}{{number, response}, {1, common}, {3, mutation}, {3, streamed}} {
		b = protowire.AppendVarint(protowire.AppendTag(b, level.number, protowire.BytesType), uint64(level.size))
	}
	b = protowire.AppendBytes(protowire.AppendTag(b, 1, protowire.BytesType), whole)
	return protowire.AppendVarint(protowire.AppendTag(b, 2, protowire.VarintType), 1)
}
