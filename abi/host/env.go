package host

import "time"

// Env is the world of one VM: what its guest can reach outside its own memory.
// The embedder implements it; the host functions call it from inside a guest
// call, so no method may call back into the VM or block. Bytes handed in belong
// to the guest's memory and must be copied to be kept; bytes handed out are
// copied into the guest before the next call. An *HTTPCall and a *LocalResponse
// are the embedder's, but for their bodies, which belong to the guest's memory. Effects on streams (continue,
// close, local responses) take place after the guest call has returned. An Env
// that lets root contexts end late implements RootEnv too.
type Env interface {
	// Log takes one line of the guest's.
	Log(level LogLevel, message string)
	// LogLevel is the lowest level that Log keeps.
	LogLevel() LogLevel

	// VMConfig and PluginConfig are the buffers VM_CONFIGURATION and
	// PLUGIN_CONFIGURATION.
	VMConfig() []byte
	PluginConfig() []byte

	// SetTickPeriod asks for proxy_on_tick of a root context; 0 stops it.
	SetTickPeriod(root uint32, period time.Duration)

	// Stream returns the HTTP stream of a context id; nil for a root context and
	// for one that has ended.
	Stream(ctx uint32) Stream

	// Property looks a property up for a context (a root context has no stream's
	// properties). Values are in Envoy's encoding. NotFound if there is none.
	Property(ctx uint32, path []string) ([]byte, Status)
	SetProperty(ctx uint32, path []string, value []byte) Status

	// SharedData and SetSharedData reach the data of the VM's vm_id. cas is never
	// 0 for a value that is there.
	SharedData(key string) (value []byte, cas uint32, status Status)
	SetSharedData(key string, value []byte, cas uint32) Status

	RegisterQueue(root uint32, name string) uint32                // 0: there are too many
	ResolveQueue(vmID, name string) (queue uint32, status Status) // vmID "": the VM's own
	Enqueue(queue uint32, value []byte) Status
	Dequeue(queue uint32) (value []byte, status Status)

	DefineMetric(kind MetricKind, name string) (id uint32, status Status)
	RecordMetric(id uint32, value uint64) Status
	IncrementMetric(id uint32, delta int64) Status
	Metric(id uint32) (value uint64, status Status)

	// HTTPCall starts a call for a root context. Its answer comes by
	// VM.HTTPCallResponse, never from inside HTTPCall.
	HTTPCall(root uint32, call *HTTPCall) (token uint32, status Status)

	// Foreign calls a foreign function by name on behalf of a context.
	Foreign(ctx uint32, name string, args []byte) (result []byte, status Status)
}

// HTTPCall is proxy_http_call.
type HTTPCall struct {
	Upstream string
	Headers  Pairs  // with :method, :path and :authority
	Body     []byte // a view of guest memory
	Trailers Pairs
	Timeout  time.Duration
}

// LocalResponse is proxy_send_local_response.
type LocalResponse struct {
	Status     uint32
	Details    string
	Body       []byte // a view of guest memory
	Headers    Pairs
	GRPCStatus int32 // outside 0 to 16: none
}

// Stream is one HTTP request with its answer, as its filter sees it. Maps and
// buffers are there only in the callbacks that the specification names.
type Stream interface {
	// Header returns a map of the stream, nil outside its callbacks. Changes to
	// it are made through its methods.
	Header(kind MapKind) HeaderMap
	// Body returns a body buffer; NotFound outside its callbacks.
	Body(kind BufferKind) ([]byte, Status)
	// SetBody replaces length bytes of a body from start on; both are within it.
	SetBody(kind BufferKind, start, length int, value []byte) Status
	Continue(kind StreamKind) Status
	Close(kind StreamKind) Status
	LocalResponse(r *LocalResponse) Status
	// Done says that proxy_done was called for the context; NotFound when
	// nothing waited for it.
	Done() Status
}

// HeaderMap is a mutable, ordered list of header lines. Names compare without
// regard to case and are handed out in lower case; pseudo-headers come first.
type HeaderMap interface {
	Pairs() Pairs
	SetPairs(p Pairs) Status
	Value(key string) (value string, ok bool)
	Add(key, value string) Status
	Replace(key, value string) Status
	Remove(key string) Status
}

// Pairs are header lines in order.
type Pairs []Pair

// Pair is one header line.
type Pair struct{ Key, Value string }
