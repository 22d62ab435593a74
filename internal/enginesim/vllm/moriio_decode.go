package enginesim

import (
	"context"
	"errors"
	"time"
)

// await waits as a consumer for a producer's write. It returns with the
// sequence's blocks reserved and no slot held. After the producer has received
// the block ids, the blocks are held until the producer has written or the time
// is up, even if the client has left.
func (m *moriio) await(ctx context.Context, s *sequence, leg *moriioLeg) error {
	if err := s.rank.reserve(ctx, s, room(s), false); err != nil {
		m.release(leg)
		return err
	}
	key := moriioKey{s.rank.index, leg.transfer}
	wait := &moriioReceiving{rank: s.rank, done: make(chan struct{})}
	if !m.expect(key, wait) {
		return errLoad
	}
	local := s.blocks[s.computed/s.rank.cache.size : s.rank.cache.blocksFor(len(s.prompt))]
	s.rank.awaitKV(s)
	err := s.rank.waitLoading(func() error {
		if leg.tells(s.rank.index) && s.req.fault != failNotify {
			m.tell(m.e.ctx, leg.peer, leg.rank, packMap(
				"req_id", s.id, "transfer_id", leg.transfer, "block_notify_list", blockList(local),
				"decode_rank", s.rank.index, "type", "remote_blocks"))
		}
		limit := time.NewTimer(m.e.cfg.MoRIIO.ReceiveTimeout)
		defer limit.Stop()
		select {
		case <-wait.done:
			return nil
		case <-limit.C:
			return errNeverWritten
		case <-m.e.ctx.Done():
			return context.Cause(m.e.ctx)
		}
	})
	m.mu.Lock()
	delete(m.receiving, key)
	m.mu.Unlock()
	s.rank.receivedKV(s)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		m.e.cfg.Log.Error("KV load failed", "request", s.id, "error", err)
		return errLoad
	case s.req.fault == failLoad:
		return errLoad
	}
	m.e.stats.transfers.Add(1)
	m.arrived(s)
	return nil
}

// arrived records that the KV has arrived for the whole prompt except its last
// token.
func (m *moriio) arrived(s *sequence) {
	s.rank.loaded(s, len(s.prompt)-1)
	s.cached = len(s.prompt) - 1
}

// expect registers a wait for the producer's messages. It returns false if the
// transfer is already running.
func (m *moriio) expect(key moriioKey, wait *moriioReceiving) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.receiving[key] != nil {
		m.e.stats.duplicateIDs.Add(1)
		return false
	}
	m.receiving[key] = wait
	return true
}

// pull is a consumer's read. The connector assumes that the KV of a request
// without parameters, or without blocks, is already there. The request
// continues with the present content of its memory.
func (m *moriio) pull(ctx context.Context, s *sequence, leg *moriioLeg) error {
	remote := leg != nil && leg.remotePrefill && len(leg.blocks) > 0
	if err := s.rank.reserve(ctx, s, room(s), false); err != nil {
		if remote {
			m.release(leg)
		}
		return err
	}
	local := s.blocks[s.computed/s.rank.cache.size : s.rank.cache.blocksFor(len(s.prompt))]
	if !remote {
		m.e.cfg.Log.Error("decoding on KV that no engine wrote", "request", s.id)
		s.rank.store(local, s.rank.noise(local))
		m.arrived(s)
		return nil
	}
	blocks := leg.blocks
	if len(blocks) > len(local) {
		blocks = blocks[len(blocks)-len(local):]
	}
	if s.req.fault == failLoad {
		m.release(leg)
		return errLoad
	}
	err := s.rank.waitLoading(func() error {
		limit, cancel := context.WithTimeout(m.e.ctx, min(nixlReadTimeout, m.e.cfg.MoRIIO.ReceiveTimeout))
		defer cancel()
		answer, err := m.transfer(limit, s.rank, leg.peer, leg.rank, nil, sideMessage{
			Op: moriioRead, Key: leg.transfer, Blocks: blocks, Fields: leg.fields(),
		})
		if err != nil {
			return err
		}
		s.rank.store(local[len(local)-len(blocks):], answer.Payload)
		return nil
	})
	if s.req.fault != failNotify {
		m.release(leg)
	}
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		m.e.cfg.Log.Error("KV load failed", "request", s.id, "error", err)
		return errLoad
	}
	m.e.stats.transfers.Add(1)
	m.arrived(s)
	return nil
}

// release informs the producer that a transfer is over.
func (m *moriio) release(leg *moriioLeg) {
	m.tell(m.e.ctx, leg.peer, leg.rank, packMap("type", "release", "transfer_id", leg.transfer, "consumer_tp_size", m.e.cfg.MoRIIO.TPSize))
}

// rejected is called for a leg that the serving layer has rejected. The engine
// core does not know the request's id then: only the parameters name the
// producer.
func (m *moriio) rejected(parsed any) {
	leg, _ := parsed.(*moriioLeg)
	switch {
	case m.producer || leg == nil || !leg.remotePrefill:
	case leg.named.host == "" && m.read:
		m.e.crash("ValueError: cannot route MoRI-IO transfer")
	case leg.named.host == "":
		m.e.cfg.Log.Warn("cannot release blocks: missing remote notify address")
	default:
		gone := *leg
		gone.peer = leg.named
		m.e.spawn(func(context.Context) { m.release(&gone) })
	}
}

// errNoSession reports that a peer's handshake gave no valid metadata.
var errNoSession = errors.New("handshake: not the metadata of an engine")
