package plugins

import (
	"errors"
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

// Config is the configuration of a Set: the checked [policy], [[plugin]] and
// [[upstream]].
type Config struct {
	Plugins   []Spec              // filters in their order
	Upstreams map[string]*url.URL // upstreams that guests may call, by name

	// The names of the policies in use. Each is the name of a built-in policy, the name
	// of a plugin, or plugin/policy for one policy of a plugin with several.
	Plan  []string // in priority order: the first that does not pass decides
	Place string   // or Scores
	Mint  string

	Scores []ScoreSet // for Place = Scores; the last one matches every request

	// Retain and Evict have no needs: their frames are the same for all policies. Evict is "" if no
	// policy ends running requests.
	Retain, Evict string

	Native  bool          // run built-in policies compiled in, not as WebAssembly
	Natives Natives       // the compiled-in policies, with their parameters
	Params  string        // the parameters as configuration text of the module of built-in policies
	Budget  time.Duration // time limit of one decision, for plugins without a timeout setting
	Limits  filter.Limits // of streams with filters
}

// Spec is one [[plugin]].
type Spec struct {
	Name   string
	Source source.Source
	Filter bool // a filter, else a policy

	Trusted       bool // runs in the runtime that cannot interrupt loops
	MemoryPages   uint32
	HostMemory    int64         // bytes that the host may hold for the plugin; 0: budget.DefaultMemory
	Timeout       time.Duration // of one call; 0: Config.Budget, for a filter filter.DefaultTimeout
	HostFunctions []string      // that it may call; "*": all
	Upstreams     []string      // that it may call; "*": all

	Config, VMConfig, VMID, RootID string

	FailOpen, HoldHeaders bool // of filters, see filter.Spec
	CrashBudget           int
	CrashWindow           time.Duration
	// Canary is the share of decisions, 0 to 1, that a new version of a policy
	// takes first, if the old one works. The share lasts for CrashWindow, or
	// until the new version fails and is dropped. A version that fails on
	// made-up requests is rejected. With 0 a new version takes all decisions at
	// once.
	Canary float64
}

// Deps are the dependencies of a Set. All fields except Transport, Meter,
// FilterMeter, Metrics, Conversations and Changed are required.
type Deps struct {
	Builtin func() []byte // the module of the built-in policies
	// Meter returns the meter of a policy, by its label and the name of its hook.
	Meter       func(policy, hook string) policy.Meter
	FilterMeter func(plugin string) filter.Meter
	Metrics     func(plugin string) shared.Metrics // makes the metrics that guests define
	Transport   http.RoundTripper                  // for calls to upstreams
	// Conversations stores values of plugins; nil: no storage.
	Conversations shared.Conversations
	Node          filter.Node
	CacheDir      string // of compiled code; "": in memory only
	Changed       func() // called after other policies or filters have begun to serve; must not call the Set's Apply or Reload
	Log           *slog.Logger
}

// Natives finds the policies that are compiled in.
type Natives struct {
	Plan  func(name string) (func(*abi.PlanFacts) abi.PlanDecision, bool)
	Place func(name string) (func(*abi.PlaceFacts) abi.PlaceDecision, bool)
	Mint  func(name string) (func(*abi.MintFacts) uint64, bool)
	Needs func(name string) abi.Needs // the needs of a policy

	Retain func(name string) (func(*abi.RetainFacts) abi.RetainDecision, bool)
	Score  func(builtin string) (NativeScorer, bool) // by Scorer.Builtin
	Evict  func(name string) (func(*abi.EvictFacts) int32, bool)
}

// Error names the part of a Config that cannot be used.
type Error struct {
	// Key is the key in the configuration, such as plugin[1] or policy.place.
	Key string
	// Name is the plugin's name in the configuration and in the log; "" if the error is not about a
	// plugin.
	Name string
	Err  error
}

// Error implements error.
func (e *Error) Error() string {
	if e.Name != "" {
		return fmt.Sprintf("%s (%s): %v", e.Key, e.Name, e.Err)
	}
	return e.Key + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Errors is a list of at least one Error.
type Errors []*Error

// Error lists the errors, one a line.
func (es Errors) Error() string { return errors.Join(es.Unwrap()...).Error() }

// Unwrap returns the errors.
func (es Errors) Unwrap() []error {
	list := make([]error, len(es))
	for i, e := range es {
		list[i] = e
	}
	return list
}

// pluginError returns an error about the i-th [[plugin]], or a key of it.
func pluginError(i int, key, name string, err error) *Error {
	return &Error{Key: fmt.Sprintf("plugin[%d]%s", i, key), Name: name, Err: err}
}
