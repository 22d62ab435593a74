package enginesim

import "fmt"

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

// wire returns the generation that the engine uses.
func (v *vllm) wire() int { return v.e.cfg.Nixl.Wire }

// heldParams returns the kv_transfer_params of an answer whose engine holds
// blocks: prefill's, or decode's, which includes the expiry time. After the
// members of its generation come two that no release has, because a proxy must
// pass on unknown members.
func (v *vllm) heldParams(s *sequence, ids []blockID, decode bool, until any) object {
	w, c := v.wire(), v.e.cfg.Nixl
	host, port := s.rank.side.hostPort()
	o := obj("do_remote_prefill", !decode, "do_remote_decode", decode)
	if w < NixlWireGroups {
		o = o.with("remote_block_ids", ids)
	} else {
		o = o.with("remote_block_ids", [][]blockID{ids})
	}
	o = o.with("remote_engine_id", v.e.id)
	if w >= NixlWireRequestID {
		o = o.with("remote_request_id", s.id)
	}
	o = o.with("remote_host", host).with("remote_port", port).with("tp_size", c.TPSize)
	if w >= NixlWireSizes {
		o = o.with("dcp_size", 1).with("pp_size", c.PPSize)
	}
	if w >= NixlWireLease {
		o = o.with("remote_num_tokens", s.computed).with("remote_blocks_expiry_time", until)
	}
	if w >= NixlWireMode {
		o = o.with("transfer_mode", "pull")
	}
	o = v.e.withFuture(o.with("remote_prefill_cached_tokens", s.cachedLocal), s.id)
	if v.e.cfg.FutureParams {
		o = o.with("remote_regions", []any{obj("stride", 4096, "ratio", 0.5), nil})
	}
	return o
}

// checkWire rejects an unknown generation.
func (c NixlConfig) checkWire() error {
	if c.Wire < NixlWireFlat || c.Wire > NixlWireSizes {
		return fmt.Errorf("config nixl wire: %d is not from %d to %d", c.Wire, NixlWireFlat, NixlWireSizes)
	}
	return nil
}
