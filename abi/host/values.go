// Package host runs WebAssembly guests on wazero. It compiles modules, makes
// instances (VMs), provides the host functions of proxy-wasm 0.1.0, 0.2.0 and
// 0.2.1 and of WASI, and calls the guests' callbacks and hooks. A guest reaches
// the world outside its memory through the embedder's Env. Source of every
// number and signature: proxy-wasm/spec, abi-versions/v0.2.1 and v0.1.0.
//
// The decisions behind this package are in docs/design/plugins.md.
package host

// Status is the answer of a host function to the guest.
type Status uint32

// The statuses of proxy-wasm. Hosts do not use the others.
const (
	OK                   Status = 0
	NotFound             Status = 1
	BadArgument          Status = 2
	SerializationFailure Status = 3
	ParseFailure         Status = 4
	InvalidMemoryAccess  Status = 6
	Empty                Status = 7
	CASMismatch          Status = 8
	InternalFailure      Status = 10
	BrokenConnection     Status = 11
	Unimplemented        Status = 12
)

// LogLevel is the level of a guest's log line.
type LogLevel uint32

// The log levels.
const (
	LogTrace LogLevel = iota
	LogDebug
	LogInfo
	LogWarn
	LogError
	LogCritical
)

// Action is the answer of a stream callback. Numbers above Pause are Envoy's
// own filter statuses, which the host passes on unchanged.
type Action uint32

// The actions of the specification.
const (
	Continue Action = 0
	Pause    Action = 1
)

// BufferKind names a buffer.
type BufferKind uint32

// The buffers.
const (
	HTTPRequestBody BufferKind = iota
	HTTPResponseBody
	DownstreamData
	UpstreamData
	HTTPCallResponseBody
	GRPCCallMessage
	VMConfiguration
	PluginConfiguration
	ForeignFunctionArguments
)

// MapKind names a header map.
type MapKind uint32

// The maps.
const (
	HTTPRequestHeaders MapKind = iota
	HTTPRequestTrailers
	HTTPResponseHeaders
	HTTPResponseTrailers
	GRPCCallInitialMetadata
	GRPCCallTrailingMetadata
	HTTPCallResponseHeaders
	HTTPCallResponseTrailers
)

// StreamKind names a direction of a stream.
type StreamKind uint32

// The directions.
const (
	HTTPRequest StreamKind = iota
	HTTPResponse
	Downstream
	Upstream
)

// MetricKind is the type of a metric.
type MetricKind uint32

// The metric types.
const (
	Counter MetricKind = iota
	Gauge
	Histogram
)
