package core

import "time"

// SGLangConfig holds the settings of a simulated SGLang engine. The zero value
// of a field means its default, which is the real engine's.
type SGLangConfig struct {
	// Version is the release; default "0.5.23". Releases before 0.5.20 have no transfer on
	// /v1/responses, releases before 0.5.22 none on /v1/messages.
	Version string
	// LoadBalance is --load-balance-method; default "follow_bootstrap_room" on
	// a prefill engine, else "round_robin" (the meaning of "auto").
	LoadBalance string
	// ForceQueryRank is SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK: a
	// rank that contradicts the room is registered, not rejected, and decode
	// asks the bootstrap registry for every rank.
	ForceQueryRank bool
	// HeaderOverrides is SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES: x-override-*
	// headers replace body fields on /generate, chat and /v1/messages.
	HeaderOverrides bool
	// KVCacheDtype is --kv-cache-dtype; default "auto". A pair must agree on it.
	KVCacheDtype string
	// TPSize and PPSize are --tp-size and --pp-size; default 1 each. The
	// simulator always computes on one rank. The sizes only decide which
	// engines can be paired.
	TPSize, PPSize int
	// TransferBackend is --disaggregation-transfer-backend; default "mooncake".
	// Engines with different backends cannot transfer KV.
	TransferBackend string
	// BootstrapTimeout is the time that prefill waits for decode's indices, and
	// WaitingTimeout the time that decode waits for the KV; default 300 s each.
	BootstrapTimeout, WaitingTimeout time.Duration
	// HandshakeInterval and HandshakeAttempts configure how decode requests the topology
	// from a bootstrap registry; default 15 times, 1 s apart.
	HandshakeInterval time.Duration
	HandshakeAttempts int
	// HeartbeatInterval and HeartbeatFailures configure how decode watches a bootstrap
	// registry; default every 5 s, lost after 2 misses in a row.
	HeartbeatInterval time.Duration
	HeartbeatFailures int
	// HealthPoll is the polling interval of the health generation, and so the
	// least time of a GET /health; default 1 s. HealthTimeout is its limit,
	// default 20 s.
	HealthPoll, HealthTimeout time.Duration
	// RoomExpiry is the time that the registry keeps a room's rank; default 120 s.
	RoomExpiry time.Duration
}

// Load balance methods with a special meaning here.
const (
	BalanceFollowRoom = "follow_bootstrap_room"
	BalanceRoundRobin = "round_robin"
)

// DefaultBootstrapPort is decode's port for requests without one.
const DefaultBootstrapPort = 8998

// WithDefaults returns the config with every zero field set.
func (c SGLangConfig) WithDefaults(role string) SGLangConfig {
	if c.LoadBalance == "" || c.LoadBalance == "auto" {
		c.LoadBalance = BalanceRoundRobin
		if role == RolePrefill {
			c.LoadBalance = BalanceFollowRoom
		}
	}
	if c.Version == "" {
		c.Version = "0.5.23"
	}
	if c.KVCacheDtype == "" {
		c.KVCacheDtype = "auto"
	}
	if c.TransferBackend == "" {
		c.TransferBackend = "mooncake"
	}
	c.TPSize, c.PPSize = max(1, c.TPSize), max(1, c.PPSize)
	for field, def := range map[*time.Duration]time.Duration{
		&c.BootstrapTimeout: 300 * time.Second, &c.WaitingTimeout: 300 * time.Second,
		&c.HandshakeInterval: time.Second, &c.HeartbeatInterval: 5 * time.Second,
		&c.HealthPoll: time.Second, &c.HealthTimeout: 20 * time.Second, &c.RoomExpiry: 120 * time.Second,
	} {
		if *field == 0 {
			*field = def
		}
	}
	if c.HandshakeAttempts == 0 {
		c.HandshakeAttempts = 15
	}
	if c.HeartbeatFailures == 0 {
		c.HeartbeatFailures = 2
	}
	return c
}
