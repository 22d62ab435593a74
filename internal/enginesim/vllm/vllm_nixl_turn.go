package enginesim

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// keep pins the blocks of decode's answer, including the prompt, for the
// conversation's next turn. It returns the kv_transfer_params of the answer.
// The engine core has aborted a text that a stop string ended, and keeps
// nothing of it.
func (v *vllm) keep(s *sequence) any {
	if _, text := s.stopReason.(string); text {
		return nil
	}
	n := s.rank.cache.blocksFor(s.computed)
	if v.e.cfg.Nixl.Lookahead {
		n = len(s.blocks)
	}
	ids, ttl := s.blocks[:n], v.e.cfg.Nixl.KeepFor
	s.rank.pin(s, s.id, ttl)
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
func (v *vllm) loadTurn(ctx context.Context, s *sequence, leg *nixlLeg) error {
	if err := s.rank.reserve(ctx, s, room(s), false); err != nil {
		return err
	}
	if leg.missing {
		v.e.cfg.Log.Warn("invalid KVTransferParams", "request", s.id)
		return nil
	}
	known := min(leg.tokens, len(s.prompt))
	if count := known - s.computed; count <= 0 || count < v.e.cfg.Nixl.RecomputeThreshold {
		v.e.spawn(func(context.Context) {
			if err := v.shakeHands(s.rank, leg); err != nil {
				v.e.cfg.Log.Warn("handshake failed", "error", err)
				return
			}
			v.notifyDone(leg)
		})
		return nil
	}
	if s.req.fault == failLoad {
		return v.loadFailed(ctx)
	}
	err := s.rank.waitLoading(func() error {
		if err := v.shakeHands(s.rank, leg); err != nil {
			return err
		}
		if leg.until > 0 && time.Now().Add(turnMargin).After(time.UnixMilli(int64(leg.until*1000))) {
			v.e.stats.leasesExpired.Add(1)
			return errExpired
		}
		return v.pullTurn(ctx, s, leg, known)
	})
	if err != nil {
		v.e.cfg.Log.Error("KV load failed", "request", s.id, "error", err)
		return v.loadFailed(ctx)
	}
	return ctx.Err()
}

// pullTurn reads the blocks of the first known tokens that are not in the local
// prefix cache: of the blocks that the peer has named, the last ones, as many
// as are missing (base_worker.py, _apply_prefix_caching).
func (v *vllm) pullTurn(ctx context.Context, s *sequence, leg *nixlLeg, known int) error {
	local := s.blocks[s.computed/s.rank.cache.size : s.rank.cache.blocksFor(known)]
	if len(local) > len(leg.blocks) {
		v.e.crash("assertion num_decode_blocks <= len(prefill_group)")
		return errEngineCore
	}
	remote := leg.blocks[len(leg.blocks)-len(local):]
	limit, cancel := context.WithTimeout(v.e.ctx, nixlReadTimeout)
	defer cancel()
	answer, err := s.rank.side.call(limit, leg.address(), sideMessage{
		Op: nixlRead, Engine: leg.engine, Key: leg.request, Blocks: remote, Fields: leg.fields(),
	})
	if err != nil {
		return fmt.Errorf("read the turn before: %w", err)
	}
	v.notifyDone(leg)
	s.rank.store(local, answer.Payload)
	v.e.stats.transfers.Add(1)
	if ctx.Err() == nil {
		s.rank.loaded(s, min(known, len(s.prompt)-1))
	}
	return nil
}
