package enginesim

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"
)

// sglangRoom is a bootstrap room on the prefill side. sglang.mu guards its
// fields. Legs with one room share it, as they share the room's state in the
// real engine: a duplicate of a live room sends its KV to the same decode.
type sglangRoom struct {
	id   int64
	legs map[*sglangLeg]bool
	// info is decode's message; ready is closed when it has arrived.
	info  *decodeInfo
	ready chan struct{}
	// sent: the KV of one leg has arrived.
	sent bool
}

// decodeInfo is the destination of a room's KV.
type decodeInfo struct {
	session string // decode's engine id
	addr    string // its rank's side channel
	blocks  []blockID
}

// Operations of the side channel between SGLang engines. They replace its ZMQ
// frames and RDMA writes.
const (
	opIndices = "indices" // decode to prefill: the reserved blocks
	opAbort   = "abort"   // decode to prefill: decode has given up the room
	opKV      = "kv"      // prefill to decode: blocks, first token, success
	opFailed  = "failed"  // prefill to decode: the transfer has failed
)

// notifyTimeout bounds a one-way message (SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT).
const notifyTimeout = time.Second

// errPrefillDead is the message to decode about a failed prefill leg.
const errPrefillDead = "Failed to get kvcache from prefill instance, it might be dead"

// prefill runs the prefill leg: wait for decode's indices, compute, push the
// KV, then answer with one token.
func (g *sglang) prefill(ctx context.Context, s *sequence, leg *sglangLeg, emit func(token)) error {
	r := g.prefillRank(s.req.Rank, leg.room)
	s.rank = r
	defer r.release(s)
	if err := g.claimRank(leg, r.index); err != nil {
		return err
	}
	fake := leg.host == fakeBootstrapHost
	var rm *sglangRoom
	if !fake {
		rm = g.joinRoom(leg)
		defer g.leaveRoom(rm, leg)
		if err := g.awaitIndices(ctx, r, rm, leg); err != nil {
			return err
		}
	}
	q := &g.queues[r.index]
	q.inflight.Add(1)
	defer q.inflight.Add(-1)
	s.limit = 1
	err := r.reserve(ctx, s, len(s.prompt), true)
	if err == nil {
		err = r.prefill(ctx, s)
	}
	if err == nil {
		err = r.decode(ctx, s, func(token) {})
	}
	if err == nil && !fake && s.req.fault != failNoParams {
		r.releaseSlot(s)
		err = g.push(ctx, r, rm, s, leg)
	}
	if err != nil {
		if ctx.Err() != nil {
			return g.interrupted(ctx, phasePrefillTransfer, leg)
		}
		return err
	}
	s.finish, s.stopReason = "length", nil
	emit(s.output[0])
	return nil
}

// prefillRank selects a request's rank: the rank that the request names; otherwise the room or a
// round robin determines the rank.
func (g *sglang) prefillRank(want int, room int64) *rank {
	if want < 0 && g.cfg.LoadBalance == balanceFollowRoom {
		want = int(uint64(room) % uint64(len(g.e.ranks)))
	}
	return g.e.pickRank(want)
}

// claimRank registers the rank of the room for decode, unless decode can derive
// it or the request named it. A rank that contradicts the room fails
// (CommonKVSender.__init__).
func (g *sglang) claimRank(leg *sglangLeg, rank int) error {
	size := len(g.e.ranks)
	if size == 1 || leg.prefillRank >= 0 || leg.host == fakeBootstrapHost {
		return nil
	}
	implied := int(uint64(leg.room) % uint64(size))
	switch {
	case g.cfg.LoadBalance == balanceFollowRoom && rank == implied:
	case g.cfg.LoadBalance == balanceFollowRoom && !g.cfg.ForceQueryRank:
		return kvError(phasePrefillBootstrap, leg, fmt.Sprintf(
			"follow_bootstrap_room conflict: dispatched to dp_rank %d but bootstrap_room %d implies dp_rank %d. "+
				"Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing.", rank, leg.room, implied))
	default:
		g.boot.register(leg.room, rank)
	}
	return nil
}

// room returns the room of an id, made on first use; mu is held.
func (g *sglang) room(id int64) *sglangRoom {
	rm := g.rooms[id]
	if rm == nil {
		rm = &sglangRoom{id: id, legs: make(map[*sglangLeg]bool), ready: make(chan struct{})}
		g.rooms[id] = rm
	}
	return rm
}

// joinRoom enters a prefill leg into its room, which decode may have opened.
func (g *sglang) joinRoom(leg *sglangLeg) *sglangRoom {
	g.mu.Lock()
	defer g.mu.Unlock()
	rm := g.room(leg.room)
	if len(rm.legs) > 0 {
		g.e.stats.duplicateIDs.Add(1)
	}
	rm.legs[leg] = true
	return rm
}

// leaveRoom ends a leg in its room. The last leg clears the room and, when no
// KV has been sent, informs a decode that is already waiting.
func (g *sglang) leaveRoom(rm *sglangRoom, leg *sglangLeg) {
	if info := g.clearRoom(rm, leg); info != nil {
		g.notify(g.e.ranks[0], info.addr, sideMessage{Op: opFailed, Engine: info.session, Key: roomKey(rm.id)})
	}
}

// clearRoom removes a leg from its room. It returns the decode that must be informed of
// the failure, nil for none.
func (g *sglang) clearRoom(rm *sglangRoom, leg *sglangLeg) *decodeInfo {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(rm.legs, leg)
	if len(rm.legs) > 0 {
		return nil
	}
	if g.rooms[rm.id] == rm {
		delete(g.rooms, rm.id)
	}
	if rm.sent {
		return nil
	}
	return rm.info
}

func roomKey(room int64) string { return strconv.FormatInt(room, 10) }

// notify sends a message whose answer is ignored. It takes at most
// notifyTimeout. An engine that is ending sends none.
func (g *sglang) notify(r *rank, addr string, m sideMessage) {
	if g.e.hasEnded() {
		return
	}
	ctx, cancel := context.WithTimeout(g.e.ctx, notifyTimeout)
	defer cancel()
	if _, err := r.side.call(ctx, addr, m); err != nil {
		g.e.cfg.Log.Debug("notify peer", "op", m.Op, "room", m.Key, "error", err)
	}
}

// awaitIndices holds a leg in the bootstrap queue until decode's indices have
// arrived.
func (g *sglang) awaitIndices(ctx context.Context, r *rank, rm *sglangRoom, leg *sglangLeg) error {
	q := &g.queues[r.index]
	q.bootstrap.Add(1)
	defer q.bootstrap.Add(-1)
	limit := time.NewTimer(g.cfg.BootstrapTimeout)
	defer limit.Stop()
	return r.waitLoading(func() error {
		select {
		case <-rm.ready:
			return nil
		case <-limit.C:
			return kvError(phasePrefillBootstrap, leg, fmt.Sprintf("Request %d timed out after %.1fs in KVPoll.Bootstrapping",
				leg.room, g.cfg.BootstrapTimeout.Seconds()))
		case <-ctx.Done():
			return g.interrupted(ctx, phasePrefillBootstrap, leg)
		}
	})
}

// push sends the KV of the prompt and the metadata buffer: first token, cached
// tokens and the room, by which decode checks that the buffer is its own. If
// prefill has more blocks than decode has reserved, it does not send the rest.
func (g *sglang) push(ctx context.Context, r *rank, rm *sglangRoom, s *sequence, leg *sglangLeg) error {
	g.mu.Lock()
	info := rm.info
	g.mu.Unlock()
	if info == nil {
		return context.Cause(ctx) // decode has given up the room
	}
	if err := r.side.setUp(ctx, info.addr, info.session); err != nil {
		return err
	}
	own := s.blocks[:r.cache.blocksFor(len(s.prompt))]
	n := min(len(own), len(info.blocks))
	payload, begun := r.content(own[:n]), time.Now()
	_, err := r.side.call(ctx, info.addr, sideMessage{
		Op: opKV, Engine: info.session, Key: roomKey(leg.room), Blocks: info.blocks[:n],
		Fields: map[string]string{
			"bootstrap_room": roomKey(leg.room), "first_token": strconv.Itoa(int(s.output[0])),
			"cached_tokens": strconv.Itoa(s.cached),
		},
		Payload: payload,
	})
	if err == nil {
		g.queues[r.index].movedBytes.Store(int64(len(payload)))
		g.queues[r.index].movedIn.Store(int64(time.Since(begun)))
		g.mu.Lock()
		rm.sent = true
		g.mu.Unlock()
		return nil
	}
	if ctx.Err() != nil {
		return err
	}
	g.e.cfg.Log.Error("push kv", "room", leg.room, "error", err)
	return kvError(phasePrefillTransfer, leg, fmt.Sprintf("Decode instance could be dead, remote mooncake session %s is not alive", info.session))
}

// message answers a peer engine. Messages of a room may arrive at any rank.
func (g *sglang) message(_ context.Context, _ *rank, m sideMessage) (sideMessage, error) {
	room, err := strconv.ParseInt(m.Key, 10, 64)
	if err != nil {
		return sideMessage{}, fmt.Errorf("room %q: not a number", m.Key)
	}
	switch m.Op {
	case opIndices:
		err = g.indices(room, m)
	case opAbort:
		g.roomGivenUp(room)
	case opKV:
		err = g.receive(room, m)
	case opFailed:
		g.mu.Lock()
		if recv := g.receivers[room]; recv != nil {
			recv.leg.cancel(&transferFailure{errPrefillDead})
		}
		g.mu.Unlock()
	default:
		err = fmt.Errorf("unknown message %q", m.Op)
	}
	return sideMessage{Op: m.Op}, err
}

// indices records decode's blocks for a room. The prefill leg may not be here yet.
func (g *sglang) indices(room int64, m sideMessage) error {
	addr := net.JoinHostPort(m.Fields["host"], m.Fields["port"])
	if g.mode != modePrefill {
		return fmt.Errorf("indices: not a prefill engine")
	}
	if m.Fields["backend"] != g.cfg.TransferBackend { // no engine understands it, so none answers
		return fmt.Errorf("indices: of backend %q", m.Fields["backend"])
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	rm := g.room(room)
	first := rm.info == nil
	rm.info = &decodeInfo{session: m.Fields["session"], addr: addr, blocks: m.Blocks}
	if first {
		close(rm.ready)
	}
	return nil
}

// roomGivenUp ends the legs of a room that decode has aborted. Indices without
// a prefill leg are dropped: a later leg waits for its timeout.
func (g *sglang) roomGivenUp(room int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	rm := g.rooms[room]
	if rm == nil {
		return
	}
	delete(g.rooms, room)
	rm.info = nil
	for leg := range rm.legs {
		leg.cancel(&transferFailure{errAbortReq.Error()})
	}
}
