package vllm

import (
	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// wire returns the generation that the engine uses.
func (v *VLLM) wire() int { return v.e.Cfg.Nixl.Wire }

// heldParams returns the kv_transfer_params of an answer whose engine holds
// blocks: prefill's, or decode's, which includes the expiry time. After the
// members of its generation come two that no release has, because a proxy must
// pass on unknown members.
func (v *VLLM) heldParams(s *core.Sequence, ids []core.BlockID, decode bool, until any) core.Object {
	w, c := v.wire(), v.e.Cfg.Nixl
	host, port := s.Rank.Side.HostPort()
	o := core.Obj("do_remote_prefill", !decode, "do_remote_decode", decode)
	if w < core.NixlWireGroups {
		o = o.With("remote_block_ids", ids)
	} else {
		o = o.With("remote_block_ids", [][]core.BlockID{ids})
	}
	o = o.With("remote_engine_id", v.e.UUID)
	if w >= core.NixlWireRequestID {
		o = o.With("remote_request_id", s.ID)
	}
	o = o.With("remote_host", host).With("remote_port", port).With("tp_size", c.TPSize)
	if w >= core.NixlWireSizes {
		o = o.With("dcp_size", 1).With("pp_size", c.PPSize)
	}
	if w >= core.NixlWireLease {
		o = o.With("remote_num_tokens", s.Computed).With("remote_blocks_expiry_time", until)
	}
	if w >= core.NixlWireMode {
		o = o.With("transfer_mode", "pull")
	}
	if !decode { // v1/core/sched/scheduler.py, update_from_output
		o = o.With("remote_prefill_cached_tokens", s.CachedLocal)
	}
	o = withFuture(v.e, o, s.ID)
	if v.e.Cfg.FutureParams {
		o = o.With("remote_regions", []any{core.Obj("stride", 4096, "ratio", 0.5), nil})
	}
	return o
}
