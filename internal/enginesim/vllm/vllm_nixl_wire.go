package enginesim

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
	o = withFuture(v.e, o.with("remote_prefill_cached_tokens", s.cachedLocal), s.id)
	if v.e.cfg.FutureParams {
		o = o.with("remote_regions", []any{obj("stride", 4096, "ratio", 0.5), nil})
	}
	return o
}
