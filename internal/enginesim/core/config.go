package core

import (
	"cmp"
	"fmt"
	"log/slog"
	"time"
)

// Connectors that an engine can use.
const (
	// ConnectorVLLMNixl is the NixlConnector in its pull mode,
	// ConnectorVLLMNixlPush in push mode.
	ConnectorVLLMNixl     = "vllm-nixl"
	ConnectorVLLMNixlPush = "vllm-nixl-push"
	// ConnectorVLLMStore is any connector to a KV cache that engines share.
	ConnectorVLLMStore = "vllm-store"
	// ConnectorVLLMMoRIIO is the MoRIIOConnector in WRITE mode,
	// ConnectorVLLMMoRIIORead in READ mode.
	ConnectorVLLMMoRIIO     = "vllm-moriio"
	ConnectorVLLMMoRIIORead = "vllm-moriio-read"
	ConnectorVLLMMooncake   = "vllm-mooncake"
	ConnectorVLLMP2PTier    = "vllm-p2p-tier"
	ConnectorSGLang         = "sglang"
	ConnectorTRTLLM         = "trtllm"
	ConnectorNone           = "none"
)

// Connectors are all connectors.
var Connectors = []string{
	ConnectorVLLMNixl, ConnectorVLLMNixlPush, ConnectorVLLMStore, ConnectorVLLMMoRIIO, ConnectorVLLMMoRIIORead,
	ConnectorVLLMMooncake, ConnectorVLLMP2PTier, ConnectorSGLang, ConnectorTRTLLM, ConnectorNone,
}

// Roles of an engine.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
	RoleBoth    = "both"
	// RoleEncode is a vLLM encoder, which processes images and sounds.
	RoleEncode = "encode"
)

// Roles are all roles.
var Roles = []string{RolePrefill, RoleDecode, RoleBoth, RoleEncode}

// Config holds all settings of one simulated engine. The zero value of a field
// means its default.
type Config struct {
	// Connector is one of the Connector constants; default "none".
	Connector string
	// Role is one of the Role constants; default "both".
	Role string
	// Listen is the HTTP address; default "127.0.0.1:0" (an ephemeral port).
	Listen string
	// Name is used in logs only; default the connector and role.
	Name string
	// Model is the served model's name and the seed of its weights: engines
	// that exchange KV must agree on it. Default "sim".
	Model string
	// KVBlocks is the number of KV blocks of each rank; default 4096.
	KVBlocks int
	// BlockSize is the number of tokens in a block; default 16.
	BlockSize int
	// Ranks is the number of data-parallel ranks, each with its own cache,
	// slots and side channel; default 1.
	Ranks int
	// SideChannelPort is rank 0's side channel port, rank r listens on
	// SideChannelPort+r; 0 picks ephemeral ports.
	SideChannelPort int
	// BootstrapPort is the port of the bootstrap server of a prefill engine of
	// sglang or vllm-mooncake; 0 picks an ephemeral port.
	BootstrapPort int
	// FutureParams adds members to kv_transfer_params that no release of vLLM has: an
	// integer that no float64 can represent, a text with many escapes, and a list.
	// Decode then fails if a proxy did not pass them on unchanged. Default false, as
	// in the real engine.
	FutureParams bool
	// OnPrompt is called with the text of each prompt that the engine begins to
	// serve, by several goroutines at once; default none.
	OnPrompt func(prompt string)
	// Lease is the time for which the blocks of a finished prefill wait for a transfer to
	// begin; default 30 s, for trtllm 60 s, for vllm-mooncake 480 s.
	Lease time.Duration
	// HandshakeTimeout is how long vLLM's decode waits for a prefill engine's side
	// channel that does not answer or does not exist; default 5 s, as there.
	HandshakeTimeout time.Duration
	// ConnectDelay is how long the first transfer between a rank of this engine and
	// one of a peer waits until their connection is set up, on the side that opens
	// it; 0, the default, is instant.
	ConnectDelay time.Duration
	// PrefillUsPerToken is the time, in microseconds, of one uncached prompt
	// token; 0 is instant.
	PrefillUsPerToken int
	// DecodeUsPerToken is the time, in microseconds, of one decoded token; 0 is
	// instant.
	DecodeUsPerToken int
	// MaxRunning is the number of sequences that a rank computes at once;
	// default 256.
	MaxRunning int
	// SSEKeepAlive is vLLM's --sse-keep-alive-interval: a stream without events
	// for that long gets a comment. 0, the default: never.
	SSEKeepAlive time.Duration
	// DropLoadErrors makes vLLM's streams drop the error of a request whose KV could not be
	// loaded, as in releases that skip outputs without a token before they look at the
	// reason for the end (entrypoints/openai/chat_completion/serving.py): the stream ends
	// as if the answer were complete.
	DropLoadErrors bool
	// DevMode is VLLM_SERVER_DEV_MODE=1: vLLM's routes of the sleep mode exist.
	DevMode bool
	// WakeTime is how long vLLM takes to wake up; 0, the default, is instant.
	WakeTime time.Duration
	// Fail is "RATE:KIND": the share of requests (0..1) that get the fault
	// KIND; see faults.go. Empty: none.
	Fail string
	// DieAfter kills the engine abruptly when request number DieAfter+1
	// arrives; 0: never.
	DieAfter int
	// Hang is the phase in which requests hang; see faults.go. Empty: none.
	Hang string
	// Seed drives every random choice of the engine except its engine id;
	// default 1.
	Seed uint64
	// KVEvents configures the publication of changes of the prefix cache.
	KVEvents KVEventsConfig
	// Etcd is the etcd in which the engine registers, "http://HOST:PORT". A
	// trtllm worker registers as trtllm-serve does, any other engine as a
	// record for pdproxy. Empty: no registration.
	Etcd string
	// ECDir is the directory in which vLLM's encoders store their results for other
	// engines. Empty: every engine encodes its own parts.
	ECDir string
	// WrongTokens makes the tokenize endpoints return ids that differ from
	// those that the engine computes for the same request.
	WrongTokens bool
	// NoScaleOut is vLLM without --enable-scale-out: /inference/v1/generate and the routes
	// that render answer 403.
	NoScaleOut bool
	// Store is the directory that vllm-store engines share; "" for none.
	Store string
	// Version is the release of vLLM; default "0.32.0+sim". Releases before
	// 0.21 fail on forced tool calls whose text is cut off after one token; a
	// version 0.1 does not. Streams name the blocks that another engine may read
	// since 0.33.
	Version string
	// LoRA is for the connectors of vLLM.
	LoRA LoRAConfig
	// Nixl, SGLang, TRTLLM, MoRIIO and Mooncake are the settings of those
	// connectors alone.
	Nixl     NixlConfig
	SGLang   SGLangConfig
	MoRIIO   MoRIIOConfig
	Mooncake MooncakeConfig
	P2PTier  P2PTierConfig
	TRTLLM   TRTLLMConfig
	// Log receives the log lines that the real engine would write; default discards.
	Log *slog.Logger
}

// WithDefaults returns the config with every zero field set, or an error that
// names the invalid field.
func (c Config) withDefaults() (Config, error) {
	text := func(field *string, def string) {
		if *field == "" {
			*field = def
		}
	}
	text(&c.Connector, ConnectorNone)
	text(&c.Role, RoleBoth)
	text(&c.Listen, "127.0.0.1:0")
	text(&c.Name, c.Connector+"-"+c.Role)
	text(&c.Model, "sim")
	text(&c.Version, "0.32.0+sim")
	number := func(field *int, def int) {
		if *field == 0 {
			*field = def
		}
	}
	number(&c.KVBlocks, 4096)
	number(&c.BlockSize, 16)
	number(&c.Ranks, 1)
	number(&c.MaxRunning, 256)
	c.TRTLLM = c.TRTLLM.WithDefaults(c.Lease)
	if c.Mooncake.AbortTimeout == 0 {
		c.Mooncake.AbortTimeout = cmp.Or(c.Lease, 480*time.Second)
	}
	if c.Lease == 0 {
		c.Lease = 30 * time.Second
	}
	if c.HandshakeTimeout == 0 {
		c.HandshakeTimeout = 5 * time.Second
	}
	if c.Seed == 0 {
		c.Seed = 1
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.SGLang = c.SGLang.WithDefaults(c.Role)
	c.MoRIIO, c.P2PTier = c.MoRIIO.withDefaults(), c.P2PTier.withDefaults()
	var err error
	if c.Nixl, err = c.Nixl.withDefaults(); err != nil {
		return c, err
	}
	if c.LoRA, err = c.LoRA.withDefaults(c.Connector); err != nil {
		return c, err
	}
	if c.TRTLLM.Wire < TRTLLMWireG1 || c.TRTLLM.Wire > TRTLLMWireG3 {
		return c, fmt.Errorf("config trtllm wire: %d is not 1, 2 or 3", c.TRTLLM.Wire)
	}
	if err := c.KVEvents.check(c.Connector); err != nil {
		return c, err
	}
	switch c.Role {
	case RolePrefill, RoleDecode, RoleBoth:
	case RoleEncode:
		if c.ECDir == "" || c.Connector == ConnectorSGLang || c.Connector == ConnectorTRTLLM {
			return c, fmt.Errorf("config role: %q needs a connector of vLLM and a directory", c.Role)
		}
	default:
		return c, fmt.Errorf("config role: %q is not prefill, decode, both or encode", c.Role)
	}
	for name, v := range map[string]int{
		"kv blocks": c.KVBlocks, "block size": c.BlockSize, "ranks": c.Ranks, "max running": c.MaxRunning,
		"side channel port": c.SideChannelPort, "bootstrap port": c.BootstrapPort, "die after": c.DieAfter,
		"handshake port": c.MoRIIO.HandshakePort, "notify port": c.MoRIIO.NotifyPort, "tp size": c.MoRIIO.TPSize,
		"prefill us per token": c.PrefillUsPerToken, "decode us per token": c.DecodeUsPerToken,
		"lease": int(c.Lease), "connect delay": int(c.ConnectDelay), "handshake timeout": int(c.HandshakeTimeout), "sse keep alive": int(c.SSEKeepAlive),
		"mooncake abort timeout": int(c.Mooncake.AbortTimeout),
	} {
		if v < 0 {
			return c, fmt.Errorf("config %s: %d is negative", name, v)
		}
	}
	return c, nil
}

// MooncakeConfig holds the settings of a simulated vLLM engine with the
// MooncakeConnector.
type MooncakeConfig struct {
	// AbortTimeout is the time that prefill holds blocks without a reader, and waits for
	// a prefill that decode has requested. Decode waits an eighth longer. Default: the
	// lease, else 480 s, as VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT.
	AbortTimeout time.Duration
}

// P2PTierConfig holds the settings of a simulated vLLM engine with the P2P tier.
type P2PTierConfig struct {
	// UnboundTimeout is the time that a producer keeps blocks that no consumer
	// fetches; default 60 s.
	UnboundTimeout time.Duration
	// LoadTimeout is the time that a consumer waits for blocks; default 30 s.
	LoadTimeout time.Duration
}

func (c P2PTierConfig) withDefaults() P2PTierConfig {
	if c.UnboundTimeout == 0 {
		c.UnboundTimeout = 60 * time.Second
	}
	if c.LoadTimeout == 0 {
		c.LoadTimeout = 30 * time.Second
	}
	return c
}
