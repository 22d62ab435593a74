package config

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"time"
)

// Roles: the phases that an instance serves.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
	RoleBoth    = "both"
	// RoleEncode is the role of vLLM engines that only encode images and sounds ahead
	// of prefill.
	RoleEncode = "encode"
)

// Connectors: the proxy's side of each engine's KV-transfer protocol. Two instances can
// be paired only if both have the same one.
const (
	ConnectorVLLMNixl     = "vllm-nixl"
	ConnectorVLLMNixlPush = "vllm-nixl-push"
	// ConnectorVLLMStore is any vLLM connector to a KV cache that engines share, such
	// as LMCache's.
	ConnectorVLLMStore = "vllm-store"
	// ConnectorVLLMMoRIIO is MoRI-IO in its default WRITE mode,
	// ConnectorVLLMMoRIIORead in READ mode; engines of the two cannot be paired.
	ConnectorVLLMMoRIIO     = "vllm-moriio"
	ConnectorVLLMMoRIIORead = "vllm-moriio-read"
	ConnectorVLLMMooncake   = "vllm-mooncake"
	// ConnectorVLLMP2PTier is the OffloadingConnector with a secondary tier of type
	// p2p.
	ConnectorVLLMP2PTier = "vllm-p2p-tier"
	ConnectorSGLang      = "sglang"
	ConnectorTRTLLM      = "trtllm"
	// ConnectorNone transfers nothing: the instance serves whole requests.
	ConnectorNone = "none"
)

// roles and connectors list the accepted values of these keys.
func roles() []string { return []string{RolePrefill, RoleDecode, RoleBoth, RoleEncode} }

func connectors() []string {
	return []string{
		ConnectorVLLMNixl, ConnectorVLLMNixlPush, ConnectorVLLMStore, ConnectorVLLMMoRIIO, ConnectorVLLMMoRIIORead,
		ConnectorVLLMMooncake, ConnectorVLLMP2PTier, ConnectorSGLang, ConnectorTRTLLM, ConnectorNone,
	}
}

// Engine is one configured instance.
type Engine struct {
	// Name is the instance's name in logs, metrics and headers: letters,
	// digits and - _ . : @, unique. Required.
	Name string `toml:"name"`
	// URL is its http or https address; a path is put before every route.
	// Required.
	URL string `toml:"url"`
	// Role is the phases it serves: "prefill", "decode" or "both", or "encode"
	// for a vLLM encoder, with the connector of the engines that it works for.
	// Required.
	Role string `toml:"role"`
	// Connector is its KV-transfer protocol: vllm-nixl, vllm-nixl-push, vllm-store,
	// vllm-p2p-tier, vllm-moriio, vllm-moriio-read, vllm-mooncake, sglang, trtllm, or none
	// for an engine that transfers no KV.
	// Default "none", which needs role "both".
	Connector string `toml:"connector"`
	// Ranks is the number of its data-parallel ranks. Default 1; at least 1.
	Ranks int `toml:"ranks"`
	// APIKeyFile is a file with the key that is sent to this instance instead
	// of the client's Authorization. Default "": the client's is sent.
	APIKeyFile string `toml:"api_key_file"`
	// Model is the model that the engine serves. Default "": read from the instance.
	Model string `toml:"model"`
	// RemoteModel is the endpoint's name of the model, for an instance that is a
	// [[remote]]. No key sets it.
	RemoteModel string
	// KVEvents is the source of its KV events: "tcp://host:port" (port + rank for
	// several ranks), or "poll" for trtllm. Default "": the addresses that the
	// instance announces (vLLM 0.32 and later, SGLang), otherwise none.
	KVEvents string `toml:"kv_events"`
	// KVReplay is the address for missed KV events, "tcp://host:port". Default "":
	// the announced one, or none if KVEvents is set.
	KVReplay string `toml:"kv_replay"`
	// BlockTokens is the number of tokens in one of its KV blocks. Default 0: learned
	// from its events, its server info or its metrics.
	BlockTokens int `toml:"block_tokens"`
	// BootstrapHost is the bootstrap server's host as the decode side reaches
	// it; sglang and vllm-mooncake prefill only. Default "": the host of URL.
	BootstrapHost string `toml:"bootstrap_host"`
	// BootstrapPort is the bootstrap server's port; sglang and vllm-mooncake prefill
	// only. Default 0: from sglang's GET /server_info, else 8998.
	BootstrapPort int `toml:"bootstrap_port"`
	// HeaderOverrides: the engine runs with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1.
	// Transfer fields are then sent in header lines, and the body stays unchanged; sglang
	// only. Default false.
	HeaderOverrides bool `toml:"header_overrides"`
	// KVAddress is the address of its KV transfer for its peers:
	// host:HOST,handshake:PORT,notify:PORT. vllm-moriio and vllm-moriio-read only,
	// required there, except for engines that register it. Default "".
	KVAddress string `toml:"kv_address"`
	// TPSize is its tensor-parallel size; vllm-moriio, vllm-mooncake, and
	// vllm-nixl-push prefill. Default 0: that of its peers, with vllm-nixl-push 1.
	TPSize int `toml:"tp_size"`
	// PPSize is its pipeline-parallel size; vllm-nixl-push prefill only.
	// Default 0: 1.
	PPSize int `toml:"pp_size"`
	// EngineID is the engine_id of its --kv-transfer-config, without the _dpR
	// that vLLM adds for each of several ranks; vllm-nixl-push prefill only,
	// required there. Default "".
	EngineID string `toml:"engine_id"`
	// SideChannel is host:port of its VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, with
	// vllm-p2p-tier of its VLLM_P2P_SIDE_CHANNEL_HOST and _PORT, as decode reaches
	// them (port + rank where there are more); vllm-nixl-push and vllm-p2p-tier
	// prefill only, required there. Default "".
	SideChannel string `toml:"side_channel"`
	// Bidirectional: the engine's kv_connector_extra_config has bidirectional_kv_xfer.
	// Then decode retains the KV of its answers, and prefill pulls it at the
	// conversation's next turn; of streamed answers since vLLM 0.33; vllm-nixl only.
	// Default false.
	Bidirectional bool `toml:"bidirectional"`
	// DecoderKVBlocksTTL is its decoder_kv_blocks_ttl: how long a bidirectional decode
	// retains that KV. Default 0: vLLM's, 480s.
	DecoderKVBlocksTTL Duration `toml:"decoder_kv_blocks_ttl"`
	// KVLeaseDuration is how long a prefill keeps KV that no decode has requested:
	// its kv_lease_duration (vllm-nixl) or defer_timeout (vllm-moriio-read). Default 0:
	// vLLM's, 30s and 60s.
	KVLeaseDuration Duration `toml:"kv_lease_duration"`
	// KVHosts lists hosts that its answers may name to its peers, and to the proxy for
	// KV events, in addition to the hosts that are known to be its own: for engines of several hosts, or with a side
	// channel on another network. The list has addresses, networks (10.0.0.0/8) and names,
	// separated by commas; "*" is any host. Default "": any host
	// for an engine of the configuration file, except the peer's own (the loopback); no
	// other host for an engine that registered or was discovered.
	KVHosts string `toml:"kv_hosts"`
	// Endpoint is the address, ip:port, to which gateways send the requests for the
	// instance: that of a sidecar in front of it. ":port" is a port of URL's host; epp
	// only. Default "": host and port of URL.
	Endpoint string `toml:"endpoint"`
	// Labels are the engine's labels for policies, such as its zone: at most zone,
	// revision, hardware and 5 others, with 1 to 63 bytes for each name and value.
	// Default {}.
	Labels Labels `toml:"labels"`
	// Weight is a number for policies, such as the engine's relative capacity; the
	// built-in policies do not use it. Default 0: 1; at most 1000.
	Weight float64 `toml:"weight"`
	// Priority is the order in which the engine runs requests of different priorities, the
	// field "priority" of their bodies: lower_first (vLLM with --scheduling-policy priority,
	// SGLang with --schedule-low-priority-values-first) or higher_first (SGLang with
	// --enable-priority-scheduling). Each request then has the priority of its class. Default
	// "": the proxy leaves the field unchanged.
	Priority string `toml:"priority"`
	// HealthPath is the path of the health probe. Default "": a cheap path of the
	// connector. Probes never generate tokens.
	HealthPath string `toml:"health_path"`
	// MaxConns is the maximum number of open connections to it. Default 0: no limit.
	MaxConns int `toml:"max_conns"`
	// CA is a file of CA certificates (PEM) that may sign its certificate.
	// Default "": the system's.
	CA string `toml:"ca"`
	// InsecureSkipVerify accepts any certificate. Default false.
	InsecureSkipVerify bool `toml:"insecure_skip_verify"`
	// Wire is the generation of the trtllm wire format: "g1", "g2" or "g3". Default "":
	// determined from the instance.
	Wire string `toml:"wire"`
}

// Pushes reports whether the instance is a prefill of vllm-nixl-push: decode gets its
// identity before it has answered.
func (e *Engine) Pushes() bool {
	return e.Connector == ConnectorVLLMNixlPush && e.Role == RolePrefill
}

// SideChannelled reports whether the instance is a prefill whose configured side
// channel is sent to decode.
func (e *Engine) SideChannelled() bool {
	return e.Pushes() || e.Connector == ConnectorVLLMP2PTier && e.Role == RolePrefill
}

// vLLM's defaults of decoder_kv_blocks_ttl, kv_lease_duration and defer_timeout.
const (
	vllmBlocksTTL = 480 * time.Second
	vllmLease     = 30 * time.Second
	vllmDefer     = 60 * time.Second
)

// KVLease returns how long a prefill keeps its KV for a decode that does not come.
func (e *Engine) KVLease() time.Duration {
	if e.Connector == ConnectorVLLMMoRIIORead {
		return cmp.Or(time.Duration(e.KVLeaseDuration), vllmDefer)
	}
	return cmp.Or(time.Duration(e.KVLeaseDuration), vllmLease)
}

// KeepsFor returns how long a bidirectional decode retains its KV.
func (e *Engine) KeepsFor() time.Duration {
	return cmp.Or(time.Duration(e.DecoderKVBlocksTTL), vllmBlocksTTL)
}

// EngineIDOf returns the engine id of a rank of a pushing prefill: each of several
// ranks is a separate engine. Source: vLLM v1/engine/core.py run_engine_core.
func (e *Engine) EngineIDOf(rank int) string {
	if e.Ranks <= 1 {
		return e.EngineID
	}
	return e.EngineID + "_dp" + strconv.Itoa(rank)
}

// SideChannelOf returns the address of a rank's side channel for peers; "" if it is not
// known.
func (e *Engine) SideChannelOf(rank int) (host string, port int) {
	if e.SideChannel == "" {
		return "", 0
	}
	host, digits, err := net.SplitHostPort(e.SideChannel)
	port, notNumber := strconv.Atoi(digits)
	if err != nil || notNumber != nil {
		return "", 0
	}
	return host, port + rank
}

// CheckKVAddress returns an error if the connector needs a kv_address and there is none.
func (e *Engine) CheckKVAddress() error {
	if !e.MoRIIO() || e.Role == RoleBoth || e.Role == RoleEncode || e.KVAddress != "" {
		return nil
	}
	return fmt.Errorf("is required for connector %q", e.Connector)
}

// MoRIIO reports whether the instance uses MoRI-IO, in either mode.
func (e *Engine) MoRIIO() bool {
	return e.Connector == ConnectorVLLMMoRIIO || e.Connector == ConnectorVLLMMoRIIORead
}

// Health is how instances are probed.
type Health struct {
	// Interval is the time between two probes of one instance. Default 2s;
	// never 0.
	Interval Duration `toml:"interval"`
	// SuspectInterval is the time between two probes of an instance that has not
	// answered the last one, until UnhealthyAfter is reached, and the minimum time
	// between two probes that failed legs request. Default 250ms; 0 means Interval in
	// all cases.
	SuspectInterval Duration `toml:"suspect_interval"`
	// Timeout is how long a probe may take. Default 1s; never 0. An unresponsive
	// instance is detected after at most Interval + UnhealthyAfter * Timeout +
	// (UnhealthyAfter-1) * SuspectInterval, by default 5.5s: legs that wait for it are
	// then retried elsewhere.
	Timeout Duration `toml:"timeout"`
	// UnhealthyAfter is the number of consecutive failed probes that make an instance
	// unhealthy; a refused connection does so alone. Default 3; at least 1.
	UnhealthyAfter int `toml:"unhealthy_after"`
	// HealthyAfter is the number of consecutive successful probes that make it healthy
	// again; one is enough after a refused connection. Default 2; at least 1.
	HealthyAfter int `toml:"healthy_after"`
	// LoadInterval is the time between two polls of a ready instance's load report,
	// which corrects the proxy's own counters by the requests of others. Default 1s; 0
	// is off. TensorRT-LLM returns each of its statistics only once: another reader of
	// its /metrics misses those that the proxy has read.
	LoadInterval Duration `toml:"load_interval"`
}

// Retry bounds the retries of a leg before the client's first byte, and the continuations of
// streams after it.
type Retry struct {
	// Attempts is the number of tries of a phase, including the first one. Default 3;
	// at least 1.
	Attempts int `toml:"attempts"`
	// Budget is the maximum share of retries in the recent exchanges, from 0 to 1.
	// Default 0.2; with 0 only MinBudget applies.
	Budget float64 `toml:"budget"`
	// MinBudget is the number of retries that the budget's window allows regardless of
	// the share. Default 10; 0: none.
	MinBudget int `toml:"min_budget"`
	// Continue says which streams go on at another engine if their engine fails after the
	// client's first byte: "on" all, "drain" those whose engine drains, "off" none. Only
	// engines that report token ids in their events can be continued, and not every
	// request. Default "on".
	Continue string `toml:"continue"`
	// ContinueTokens is the maximum number of tokens of prompt and answer of a stream that
	// can be continued, or whose KV the next turn can use (engine.bidirectional). Each takes
	// about 5 bytes of limits.buffer_memory while the stream is open. Default 131072; at
	// least 1.
	ContinueTokens int `toml:"continue_tokens"`
	// MoveAfter is how long the streams of an engine that leaves, or is drained with
	// move=true, stay there before other engines go on with them. Streams that Continue
	// does not permit stay until they end. Default 5s; 0s: they move at once.
	MoveAfter Duration `toml:"move_after"`
}

// The values of retry.continue.
const (
	ContinueOff   = "off"
	ContinueDrain = "drain"
	ContinueOn    = "on"
)

// Continues returns which streams of requests for that name of a model are continued: a value of
// retry.continue.
func (c *Config) Continues(name string) string {
	for range c.Models { // bounds a cycle of aliases
		m := c.Model(name)
		switch {
		case m == nil:
			return c.Retry.Continue
		case m.Continue != "":
			return m.Continue
		}
		name = m.AliasOf
	}
	return c.Retry.Continue
}

// Circuit configures when a failing instance or pair is not used.
type Circuit struct {
	// Failures is the number of consecutive failures that eject an instance or a pair.
	// Default 5; at least 1.
	Failures int `toml:"failures"`
	// OpenFor is the time until an ejected one gets a trial. Default 10s;
	// never 0.
	OpenFor Duration `toml:"open_for"`
}

// Transport configures the HTTP calls to engines.
type Transport struct {
	// MaxIdle is how many idle connections are kept to one instance. Default
	// 256; 0 keeps none.
	MaxIdle int `toml:"max_idle"`
	// IdleTimeout is how long an idle connection is kept. Default 4s, below
	// the 5 s after which uvicorn, the HTTP server of most engines, closes it;
	// never 0.
	IdleTimeout Duration `toml:"idle_timeout"`
}

// DefaultEngine returns an [[engine]] whose keys are all at their defaults.
func DefaultEngine() Engine { return Engine{Connector: ConnectorNone, Ranks: 1} }

func defaultHealth() Health {
	return Health{Interval: seconds(2), SuspectInterval: Duration(250 * time.Millisecond), Timeout: seconds(1), UnhealthyAfter: 3, HealthyAfter: 2, LoadInterval: seconds(1)}
}

func defaultRetry() Retry {
	return Retry{Attempts: 3, Budget: 0.2, MinBudget: 10, Continue: ContinueOn, ContinueTokens: 128 << 10, MoveAfter: seconds(5)}
}

func defaultCircuit() Circuit { return Circuit{Failures: 5, OpenFor: seconds(10)} }

func defaultTransport() Transport {
	return Transport{MaxIdle: 256, IdleTimeout: seconds(4)}
}

// Address returns the host:port of URL, with the scheme's port if URL has none; "" for
// a malformed URL.
func (e Engine) Address() string {
	u, err := url.Parse(e.URL)
	if err != nil || u.Hostname() == "" {
		return ""
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(u.Hostname(), port)
}
