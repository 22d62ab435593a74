package plugins

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/plugins/filter"
	"github.com/pdproxy/pdproxy/plugins/policy"
	"github.com/pdproxy/pdproxy/plugins/shared"
	"github.com/pdproxy/pdproxy/plugins/source"
)

// Config is what a Set runs: [policy], [[plugin]] and [[upstream]] of the
// configuration, checked.
type Config struct {
	Plugins   []Spec              // filters in their order
	Upstreams map[string]*url.URL // what guests may call, by name

	// The policies that decide, by name: that of a plugin, plugin/policy for a
	// policy in a module that names several, or that of a built-in one.
	Plan  []string // in priority order: the first that does not pass decides
	Place string
	Mint  string

	Native  bool          // built-in policies run compiled in, not as WebAssembly
	Natives Natives       // these, with their parameters
	Params  string        // the parameters, as the module of the built-in policies is configured
	Budget  time.Duration // of one decision, where the plugin has no timeout of its own
	Limits  filter.Limits // of streams with filters
}

// Spec is one [[plugin]].
type Spec struct {
	Name   string
	Source source.Source
	Filter bool // it is a filter, else a policy

	Trusted       bool // runs in the runtime that cannot interrupt loops
	MemoryPages   uint32
	TotalMemory   uint64        // of all instances of a version, in bytes; 0: enough for all of them and two more
	HostMemory    int64         // most bytes that the host holds for the plugin; 0: budget.DefaultMemory
	Timeout       time.Duration // of one call; 0: Config.Budget, for a filter filter.DefaultTimeout
	HostFunctions []string      // that it may call; "*": all
	Upstreams     []string      // that it may call; "*": all

	Config, VMConfig, VMID, RootID string

	FailOpen, HoldHeaders bool // of filters, see filter.Spec
	CrashBudget           int
	CrashWindow           time.Duration
	CrashCPUShare         float64 // see budget.New
	// Canary is the share of decisions, 0 to 1, that a new version of a policy
	// takes first, if the old one works: for CrashWindow, or until it fails and
	// is dropped. It is refused when it fails on made-up requests. 0: it takes
	// all of them at once.
	Canary float64
}

// Deps is what a Set stands on. All fields but Transport, Meter, FilterMeter,
// Metrics, Conversations and Changed are needed.
type Deps struct {
	Builtin func() []byte // the module of the built-in policies
	// Meter gives what watches a policy, by its label and the name of its hook.
	Meter       func(policy, hook string) policy.Meter
	FilterMeter func(plugin string) filter.Meter
	Metrics     func(plugin string) shared.Metrics // makes the metrics that guests define
	Transport   http.RoundTripper                  // for calls to upstreams
	// Conversations is where plugins keep values; nil: nowhere.
	Conversations shared.Conversations
	Node          filter.Node
	CacheDir      string // of compiled code; "": in memory only
	Changed       func() // called after other policies or filters have begun to serve; must not call the Set's Apply or Reload
	Log           *slog.Logger
}

// Natives finds the built-in policies that are compiled in.
type Natives struct {
	Plan  func(name string) (func(*abi.PlanFacts) abi.PlanDecision, bool)
	Place func(name string) (func(*abi.PlaceFacts) abi.PlaceDecision, bool)
	Mint  func(name string) (func(*abi.MintFacts) uint64, bool)
	Needs func(name string) abi.Needs // what a policy wants to be shown
}

// Error says which part of a Config cannot be used.
type Error struct {
	// Key is the key in the configuration, such as plugin[1] or policy.place.
	Key string
	Err error
}

// Error implements error.
func (e *Error) Error() string { return e.Key + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// pluginError is about the i-th [[plugin]], or a key of it. Its cause begins with
// the plugin's name, by which operators know it.
func pluginError(i int, key, name string, err error) *Error {
	return &Error{Key: fmt.Sprintf("plugin[%d]%s", i, key), Err: fmt.Errorf("%q: %w", name, err)}
}
