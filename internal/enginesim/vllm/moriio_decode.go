package vllm

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// await waits as a consumer for a producer's write. It returns with the
// sequence's blocks reserved and no slot held. After the producer has received
// the block ids, the blocks are held until the producer has written or the time
// is up, even if the client has left.
func (m *MoRIIO) await(ctx context.Context, s *core.Sequence, leg *MoRIIOLeg) error {
	if err := s.Rank.Reserve(ctx, s, core.Room(s), false); err != nil {
		m.Release(leg)
		return err
	}
	key := moriioKey{s.Rank.Index, leg.Transfer}
	wait := &moriioReceiving{rank: s.Rank, done: make(chan struct{})}
	if !m.expect(key, wait) {
		return errLoad
	}
	local := s.Blocks[s.Computed/s.Rank.Cache.Size : s.Rank.Cache.BlocksFor(len(s.Prompt))]
	s.Rank.AwaitKV(s)
	err := s.Rank.WaitLoading(func() error {
		if leg.tells(s.Rank.Index) && s.Req.Fault != core.FailNotify {
			m.tell(m.e.Ctx, leg.Peer, leg.rank, PackMap(
				"req_id", s.ID, "transfer_id", leg.Transfer, "block_notify_list", blockList(local),
				"decode_rank", s.Rank.Index, "type", "remote_blocks"))
		}
		limit := time.NewTimer(m.e.Cfg.MoRIIO.ReceiveTimeout)
		defer limit.Stop()
		select {
		case <-wait.done:
			return nil
		case <-limit.C:
			return errNeverWritten
		case <-m.e.Ctx.Done():
			return context.Cause(m.e.Ctx)
		}
	})
	m.mu.Lock()
	delete(m.receiving, key)
	m.mu.Unlock()
	s.Rank.ReceivedKV(s)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		m.e.Cfg.Log.Error("KV load failed", "request", s.ID, "error", err)
		return errLoad
	case s.Req.Fault == core.FailLoad:
		return errLoad
	}
	m.e.Stats.Transfers.Add(1)
	m.arrived(s)
	return nil
}

// arrived records that the KV has arrived for the whole prompt except its last
// token.
func (m *MoRIIO) arrived(s *core.Sequence) {
	s.Rank.Loaded(s, len(s.Prompt)-1)
	s.Cached = len(s.Prompt) - 1
}

// expect registers a wait for the producer's messages. It returns false if the
// transfer is already running.
func (m *MoRIIO) expect(key moriioKey, wait *moriioReceiving) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.receiving[key] != nil {
		m.e.Stats.DuplicateIDs.Add(1)
		return false
	}
	m.receiving[key] = wait
	return true
}

// pull is a consumer's read. The connector assumes that the KV of a request
// without parameters, or without blocks, is already there. The request
// continues with the present content of its memory.
func (m *MoRIIO) pull(ctx context.Context, s *core.Sequence, leg *MoRIIOLeg) error {
	remote := leg != nil && leg.remotePrefill && len(leg.blocks) > 0
	if err := s.Rank.Reserve(ctx, s, core.Room(s), false); err != nil {
		if remote {
			m.Release(leg)
		}
		return err
	}
	local := s.Blocks[s.Computed/s.Rank.Cache.Size : s.Rank.Cache.BlocksFor(len(s.Prompt))]
	if !remote {
		m.e.Cfg.Log.Error("decoding on KV that no engine wrote", "request", s.ID)
		s.Rank.Store(local, s.Rank.Noise(local))
		m.arrived(s)
		return nil
	}
	blocks := leg.blocks
	if len(blocks) > len(local) {
		blocks = blocks[len(blocks)-len(local):]
	}
	if s.Req.Fault == core.FailLoad {
		m.Release(leg)
		return errLoad
	}
	err := s.Rank.WaitLoading(func() error {
		limit, cancel := context.WithTimeout(m.e.Ctx, min(nixlReadTimeout, m.e.Cfg.MoRIIO.ReceiveTimeout))
		defer cancel()
		answer, err := m.transfer(limit, s.Rank, leg.Peer, leg.rank, nil, core.SideMessage{
			Op: moriioRead, Key: leg.Transfer, Blocks: blocks, Fields: leg.fields(),
		})
		if err != nil {
			return err
		}
		s.Rank.Store(local[len(local)-len(blocks):], answer.Payload)
		return nil
	})
	if s.Req.Fault != core.FailNotify {
		m.Release(leg)
	}
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		m.e.Cfg.Log.Error("KV load failed", "request", s.ID, "error", err)
		return errLoad
	}
	m.e.Stats.Transfers.Add(1)
	m.arrived(s)
	return nil
}

// Release informs the producer that a transfer is over.
func (m *MoRIIO) Release(leg *MoRIIOLeg) {
	m.tell(m.e.Ctx, leg.Peer, leg.rank, PackMap("type", "release", "transfer_id", leg.Transfer, "consumer_tp_size", m.e.Cfg.MoRIIO.TPSize))
}

// rejected is called for a leg that the serving layer has rejected. The engine
// core does not know the request's id then: only the parameters name the
// producer.
func (m *MoRIIO) rejected(parsed any) {
	leg, _ := parsed.(*MoRIIOLeg)
	switch {
	case m.producer || leg == nil || !leg.remotePrefill:
	case leg.named.Host == "" && m.read:
		m.e.Crash("ValueError: cannot route MoRI-IO transfer")
	case leg.named.Host == "":
		m.e.Cfg.Log.Warn("cannot release blocks: missing remote notify address")
	default:
		gone := *leg
		gone.Peer = leg.named
		m.e.Spawn(func(context.Context) { m.Release(&gone) })
	}
}

// errNoSession reports that a peer's handshake gave no valid metadata.
var errNoSession = errors.New("handshake: not the metadata of an engine")
