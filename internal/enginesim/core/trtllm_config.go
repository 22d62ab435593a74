package core

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

// TRTLLMConfig holds the settings of a simulated TensorRT-LLM worker. The zero
// value of a field means its default.
type TRTLLMConfig struct {
	// Wire is one of the TRTLLMWire constants; default TRTLLMWireG2.
	Wire int
	// KVTransferTimeout is cache_transceiver_config.kv_transfer_timeout_ms: the
	// time that a context's blocks wait for the fetch, and that a generation
	// waits for them. Default: Config.Lease if that is set, else 60 s.
	KVTransferTimeout time.Duration
	// DisconnectPoll is the interval in which the worker checks whether its
	// client has left; default 1 s.
	DisconnectPoll time.Duration
	// AuthKey is internal_request_auth_key: requests with an opaque state or a
	// context endpoint must be signed with it. Default: no key.
	AuthKey string
	// PerfMetrics is return_perf_metrics: requests get their metrics on request.
	PerfMetrics bool
	// ClusterURI is the cluster storage where the worker registers,
	// "http://HOST:PORT" or "etcd://HOST:PORT"; empty: no registration.
	// ClusterName is disagg_cluster.cluster_name, ClusterToken the bearer token
	// that the storage requires.
	ClusterURI, ClusterName, ClusterToken string
	// Heartbeat and InactiveTimeout are disagg_cluster's heartbeat_interval_sec
	// and inactive_timeout_sec, and those of Config.Etcd; default 5 s and 10 s.
	Heartbeat, InactiveTimeout time.Duration
}

// WithDefaults returns the config with every zero field set; lease is the
// engine's as configured.
func (c TRTLLMConfig) WithDefaults(lease time.Duration) TRTLLMConfig {
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
