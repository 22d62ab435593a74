// Package vllmgrpc reads the messages of vLLM's two gRPC services: vllm.Inference of its Rust front
// end (vllm rust/proto/inference.proto; vllm.Generate before July 2026), and
// vllm.grpc.engine.VllmEngine of vllm serve --grpc (smg crates/grpc_client/proto/vllm_engine.proto).
// It turns a request into the body of the HTTP API that asks for the same, and an answer into an
// answer of this API, as far as placement and records need them. The messages for the engine and for
// the client stay as they are.
//
// The decisions behind this package are in docs/design/gateway.md.
package vllmgrpc

import (
	"encoding/binary"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Method is a method of a service that computes an answer. The zero value is none.
type Method uint8

// The methods.
const (
	EngineGenerate Method = iota + 1 // of VllmEngine; a stream if the request asks for one
	EngineEmbed                      // of VllmEngine
	Generate                         // of Inference: one message
	GenerateStream                   // of Inference: a stream
)

// methods are the paths of the methods.
var methods = map[string]Method{
	"/vllm.grpc.engine.VllmEngine/Generate": EngineGenerate,
	"/vllm.grpc.engine.VllmEngine/Embed":    EngineEmbed,
	"/vllm.Inference/Generate":              Generate,
	"/vllm.Inference/GenerateStream":        GenerateStream,
	"/vllm.Generate/Generate":               Generate,
	"/vllm.Generate/GenerateStream":         GenerateStream,
}

// MethodOf returns the method at the end of a path; 0 for any other path.
func MethodOf(path string) Method {
	before, name, _ := cutLast(path)
	_, service, _ := cutLast(before)
	return methods["/"+service+"/"+name]
}

func cutLast(path string) (before, after string, found bool) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return "", path, false
	}
	return path[:i], path[i+1:], true
}

// IsGRPC reports whether a Content-Type is that of gRPC.
func IsGRPC(contentType string) bool {
	rest, ok := strings.CutPrefix(contentType, "application/grpc")
	return ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// API returns the HTTP API that does the same.
func (m Method) API() openai.API {
	if m == EngineEmbed {
		return openai.Embeddings
	}
	return openai.Completions
}

// frameHead is the length of the head of a message: a flag for compression, and the length. Source:
// grpc doc/PROTOCOL-HTTP2.md, Length-Prefixed-Message.
const frameHead = 5

// message returns the only message of a body.
func message(body []byte) ([]byte, error) {
	switch {
	case len(body) < frameHead:
		return nil, errMalformed
	case body[0] != 0:
		return nil, openai.NewError(openai.CodeUnsupportedContentEncoding, "the proxy does not read compressed gRPC messages")
	case uint64(binary.BigEndian.Uint32(body[1:])) != uint64(len(body)-frameHead):
		return nil, errMalformed
	}
	return body[frameHead:], nil
}

var errMalformed = openai.NewError(openai.CodeInvalidType, "the gRPC message is malformed, or not the only one of the call")
