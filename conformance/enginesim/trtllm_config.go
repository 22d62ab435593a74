package enginesim

import "time"

// Wire generations of TensorRT-LLM: which fields its request models have.
const (
	// TRTLLMWireG1 is the 1.0 to 1.2 line: ctx_request_id only.
	TRTLLMWireG1 = 1
	// TRTLLMWireG2 is 1.3 rc: disagg_request_id, conversation ids in both places.
	TRTLLMWireG2 = 2
	// TRTLLMWireG3 is newer: conversation ids in conversation_params only.
	TRTLLMWireG3 = 3
)

// TRTLLMConfig is what only a simulated TensorRT-LLM worker has. The zero value
// of a field means its default.
type TRTLLMConfig struct {
	// Wire is one of the TRTLLMWire constants; default TRTLLMWireG2.
	Wire int
	// KVTransferTimeout is cache_transceiver_config.kv_transfer_timeout_ms: how
	// long a context's blocks wait to be fetched, and how long a generation waits
	// for them; default Config.Lease if that is set, else 60 s.
	KVTransferTimeout time.Duration
	// DisconnectPoll is the grain in which the worker notices that its client has
	// left; default 1 s.
	DisconnectPoll time.Duration
	// AuthKey is internal_request_auth_key: with it, requests that carry an opaque
	// state or a context endpoint must be signed with it. Default none.
	AuthKey string
	// PerfMetrics is return_perf_metrics: requests that ask for their metrics get
	// them.
	PerfMetrics bool
	// Msgpack is TRTLLM_SERVE_ENABLE_MSGSPEC: bodies may be MessagePack, where a
	// header says so.
	Msgpack bool
	// ClusterURI is the cluster storage where the worker registers,
	// "http://HOST:PORT" or "etcd://HOST:PORT"; ClusterName is disagg_cluster.cluster_name, ClusterToken
	// the bearer token that the storage asks for. Empty: nowhere.
	ClusterURI, ClusterName, ClusterToken string
	// Heartbeat and InactiveTimeout are disagg_cluster's heartbeat_interval_sec
	// and inactive_timeout_sec, and those of Config.Etcd; default 5 s and 10 s.
	Heartbeat, InactiveTimeout time.Duration
}

// withDefaults returns the config with every zero field set; lease is the
// engine's as configured.
func (c TRTLLMConfig) withDefaults(lease time.Duration) TRTLLMConfig {
	if c.Wire == 0 {
		c.Wire = TRTLLMWireG2
	}
	if c.KVTransferTimeout == 0 {
		c.KVTransferTimeout = lease
	}
	if c.KVTransferTimeout == 0 {
		c.KVTransferTimeout = time.Minute
	}
	if c.DisconnectPoll == 0 {
		c.DisconnectPoll = time.Second
	}
	if c.Heartbeat == 0 {
		c.Heartbeat = 5 * time.Second
	}
	if c.InactiveTimeout == 0 {
		c.InactiveTimeout = 10 * time.Second
	}
	return c
}
