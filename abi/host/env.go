package host

import "time"

// Env is the environment of one VM: everything outside its own memory that the guest can
// reach. The embedder implements it. The host functions call it during a guest call, so
// its methods must not call into the VM and must not block. Bytes passed to a method
// belong to the guest's memory: the method must copy what it keeps. The host copies
// returned bytes into the guest before the next call. The embedder may keep an *HTTPCall
// and a *LocalResponse, but not their bodies, which belong to the guest's memory. Effects
// on streams (continue, close, local responses) happen after the guest call has returned.
// An Env whose root contexts may end late also implements RootEnv.
type Env interface {
	// Log takes one line of the guest's log.
	Log(level LogLevel, message string)
	// LogLevel is the lowest level that Log keeps.
	LogLevel() LogLevel

	// VMConfig and PluginConfig are the buffers VM_CONFIGURATION and
	// PLUGIN_CONFIGURATION.
	VMConfig() []byte
	PluginConfig() []byte

	// SetTickPeriod requests calls of proxy_on_tick for a root context; 0 stops them.
	SetTickPeriod(root uint32, period time.Duration)

	// Stream returns the HTTP stream of a context id. It returns nil for a root
	// context and for a context that has ended.
	Stream(ctx uint32) Stream

	// Property looks up a property for a context. A root context has no
	// properties of a stream. Values are in Envoy's encoding. NotFound: there
	// is no such property.
	Property(ctx uint32, path []string) ([]byte, Status)
	SetProperty(ctx uint32, path []string, value []byte) Status

	// SharedData and SetSharedData access the data of the VM's vm_id. The cas
	// of an existing value is never 0.
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

	// HTTPCall starts a call for a root context. VM.HTTPCallResponse later
	// delivers the answer; HTTPCall itself must not call it.
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

// Stream is one HTTP request with its answer, in the state that its filter can read. Maps and
// buffers are available only in the callbacks that the specification names.
type Stream interface {
	// Header returns a map of the stream, nil outside its callbacks. Its
	// methods change the map.
	Header(kind MapKind) HeaderMap
	// Body returns a body buffer; NotFound outside its callbacks.
	Body(kind BufferKind) ([]byte, Status)
	// SetBody replaces length bytes of a body from start. Both are within the
	// body.
	SetBody(kind BufferKind, start, length int, value []byte) Status
	Continue(kind StreamKind) Status
	Close(kind StreamKind) Status
	LocalResponse(r *LocalResponse) Status
	// Done reports that the guest called proxy_done for the context. It returns
	// NotFound when no Done of that context is pending.
	Done() Status
}

// HeaderMap is a mutable, ordered list of header lines. Comparison of names
// ignores case. The map returns names in lower case and pseudo-headers first.
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
