package filter

import (
	"log/slog"
	"net/http"
	"net/url"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// DefaultTimeout is the default time limit of one call into a guest.
const DefaultTimeout = time.Second

// Spec describes one version of one filter.
type Spec struct {
	Name string
	Wasm []byte
	Load host.LoadOptions
	VMs  int // 0: one for each processor
	// Compiled is an optional function. It is called when the module is
	// compiled and its VMs begin to start.
	Compiled func()

	Config   string // the plugin configuration for the guest
	VMConfig string
	VMID     string // key of shared data and queues
	RootID   string

	FailOpen bool // streams continue without the filter when it fails; else they end with an error
	// HoldHeaders makes Pause in a header callback hold only the headers: the
	// body callbacks still run, and Continue from one of them releases the
	// headers. Without it Pause holds everything, which is Envoy's default.
	HoldHeaders bool
	Upstreams   []string      // names in Deps.Upstreams that the guest may call; "*": all
	Timeout     time.Duration // of one call into the guest, and of the wait for its VM; 0: DefaultTimeout
}

// Deps are the dependencies of a plugin. Only Host, Transport, Meter and
// Metrics may be nil.
type Deps struct {
	Shared    *shared.Store
	Budget    Budget
	Host      *budget.Host        // nil: each version has its own
	Upstreams map[string]*url.URL // by the name that guests use in calls
	Transport http.RoundTripper   // for calls to upstreams; nil: http.DefaultTransport
	Metrics   shared.Metrics      // nil: guests cannot define metrics
	Meter     Meter
	Node      Node
	Log       *slog.Logger

	Conversations shared.Conversations // nil: guests cannot store data of conversations
}

// Node holds the values of the properties node.*, cluster_name, route_name and
// listener.* of this process.
type Node struct {
	ID, Cluster string
	Listener    string            // address that clients connect to
	Metadata    map[string]string // node.metadata
}

// Budget counts the failures of a version. It is safe for concurrent use.
type Budget interface {
	// Fail counts a failure and reports whether this failure parked the plugin.
	Fail(now time.Time) (parked bool)
	// Timeout is Fail for a call that used up its time; took is the duration of
	// the call.
	Timeout(now time.Time, took time.Duration) (parked bool)
	Parked() bool
}

// Meter counts the calls into a plugin's guests. It is safe for concurrent use.
type Meter interface {
	Observe(c host.Callback, d time.Duration)
	// Fail counts a failed call: trap, timeout, exit, out_of_memory, forbidden,
	// busy (the VM was not free in time), start (a VM that replaces another did
	// not start).
	Fail(c host.Callback, reason string)
}

// State is the state of a plugin.
type State string

// The states of a plugin.
const (
	Serving State = "serving"
	Parked  State = "parked" // the crash budget is used up: Spec.FailOpen decides how streams continue
	Closed  State = "closed" // it takes no new streams
)
