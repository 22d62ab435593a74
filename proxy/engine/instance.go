// Package engine knows the serving engines: which instances there are, what
// each serves, whether it is well, and what two of them may be paired. Its
// Registry publishes an immutable Snapshot that the request path reads without
// a lock.
package engine

import (
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// State is an instance's place in its life, as GET /v1/engines shows it.
type State uint32

// The states. Only a ready instance gets new requests; a draining one still
// serves transfers and streams that it has.
const (
	Down State = iota // never answered a probe
	Ready
	Unhealthy // answered before, does not now
	Draining
)

// String returns the state as GET /v1/engines shows it.
func (s State) String() string {
	return [...]string{"down", "ready", "unhealthy", "draining"}[s&3]
}

// Facts is what an instance says of itself, learned by its connector's probe
// when it becomes ready and again after a restart. Immutable once published.
type Facts struct {
	Models        []string // ids of GET /v1/models
	Version       string   // of GET /version or /server_info
	Wire          string   // trtllm: wire generation g1, g2 or g3
	DPSize        int      // data-parallel ranks the engine reports; 0 unknown
	BootstrapPort int      // sglang prefill: port of the bootstrap registry; 0 unknown
	FollowsRoom   bool     // sglang prefill: rank = room mod dp size
	PageSize      int      // tokens per KV block; 0 unknown
	KVCacheType   string   // dtype of the KV cache; "" unknown
	Epoch         string   // changes when the engine restarted; "" unknown
}

// Instance is one engine process group with a role and an address. Its
// identity lives as long as its configuration is unchanged; all fields set at
// construction are immutable, the rest is atomic.
type Instance struct {
	Spec   config.Engine   // as configured or discovered
	ID     uint32          // unique in this process, never reused
	Role   abi.Role        // parsed Spec.Role
	Group  uint32          // instances of two groups cannot be paired
	Source string          // static, zmq, etcd ... as GET /v1/engines shows it
	APIKey string          // content of Spec.APIKeyFile; sent instead of the client's Authorization
	Host   string          // host of Spec.URL without port: where peers reach it
	Client upstream.Client // pooled connections to it
	Load   []load.Counter  // one a rank

	state   atomic.Uint32
	since   atomic.Int64 // unix ms of the last state change
	facts   atomic.Pointer[Facts]
	Breaker Breaker // passive health: consecutive failures of legs
}

// State returns the instance's state.
func (i *Instance) State() State { return State(i.state.Load()) }

// Facts returns what the instance said of itself; never nil.
func (i *Instance) Facts() *Facts {
	if f := i.facts.Load(); f != nil {
		return f
	}
	return &Facts{}
}

// Since returns when the state last changed.
func (i *Instance) Since() time.Time { return time.UnixMilli(i.since.Load()) }

// Target is what gets placed: an instance and a rank inside it. The zero
// Target is no target.
type Target struct {
	*Instance
	Rank int
}

// IsZero reports that t is no target.
func (t Target) IsZero() bool { return t.Instance == nil }

// Name returns the engine's name, or "" for no target.
func (t Target) Name() string {
	if t.Instance == nil {
		return ""
	}
	return t.Spec.Name
}
