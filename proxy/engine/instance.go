// Package engine holds the state of the serving engines: which instances exist, which
// models each serves, whether each is healthy, and which instances may be paired. Its
// Registry publishes an immutable Snapshot that the request path reads without a lock.
//
// The decisions behind this package are in docs/design/engines.md.
package engine

import (
	"context"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
	"github.com/pdproxy/pdproxy/proxy/state/predict"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// State is the state of an instance, as GET /v1/engines shows it.
type State uint32

// The states. Only a ready instance gets new requests. A draining instance still serves
// the transfers and streams that it has. It leaves, or an operator has called Drain.
const (
	Down State = iota // never answered a probe
	Ready
	Unhealthy // answered probes before, but not now
	Draining
)

// String returns the state as GET /v1/engines shows it.
func (s State) String() string {
	return [...]string{"down", "ready", "unhealthy", "draining"}[s&3]
}

// Facts are an instance's own statements about itself. Its connector's probe reads them
// when the instance becomes ready, and again after a restart. They are immutable once
// published.
type Facts struct {
	Models        []string    // ids of GET /v1/models
	Cards         []ModelCard // further statements of GET /v1/models, for each model that has some
	Owner         string      // owned_by of the first model of GET /v1/models: vllm, sglang, tensorrt_llm or another text; "" unknown
	Version       string      // of GET /version or /server_info
	Wire          string      // trtllm: wire generation g1, g2 or g3
	DPSize        int         // data-parallel ranks the engine reports; 0 unknown
	BootstrapPort int         // sglang prefill: port of the bootstrap registry; 0 unknown
	FollowsRoom   bool        // sglang prefill: the rank is room mod dp size
	PageSize      int         // tokens per KV block; 0 unknown
	KVHash        string      // trtllm: the hash of blocks in its events, kv_cache_hash_algo; "" unknown
	KVCacheType   string      // dtype of the KV cache; "" unknown
	Epoch         string      // differs after a restart of the engine; "" unknown
	// EngineIDs are the ids of a vllm-mooncake prefill's engine cores, by data-parallel
	// rank.
	EngineIDs []string
	// Addresses are those of the host of the instance's URL; nil if unknown.
	Addresses []netip.Addr
	// KVEvents is the instance's announcement of its KV events.
	KVEvents KVPublisher
	// Rendezvous, of a trtllm prefill, holds members of disaggregated_params, as JSON
	// without braces. A decode leg that is sent before its prefill leg finds the
	// context worker by them. "" if the instance publishes none.
	Rendezvous string
	// KVAddress, of vllm-moriio, is the address of its KV transfer, as registered or
	// configured.
	KVAddress config.KVAddress
	// TPSize is the number of ranks over which the KV of a sequence is spread (for
	// vllm-moriio as registered or configured), PPSize the number of pipeline stages
	// and CPSize that of context-parallel ranks; 0 if unknown.
	TPSize, PPSize, CPSize int
	Transfer               string // sglang: transfer backend; "" unknown
}

// Instance is one group of engine processes with a role and an address. It exists as
// long as its configuration is unchanged. Fields set at construction are immutable; the
// others are atomic. A model's Pool decides which instances can be paired.
type Instance struct {
	// A placement reads the end of Breaker, Load, ended and the name in Spec for each candidate. They
	// are in one cache line, because with many engines the time of a placement is that of cache misses.
	Breaker circuit.Breaker // passive health: consecutive failures of legs
	Load    []load.Counter  // one for each rank
	ended   atomic.Bool     // see Ended
	Spec    config.Engine   // as configured or discovered

	ID      uint32          // unique in this process, never reused
	Role    abi.Role        // parsed Spec.Role
	Flow    abi.Flow        // order of its connector's legs; aggregated: it is never paired
	Source  string          // static, zmq, etcd ... as GET /v1/engines shows it
	APIKey  string          // content of Spec.APIKeyFile; sent instead of the client's Authorization
	Host    string          // host of Spec.URL without port, by which peers reach it
	Prefix  string          // path of Spec.URL, put before every route; usually ""
	Client  upstream.Client // pooled connections to it
	KVLease time.Duration   // Spec.KVLease

	// Queues are the prefill queues of the ranks for predictions, and Times the models of
	// the instance's type. Times is nil until a policy that needs predictions has used the
	// instance.
	Queues []predict.Target
	Times  atomic.Pointer[predict.Engine]

	// KV has the slots of the instance's ranks in the registry's index, from its
	// admission until it has left; nil without an index. Other instances reuse freed
	// slots. So no code may note exact blocks in the slots of an instance that is Gone. A
	// late guess does no harm, because it expires.
	KV []kvindex.Target
	// Media has the media that each rank was lately sent, if a policy needs them.
	Media []mediacache.Cache
	// Transfers is the speed of KV transfers from this instance as prefill, over all
	// its pairs. Tokens are prompt tokens.
	Transfers load.Speed

	detail            abi.Detail // of Spec
	protocol          Protocol
	kvHosts           config.KVHosts
	state             atomic.Uint32
	since             atomic.Int64 // unix ms of the last state change
	facts             atomic.Pointer[Facts]
	asks              *http.Client    // for probes; shares no connection with requests
	eventBlockTokens  atomic.Int32    // tokens per KV block, from its events; 0 unknown
	metricBlockTokens atomic.Int32    // tokens per KV block, from its metrics; 0 unknown
	staying           context.Context // ends when the instance begins to leave
	cancel            context.CancelFunc
	drainFor          atomic.Int64  // limit of the drain, in ns
	drained           atomic.Bool   // by Drain
	moveAt            atomic.Int64  // when its open streams begin to move to other engines, in Unix ms; 0: they stay
	fetches           atomic.Int32  // placements whose decode has not fetched its KV from here yet
	gone              atomic.Bool   // it has left the registry
	restarts          atomic.Uint32 // number of restarts that were found
	asked             atomic.Bool   // the first probe has ended, with any result, or its time is over
	unresponsive      atomic.Bool
	evictNow          chan struct{} // wakes evictCalls after the instance became unhealthy or unresponsive, its circuit has opened, or its streams are to move
	probeNow          chan struct{} // requests an early probe
	relearn           atomic.Bool   // the connection of its probes was lost: the process may be a new one
	sleep             sleepMode
	refused           atomic.Bool // a leg's connection was refused since the last successful probe
	watched           bool        // Run has a prober for it; guarded by Registry.mu
	lost              bool        // its last announced state is Unhealthy; only the goroutine that watches it uses lost
}

// IsRemote reports whether the instance is a [[remote]]: an endpoint of another operator,
// which is not probed.
func (i *Instance) IsRemote() bool { return i.Spec.RemoteModel != "" }

// Gone reports whether the instance has left the registry.
func (i *Instance) Gone() bool { return i.gone.Load() }

// Ended reports whether the instance's host has refused the last probe, or the connection of a leg
// since then: its process has ended, and no other one listens. An ended process neither reads nor
// holds KV blocks.
func (i *Instance) Ended() bool { return i.ended.Load() }

// Restarts returns how often the instance was found to be a new process.
func (i *Instance) Restarts() uint32 { return i.restarts.Load() }

// State returns the instance's state.
func (i *Instance) State() State {
	if i.drained.Load() {
		return Draining
	}
	return i.probed()
}

// Answers reports whether the instance answered its last probe, or has not been probed yet. A drained
// instance may answer.
func (i *Instance) Answers() bool {
	s := i.probed()
	return s != Unhealthy && (s != Down || !i.asked.Load())
}

// probed returns the state without Drain: the one that the probes have found.
func (i *Instance) probed() State { return State(i.state.Load()) }

// Facts returns the instance's facts; never nil.
func (i *Instance) Facts() *Facts {
	if f := i.facts.Load(); f != nil {
		return f
	}
	return i.published()
}

// published returns the facts that are known before the first probe.
func (i *Instance) published() *Facts {
	address, _ := config.ParseKVAddress(i.Spec.KVAddress) // newInstance has rejected malformed addresses
	return &Facts{KVAddress: address, TPSize: i.Spec.TPSize}
}

// Since returns when the state last changed, or when all ranks fell asleep or woke. An earlier time
// belongs to KV that the engine has lost.
func (i *Instance) Since() time.Time { return time.UnixMilli(i.since.Load()) }

// Models returns the ids of the models that the instance serves: the configured one, or
// those that it reports. Nil if they are not known.
func (i *Instance) Models() []string {
	if i.Spec.Model != "" {
		return []string{i.Spec.Model}
	}
	return i.Facts().Models
}

// Tokenizes is the form in which the instance answers requests for token ids.
func (i *Instance) Tokenizes() tokens.Dialect { return i.protocol.Tokenizes() }

// LoadRoutes lists the routes on which the instance may report its load, the best first;
// empty: it reports none.
func (i *Instance) LoadRoutes() []LoadRoute { return i.protocol.Loads() }

// defaultBootstrapPort is the default port of SGLang's bootstrap server and of vLLM's
// for Mooncake. Sources: sglang server_args.py, --disaggregation-bootstrap-port; vLLM
// envs.py, VLLM_MOONCAKE_BOOTSTRAP_PORT.
const defaultBootstrapPort = 8998

// bootstrap returns the address of the bootstrap server of an sglang or vllm-mooncake
// prefill instance: the configured address, otherwise the address in f, otherwise the
// default.
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

// BlockTokens returns the number of tokens in a KV block of the instance: the configured
// number, otherwise the number from its events, its facts or its metrics, in this order;
// 0 if unknown. It takes no lock.
func (i *Instance) BlockTokens() int {
	if n := i.Spec.BlockTokens; n > 0 {
		return n
	}
	if n := i.eventBlockTokens.Load(); n > 0 {
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
	return int(i.metricBlockTokens.Load())
}

// maxBlockTokens is the largest block size that is accepted, in tokens.
const maxBlockTokens = 1 << 20

// SetBlockTokens notes the number of tokens in a block of the instance's KV events. An
// impossible size is ignored.
func (i *Instance) SetBlockTokens(n int) {
	if n > 0 && n <= maxBlockTokens {
		i.eventBlockTokens.Store(int32(n))
	}
}

// GuessBlockTokens notes the number of tokens in a block from the instance's metrics,
// in which an engine with several kinds of blocks reports the smallest size. An
// impossible size is ignored.
func (i *Instance) GuessBlockTokens(n int) {
	if n > 0 && n <= maxBlockTokens {
		i.metricBlockTokens.Store(int32(n))
	}
}

// Publishes reports whether the instance publishes its KV events, as configured or as it
// reports.
func (i *Instance) Publishes() bool {
	return i.Spec.KVEvents != "" || len(i.Facts().KVEvents.Ranks) > 0
}

// Events reports whether KV events of the instance have arrived.
func (i *Instance) Events() bool { return i.Publishes() && i.eventBlockTokens.Load() > 0 }

// Pin notes that KV will be fetched from the instance. It adds no load, but the
// instance does not leave before as many calls of Unpin.
func (i *Instance) Pin() { i.fetches.Add(1) }

// Unpin undoes one Pin.
func (i *Instance) Unpin() { i.fetches.Add(-1) }

// Idle reports whether no rank has a request in flight or KV to be fetched.
func (i *Instance) Idle() bool {
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

// Leaving returns a channel that is closed when the instance begins to leave the registry.
func (i *Instance) Leaving() <-chan struct{} { return i.staying.Done() }

// ranks returns the number of ranks that get requests: the configured number, but at
// most the number that the engine reports, because it rejects a rank out of its range.
func (i *Instance) ranks() int {
	if dp := i.Facts().DPSize; dp > 0 && dp < len(i.Load) {
		return dp
	}
	return len(i.Load)
}

// Target is the unit of placement: an instance and one of its ranks. The zero Target
// means no target.
type Target struct {
	*Instance
	Rank int
}

// IsZero reports whether t is no target.
func (t Target) IsZero() bool { return t.Instance == nil }

// Name returns the engine's name, or "" for no target.
func (t Target) Name() string {
	if t.Instance == nil {
		return ""
	}
	return t.Spec.Name
}
