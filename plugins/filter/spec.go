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

// DefaultTimeout is the time budget of one call into a guest.
const DefaultTimeout = time.Second

// Spec is one version of one filter.
type Spec struct {
	Name string
	Wasm []byte
	Load host.LoadOptions
	VMs  int // 0: one for each processor
	// Compiled, if there is one, is called when the module is compiled and its VMs
	// begin to start.
	Compiled func()

	Config   string // what the guest reads as plugin configuration
	VMConfig string
	VMID     string // key of shared data and queues
	RootID   string

	FailOpen bool // streams go on without the filter when it fails; else they end with an error
	// HoldHeaders makes Pause in a header callback hold the headers only: the
	// body callbacks are called meanwhile, and Continue from one of them lets the
	// headers go. Without it Pause holds everything, as in Envoy by default.
	HoldHeaders bool
	Upstreams   []string      // names in Deps.Upstreams that the guest may call; "*": all
	Timeout     time.Duration // of one call into the guest, and of the wait for its VM; 0: DefaultTimeout
}

// Deps is what a plugin stands on. Only Host, Transport, Meter and
// Metrics may be nil.
type Deps struct {
	Shared    *shared.Store
	Budget    Budget
	Host      *budget.Host        // nil: one of the version's own
	Upstreams map[string]*url.URL // by the name that guests call them by
	Transport http.RoundTripper   // for calls to upstreams; nil: http.DefaultTransport
	Metrics   shared.Metrics      // nil: guests cannot define any
	Meter     Meter
	Node      Node
	Log       *slog.Logger

	Conversations shared.Conversations // nil: guests keep nothing of conversations
}

// Node is what the properties node.*, cluster_name, route_name and listener.*
// say of this process.
type Node struct {
	ID, Cluster string
	Listener    string            // address that clients reach
	Metadata    map[string]string // node.metadata
}

// Budget counts the failures of a version. It is safe for concurrent use.
type Budget interface {
	// Fail counts a failure and reports whether this one parked the plugin.
	Fail(now time.Time) (parked bool)
	// Timeout is Fail for a call that used up its time.
	Timeout(now time.Time, took time.Duration) (parked bool)
	Parked() bool
}

// Meter watches the calls into a plugin's guests. It is safe for concurrent use.
type Meter interface {
	Observe(c host.Callback, d time.Duration)
	// Fail counts a failed call: trap, timeout, exit, out_of_memory, forbidden,
	// busy (the VM was not free in time), start (a VM that replaces another did
	// not start).
	Fail(c host.Callback, reason string)
}

// State is what a plugin is doing.
type State string

// The states of a plugin.
const (
	Serving State = "serving"
	Parked  State = "parked" // its budget is spent: it acts as Spec.FailOpen says
	Closed  State = "closed" // it takes no new streams
)
