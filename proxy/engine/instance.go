// Package engine knows the serving engines: which instances there are, what
// each serves, whether it is well, and what two of them may be paired. Its
// Registry publishes an immutable Snapshot that the request path reads without
// a lock.
package engine

import (
	"context"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
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
	KVHash        string   // trtllm: how its events name blocks, kv_cache_hash_algo; "" unknown
	KVCacheType   string   // dtype of the KV cache; "" unknown
	Epoch         string   // changes when the engine restarted; "" unknown
	// EngineIDs is what vllm-mooncake prefill calls its engine core, by
	// data-parallel rank.
	EngineIDs []string
	// Addresses is what the host of the instance's URL stands for; nil unknown.
	Addresses []netip.Addr
	KVEvents  KVPublisher
	// Rendezvous is of trtllm prefill: the members of disaggregated_params, as JSON
	// without braces, by which a generation that is sent before its context finds
	// it; "" when the instance names none.
	Rendezvous string
	// KVAddress is of vllm-moriio: where peers reach its KV transfer, as the
	// instance registered or as configured.
	KVAddress config.KVAddress
	// TPSize is over how many ranks the KV of a sequence is spread (of vllm-moriio
	// as registered or configured), PPSize over how many pipeline stages and CPSize
	// by context parallelism; 0 unknown.
	TPSize, PPSize, CPSize int
	Transfer               string // sglang: transfer backend; "" unknown
}

// KVPublisher is what an SGLang instance announces of its KV events, as it says
// it. Source: sglang GET /server_info, member kv_events.
type KVPublisher struct {
	Publisher   string // "zmq"; "" when nothing is announced
	Host        string // endpoint_host; a wildcard stands for the instance's host
	Port        int    // endpoint_port_base, of rank 0; rank r has that and r
	Topic       string // "" for all
	BlockTokens int    // block_size; 0 unknown
	DPSize      int    // dp_size: how many ranks publish; 0 unknown
}

// Instance is one engine process group with a role and an address. Its
// identity lives as long as its configuration is unchanged; all fields set at
// construction are immutable, the rest is atomic. Which instances can be paired
// is a matter of a model's Pool, not of an instance.
type Instance struct {
	Spec    config.Engine   // as configured or discovered
	ID      uint32          // unique in this process, never reused
	Role    abi.Role        // parsed Spec.Role
	Flow    abi.Flow        // order of its connector's legs; aggregated: it pairs with nothing
	Source  string          // static, zmq, etcd ... as GET /v1/engines shows it
	APIKey  string          // content of Spec.APIKeyFile; sent instead of the client's Authorization
	Host    string          // host of Spec.URL without port: where peers reach it
	Prefix  string          // path of Spec.URL, put before every route; "" for most
	Client  upstream.Client // pooled connections to it
	Load    []load.Counter  // one a rank
	Breaker Breaker         // passive health: consecutive failures of legs

	// KV is the slots of its ranks in the registry's index, from when it is
	// admitted until it has left; nil without an index. Left slots are given to
	// others: no exact blocks may be noted there for an instance that is Gone; a
	// guess that comes too late ends by its own time.
	KV []kvindex.Target
	// Transfers is how fast KV comes from this instance as prefill, over all its
	// pairs: tokens are prompt tokens.
	Transfers load.Speed

	protocol     Protocol
	kvHosts      config.KVHosts
	state        atomic.Uint32
	since        atomic.Int64 // unix ms of the last state change
	facts        atomic.Pointer[Facts]
	asks         *http.Client    // for probes; shares nothing with the data path
	told         atomic.Int32    // tokens per KV block, by its events; 0 unknown
	guessed      atomic.Int32    // the same, by its metrics
	stay         context.Context // ends when the instance is to drain and go
	part         context.CancelFunc
	drainFor     atomic.Int64  // how long it may then take, in ns
	fetches      atomic.Int32  // placements whose KV decode has yet to get from here
	gone         atomic.Bool   // it has left the registry
	restarts     atomic.Uint32 // how often it was found to be a new process
	asked        atomic.Bool   // once at least, whatever came of it
	unresponsive atomic.Bool
	fell         chan struct{} // tells who leaves calls that it is silent
	probeNow     chan struct{} // asks for a probe soon
	relearn      atomic.Bool   // the connection of its probes was lost: it may be another process
	refused      atomic.Bool   // a leg was refused a connection since the last good probe
	tended       bool          // Run looks after it; guarded by Registry.mu
}

// Gone reports that the instance has left the registry.
func (i *Instance) Gone() bool { return i.gone.Load() }

// Restarts is how often the instance was found to be another process than before.
func (i *Instance) Restarts() uint32 { return i.restarts.Load() }

// State returns the instance's state.
func (i *Instance) State() State { return State(i.state.Load()) }

// Facts returns what the instance said of itself; never nil.
func (i *Instance) Facts() *Facts {
	if f := i.facts.Load(); f != nil {
		return f
	}
	return i.published()
}

// published is what is known of the instance before it is asked.
func (i *Instance) published() *Facts {
	address, _ := config.ParseKVAddress(i.Spec.KVAddress) // newInstance has refused what cannot be read
	return &Facts{KVAddress: address, TPSize: i.Spec.TPSize}
}

// Since returns when the state last changed.
func (i *Instance) Since() time.Time { return time.UnixMilli(i.since.Load()) }

// Models returns the ids of the models that the instance serves: the configured
// one, else what it said itself. Nil when that is not known.
func (i *Instance) Models() []string {
	if i.Spec.Model != "" {
		return []string{i.Spec.Model}
	}
	return i.Facts().Models
}

// defaultBootstrapPort is where SGLang's bootstrap server listens unless told
// otherwise, and vLLM's of Mooncake. Sources: sglang server_args.py,
// --disaggregation-bootstrap-port; vLLM envs.py, VLLM_MOONCAKE_BOOTSTRAP_PORT.
const defaultBootstrapPort = 8998

// Bootstrap returns the address of the bootstrap server of a prefill instance of
// sglang or vllm-mooncake, as configured, else as the instance said, else the default.
func (i *Instance) Bootstrap() (host string, port int) { return i.bootstrap(i.Facts()) }

func (i *Instance) bootstrap(f *Facts) (host string, port int) {
	host, port = i.Spec.BootstrapHost, i.Spec.BootstrapPort
	if host == "" {
		host = i.Host
	}
	if port == 0 {
		port = f.BootstrapPort
	}
	if port == 0 {
		port = defaultBootstrapPort
	}
	return host, port
}

// BlockTokens returns how many tokens a KV block of the instance has: as
// configured, else as its events show, else as its facts say, else by its
// metrics; 0 while that is not known. It takes no lock.
func (i *Instance) BlockTokens() int {
	if n := i.Spec.BlockTokens; n > 0 {
		return n
	}
	if n := i.told.Load(); n > 0 {
		return int(n)
	}
	if f := i.facts.Load(); f != nil {
		if f.KVEvents.BlockTokens > 0 {
			return f.KVEvents.BlockTokens
		}
		if f.PageSize > 0 {
			return f.PageSize
		}
	}
	return int(i.guessed.Load())
}

// maxBlockTokens bounds what is believed of a block's size.
const maxBlockTokens = 1 << 20

// SetBlockTokens notes how many tokens a block has in the instance's KV events;
// a size that cannot be is ignored.
func (i *Instance) SetBlockTokens(n int) {
	if n > 0 && n <= maxBlockTokens {
		i.told.Store(int32(n))
	}
}

// GuessBlockTokens notes how many tokens a block has by the instance's metrics,
// where an engine of several kinds of blocks names the smallest; a size that
// cannot be is ignored.
func (i *Instance) GuessBlockTokens(n int) {
	if n > 0 && n <= maxBlockTokens {
		i.guessed.Store(int32(n))
	}
}

// Events reports whether the instance publishes its KV events, as configured or
// as it says.
func (i *Instance) Events() bool {
	return i.Spec.KVEvents != "" || i.Facts().KVEvents.Publisher == "zmq"
}

// Pin notes that KV is to be fetched from the instance, which loads it with
// nothing, but keeps it from leaving until as many calls of Unpin.
func (i *Instance) Pin() { i.fetches.Add(1) }

// Unpin takes one Pin back.
func (i *Instance) Unpin() { i.fetches.Add(-1) }

// idle reports that nothing is in flight on any rank, nor to be fetched from one.
func (i *Instance) idle() bool {
	if i.fetches.Load() != 0 {
		return false
	}
	for r := range i.Load {
		if i.Load[r].Requests() != 0 {
			return false
		}
	}
	return true
}

// ranks is how many ranks get requests: those configured, but no more than the
// engine says it has, because a rank out of its range is refused.
func (i *Instance) ranks() int {
	if dp := i.Facts().DPSize; dp > 0 && dp < len(i.Load) {
		return dp
	}
	return len(i.Load)
}

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
