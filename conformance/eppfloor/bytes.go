package main

import (
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // for health checks
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
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

// prepared is the endpoint.
type prepared string

// process is the handler of grpc.StreamDesc.
func (p prepared) process(_ any, g grpc.ServerStream) error {
	decision, err := proto.Marshal((&decoded{endpoint: string(p)}).decision())
	if err != nil {
		return err
	}
	for {
		var in frame
		if err := g.RecvMsg(&in); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		raw := in.parts.MaterializeToBuffer(mem.DefaultBufferPool())
		in.parts.Free()
		out, err := answer(raw.ReadOnlyData(), decision)
		if err == nil {
			err = g.SendMsg(&frame{mem.BufferSlice{mem.SliceBuffer(out)}})
		}
		raw.Free()
		if err != nil {
			return err
		}
	}
}

// answer returns the answer to a message. It fails for a message without a known field.
func answer(raw, decision []byte) ([]byte, error) {
	for len(raw) > 0 {
		number, kind, n := protowire.ConsumeTag(raw)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		raw = raw[n:]
		size := protowire.ConsumeFieldValue(number, kind, raw)
		if size < 0 {
			return nil, protowire.ParseError(size)
		}
		switch number {
		case requestHeaders:
			return decision, nil
		case requestBody, responseBody:
			value, _ := protowire.ConsumeBytes(raw)
			return body(number-1, value), nil
		case responseHeaders, requestTrailers, responseTrailers:
			return protowire.AppendBytes(protowire.AppendTag(nil, number-1, protowire.BytesType), nil), nil
		}
		raw = raw[size:]
	}
	return nil, fmt.Errorf("a message without a part of a request or an answer")
}

// body returns a part of a body to the gateway. HttpBody and StreamedBodyResponse have the same
// fields, so it is copied in three more messages: BodyResponse (response = 1), CommonResponse
// (body_mutation = 3) and BodyMutation (streamed_response = 3).
func body(number protowire.Number, part []byte) []byte {
	const room = 40
	mutation := protowire.SizeTag(3) + protowire.SizeBytes(len(part))
	common := protowire.SizeTag(3) + protowire.SizeBytes(mutation)
	response := protowire.SizeTag(1) + protowire.SizeBytes(common)
	b := make([]byte, 0, len(part)+room)
	for _, level := range []struct {
		number protowire.Number
		size   int
	}{{number, response}, {1, common}, {3, mutation}, {3, len(part)}} {
		b = protowire.AppendVarint(protowire.AppendTag(b, level.number, protowire.BytesType), uint64(level.size))
	}
	return append(b, part...)
}
