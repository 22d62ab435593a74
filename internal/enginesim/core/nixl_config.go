package core

import (
	"cmp"
	"fmt"
	"time"
)

// NixlConfig holds the settings of a simulated vLLM engine with a NIXL
// connector. The zero value of a field means its default, which is the real
// engine's unless stated otherwise.
type NixlConfig struct {
	// EngineID is the engine's id (--kv-transfer-config engine_id); with several
	// ranks, rank r's in push mode is that and _dpR. Default: a random one.
	EngineID string
	// Wire is the generation of kv_transfer_params in pull mode, one of the
	// NixlWire constants; default the newest.
	Wire int
	// Recompute is kv_load_failure_policy "recompute": decode computes the KV
	// that it could not load. Default "fail": the request fails.
	Recompute bool
	// TPSize and PPSize are the sizes that the engine announces; default 1.
	// Each rank of a wider decode reports its read to prefill.
	TPSize, PPSize int
	// Bidirectional is bidirectional_kv_xfer, in pull mode: decode keeps the
	// blocks of its answers, and prefill pulls blocks that a request names.
	Bidirectional bool
	// KeepFor is decoder_kv_blocks_ttl; default 480 s.
	KeepFor time.Duration
	// RecomputeThreshold is kv_recompute_threshold: prefill computes fewer
	// tokens than that itself and does not pull them. Default 64; -1 is none.
	RecomputeThreshold int
	// Lookahead makes decode reserve memory for one token more than it uses,
	// and name that memory too.
	Lookahead bool
	// ReclaimAfter is the time that decode in push mode holds the blocks of a
	// request whose client has left, if no prefill has written into them. A
	// later write is rejected. Default 0, forever: vLLM issue 46283.
	ReclaimAfter time.Duration
}

// WithDefaults returns the config with every zero field set, or an error that
// names the invalid field.
func (c NixlConfig) withDefaults() (NixlConfig, error) {
	for name, field := range map[string]*int{"tp size": &c.TPSize, "pp size": &c.PPSize} {
		if *field < 0 {
			return c, fmt.Errorf("config nixl %s: %d is negative", name, *field)
		}
		*field = max(1, *field)
	}
	if c.Wire == 0 {
		c.Wire = NixlWireSizes
	}
	if c.Bidirectional && c.Wire < NixlWireLease {
		return c, fmt.Errorf("config nixl bidirectional: wire %d has no such transfers", c.Wire)
	}
	if c.KeepFor < 0 {
		return c, fmt.Errorf("config nixl keep for: %v is negative", c.KeepFor)
	}
	c.KeepFor = cmp.Or(c.KeepFor, 480*time.Second)
	c.RecomputeThreshold = cmp.Or(c.RecomputeThreshold, 64)
	if c.ReclaimAfter < 0 {
		return c, fmt.Errorf("config nixl reclaim after: %v is negative", c.ReclaimAfter)
	}
	return c, c.checkWire()
}

// Generations of the NixlConnector's kv_transfer_params in pull mode. Each has the name
// of its new part.
const (
	// NixlWireFlat, since 2025-06 (vLLM pull request 19413): one flat list of
	// blocks, tp_size. Requests have the id that the proxy gave them, and
	// decode notifies prefill of a read by its own request's id: both legs must
	// have the same id.
	NixlWireFlat = 1 + iota
	// NixlWireRequestID, since 2025-12 (29665, 27987): remote_request_id, since
	// the engines add a random suffix to ids.
	NixlWireRequestID
	// NixlWireGroups, since 2026-03 (35758): a list of blocks for each KV cache
	// group.
	NixlWireGroups
	// NixlWireLease, since 2026-05 (32553, 41269, 41383, 47021): the blocks are
	// also kept when the first token ends the text; decode renews leases;
	// rejected requests free their blocks; remote_num_tokens and
	// remote_blocks_expiry_time.
	NixlWireLease
	// NixlWireMode, since 2026-08 (50620): transfer_mode.
	NixlWireMode
	// NixlWireSizes, later: dcp_size and pp_size.
	NixlWireSizes
)

// checkWire rejects an unknown generation.
func (c NixlConfig) checkWire() error {
	if c.Wire < NixlWireFlat || c.Wire > NixlWireSizes {
		return fmt.Errorf("config nixl wire: %d is not from %d to %d", c.Wire, NixlWireFlat, NixlWireSizes)
	}
	return nil
}
