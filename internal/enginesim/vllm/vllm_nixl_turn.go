package vllm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// keep pins the blocks of decode's answer, including the prompt, for the
// conversation's next turn. It returns the kv_transfer_params of the answer.
// The engine core has aborted a text that a stop string ended, and keeps
// nothing of it.
func (v *VLLM) keep(s *core.Sequence) any {
	if _, text := s.StopReason.(string); text {
		return nil
	}
	n := s.Rank.Cache.BlocksFor(s.Computed)
	if v.e.Cfg.Nixl.Lookahead {
		n = len(s.Blocks)
	}
	ids, ttl := s.Blocks[:n], v.e.Cfg.Nixl.KeepFor
	s.Rank.Pin(s, s.ID, ttl)
	return v.heldParams(s, ids, true, float64(time.Now().Add(ttl).UnixMilli())/1000)
}

// turnMargin is the time before their expiry from which prefill treats blocks
// as lost (pull_worker.py, _KV_BLOCKS_EXPIRY_SAFETY_MARGIN).
const turnMargin = 5 * time.Second

var errExpired = errors.New("declining an expired remote read")

// loadTurn gets the KV that decode kept of the previous turn and frees it
// there. Decode reports the number of tokens; prefill does not know which
// tokens they were. If there are few tokens to read, it only frees them. It
// returns with the sequence's blocks reserved and no slot held.
func (v *VLLM) loadTurn(ctx context.Context, s *core.Sequence, leg *nixlLeg) error {
	if err := s.Rank.Reserve(ctx, s, core.Room(s), false); err != nil {
		return err
	}
	if leg.missing {
		v.e.Cfg.Log.Warn("invalid KVTransferParams", "request", s.ID)
		return nil
	}
	known := min(leg.tokens, len(s.Prompt))
	if count := known - s.Computed; count <= 0 || count < v.e.Cfg.Nixl.RecomputeThreshold {
		v.e.Spawn(func(context.Context) {
			if err := v.shakeHands(s.Rank, leg); err != nil {
				v.e.Cfg.Log.Warn("handshake failed", "error", err)
				return
			}
			v.notifyDone(leg)
		})
		return nil
	}
	if s.Req.Fault == core.FailLoad {
		return v.loadFailed(ctx)
	}
	err := s.Rank.WaitLoading(func() error {
		if err := v.shakeHands(s.Rank, leg); err != nil {
			return err
		}
		if leg.until > 0 && time.Now().Add(turnMargin).After(time.UnixMilli(int64(leg.until*1000))) {
			v.e.Stats.LeasesExpired.Add(1)
			return errExpired
		}
		return v.pullTurn(ctx, s, leg, known)
	})
	if err != nil {
		v.e.Cfg.Log.Error("KV load failed", "request", s.ID, "error", err)
		return v.loadFailed(ctx)
	}
	return ctx.Err()
}

// pullTurn reads the blocks of the first known tokens that are not in the local
// prefix cache: of the blocks that the peer has named, the last ones, as many
// as are missing (base_worker.py, _apply_prefix_caching).
func (v *VLLM) pullTurn(ctx context.Context, s *core.Sequence, leg *nixlLeg, known int) error {
	local := s.Blocks[s.Computed/s.Rank.Cache.Size : s.Rank.Cache.BlocksFor(known)]
	if len(local) > len(leg.blocks) {
		v.e.Crash("assertion num_decode_blocks <= len(prefill_group)")
		return errEngineCore
	}
	remote := leg.blocks[len(leg.blocks)-len(local):]
	limit, cancel := context.WithTimeout(v.e.Ctx, nixlReadTimeout)
	defer cancel()
	answer, err := s.Rank.Side.Call(limit, leg.address(), core.SideMessage{
		Op: NixlRead, Engine: leg.engine, Key: leg.request, Blocks: remote, Fields: leg.fields(),
	})
	if err != nil {
		return fmt.Errorf("read the turn before: %w", err)
	}
	v.notifyDone(leg)
	s.Rank.Store(local, answer.Payload)
	v.e.Stats.Transfers.Add(1)
	if ctx.Err() == nil {
		s.Rank.Loaded(s, min(known, len(s.Prompt)-1))
	}
	return nil
}
