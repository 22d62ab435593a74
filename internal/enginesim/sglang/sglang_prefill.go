package sglang

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// sglangRoom is a bootstrap room on the prefill side. sglang.mu guards its
// fields. Legs with one room share it, as they share the room's state in the
// real engine: a duplicate of a live room sends its KV to the same decode.
type sglangRoom struct {
	id   int64
	legs map[*sglangLeg]bool
	// Info is decode's message; ready is closed when it has arrived.
	Info  *DecodeInfo
	ready chan struct{}
	// sent: the KV of one leg has arrived.
	sent bool
}

// DecodeInfo is the destination of a room's KV.
type DecodeInfo struct {
	Session string // decode's engine id
	Addr    string // its rank's side channel
	Blocks  []core.BlockID
}

// Operations of the side channel between SGLang engines. They replace its ZMQ
// frames and RDMA writes.
const (
	opIndices = "indices" // decode to prefill: the reserved blocks
	opAbort   = "abort"   // decode to prefill: decode has given up the room
	OpKV      = "kv"      // prefill to decode: blocks, first token, success
	opFailed  = "failed"  // prefill to decode: the transfer has failed
)

// notifyTimeout bounds a one-way message (SGLANG_DISAGGREGATION_ZMQ_SEND_TIMEOUT).
const notifyTimeout = time.Second

// errPrefillDead is the message to decode about a failed prefill leg.
const errPrefillDead = "Failed to get kvcache from prefill instance, it might be dead"

// prefill runs the prefill leg: wait for decode's indices, compute, push the
// KV, then answer with one token.
func (g *SGLang) prefill(ctx context.Context, s *core.Sequence, leg *sglangLeg, emit func(core.Token)) error {
	r := g.prefillRank(s.Req.Rank, leg.room)
	s.Rank = r
	defer r.Release(s)
	if err := g.claimRank(leg, r.Index); err != nil {
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
	q := &g.Queues[r.Index]
	q.inflight.Add(1)
	defer q.inflight.Add(-1)
	s.Limit = 1
	err := r.Reserve(ctx, s, len(s.Prompt), true)
	if err == nil {
		err = r.Prefill(ctx, s)
	}
	if err == nil {
		err = r.Decode(ctx, s, func(core.Token) {})
	}
	if err == nil && !fake && s.Req.Fault != core.FailNoParams {
		r.ReleaseSlot(s)
		err = g.push(ctx, r, rm, s, leg)
	}
	if err != nil {
		if ctx.Err() != nil {
			return g.interrupted(ctx, phasePrefillTransfer, leg)
		}
		return err
	}
	s.Finish, s.StopReason = "length", nil
	emit(s.Output[0])
	return nil
}

// prefillRank selects a request's rank: the rank that the request names; otherwise the room or a
// round robin determines the rank.
func (g *SGLang) prefillRank(want int, room int64) *core.Rank {
	if want < 0 && g.cfg.LoadBalance == core.BalanceFollowRoom {
		want = int(uint64(room) % uint64(len(g.e.Ranks)))
	}
	return g.e.PickRank(want)
}

// claimRank registers the rank of the room for decode, unless decode can derive
// it or the request named it. A rank that contradicts the room fails
// (CommonKVSender.__init__).
func (g *SGLang) claimRank(leg *sglangLeg, rank int) error {
	size := len(g.e.Ranks)
	if size == 1 || leg.prefillRank >= 0 || leg.host == fakeBootstrapHost {
		return nil
	}
	implied := int(uint64(leg.room) % uint64(size))
	switch {
	case g.cfg.LoadBalance == core.BalanceFollowRoom && rank == implied:
	case g.cfg.LoadBalance == core.BalanceFollowRoom && !g.cfg.ForceQueryRank:
		return kvError(phasePrefillBootstrap, leg, fmt.Sprintf(
			"follow_bootstrap_room conflict: dispatched to dp_rank %d but bootstrap_room %d implies dp_rank %d. "+
				"Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing.", rank, leg.room, implied))
	default:
		g.Boot.Register(leg.room, rank)
	}
	return nil
}

// room returns the room of an id, made on first use; mu is held.
func (g *SGLang) room(id int64) *sglangRoom {
	rm := g.Rooms[id]
	if rm == nil {
		rm = &sglangRoom{id: id, legs: make(map[*sglangLeg]bool), ready: make(chan struct{})}
		g.Rooms[id] = rm
	}
	return rm
}

// joinRoom enters a prefill leg into its room, which decode may have opened.
func (g *SGLang) joinRoom(leg *sglangLeg) *sglangRoom {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	rm := g.room(leg.room)
	if len(rm.legs) > 0 {
		g.e.Stats.DuplicateIDs.Add(1)
	}
	rm.legs[leg] = true
	return rm
}

// leaveRoom ends a leg in its room. The last leg clears the room and, when no
// KV has been sent, informs a decode that is already waiting.
func (g *SGLang) leaveRoom(rm *sglangRoom, leg *sglangLeg) {
	if info := g.clearRoom(rm, leg); info != nil {
		g.notify(g.e.Ranks[0], info.Addr, core.SideMessage{Op: opFailed, Engine: info.Session, Key: roomKey(rm.id)})
	}
}

// clearRoom removes a leg from its room. It returns the decode that must be informed of
// the failure, nil for none.
func (g *SGLang) clearRoom(rm *sglangRoom, leg *sglangLeg) *DecodeInfo {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	delete(rm.legs, leg)
	if len(rm.legs) > 0 {
		return nil
	}
	if g.Rooms[rm.id] == rm {
		delete(g.Rooms, rm.id)
	}
	if rm.sent {
		return nil
	}
	return rm.Info
}

func roomKey(room int64) string { return strconv.FormatInt(room, 10) }

// notify sends a message whose answer is ignored. It takes at most
// notifyTimeout. An engine that is ending sends none.
func (g *SGLang) notify(r *core.Rank, addr string, m core.SideMessage) {
	if g.e.HasEnded() {
		return
	}
	ctx, cancel := context.WithTimeout(g.e.Ctx, notifyTimeout)
	defer cancel()
	if _, err := r.Side.Call(ctx, addr, m); err != nil {
		g.e.Cfg.Log.Debug("notify peer", "op", m.Op, "room", m.Key, "error", err)
	}
}

// awaitIndices holds a leg in the bootstrap queue until decode's indices have
// arrived.
func (g *SGLang) awaitIndices(ctx context.Context, r *core.Rank, rm *sglangRoom, leg *sglangLeg) error {
	q := &g.Queues[r.Index]
	q.Bootstrap.Add(1)
	defer q.Bootstrap.Add(-1)
	limit := time.NewTimer(g.cfg.BootstrapTimeout)
	defer limit.Stop()
	return r.WaitLoading(func() error {
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
func (g *SGLang) push(ctx context.Context, r *core.Rank, rm *sglangRoom, s *core.Sequence, leg *sglangLeg) error {
	g.Mu.Lock()
	info := rm.Info
	g.Mu.Unlock()
	if info == nil {
		return context.Cause(ctx) // decode has given up the room
	}
	if err := r.Side.SetUp(ctx, info.Addr, info.Session); err != nil {
		return err
	}
	own := s.Blocks[:r.Cache.BlocksFor(len(s.Prompt))]
	n := min(len(own), len(info.Blocks))
	payload, begun := r.Content(own[:n]), time.Now()
	_, err := r.Side.Call(ctx, info.Addr, core.SideMessage{
		Op: OpKV, Engine: info.Session, Key: roomKey(leg.room), Blocks: info.Blocks[:n],
		Fields: map[string]string{
			"bootstrap_room": roomKey(leg.room), "first_token": strconv.Itoa(int(s.Output[0])),
			"cached_tokens": strconv.Itoa(s.Cached),
		},
		Payload: payload,
	})
	if err == nil {
		g.Queues[r.Index].movedBytes.Store(int64(len(payload)))
		g.Queues[r.Index].movedIn.Store(int64(time.Since(begun)))
		g.Mu.Lock()
		rm.sent = true
		g.Mu.Unlock()
		return nil
	}
	if ctx.Err() != nil {
		return err
	}
	g.e.Cfg.Log.Error("push kv", "room", leg.room, "error", err)
	return kvError(phasePrefillTransfer, leg, fmt.Sprintf("Decode instance could be dead, remote mooncake session %s is not alive", info.Session))
}

// Message answers a peer engine. Messages of a room may arrive at any rank.
func (g *SGLang) Message(_ context.Context, _ *core.Rank, m core.SideMessage) (core.SideMessage, error) {
	room, err := strconv.ParseInt(m.Key, 10, 64)
	if err != nil {
		return core.SideMessage{}, fmt.Errorf("room %q: not a number", m.Key)
	}
	switch m.Op {
	case opIndices:
		err = g.indices(room, m)
	case opAbort:
		g.roomGivenUp(room)
	case OpKV:
		err = g.receive(room, m)
	case opFailed:
		g.Mu.Lock()
		if recv := g.receivers[room]; recv != nil {
			recv.leg.cancel(&transferFailure{errPrefillDead})
		}
		g.Mu.Unlock()
	default:
		err = fmt.Errorf("unknown message %q", m.Op)
	}
	return core.SideMessage{Op: m.Op}, err
}

// indices records decode's blocks for a room. The prefill leg may not be here yet.
func (g *SGLang) indices(room int64, m core.SideMessage) error {
	addr := net.JoinHostPort(m.Fields["host"], m.Fields["port"])
	if g.mode != modePrefill {
		return fmt.Errorf("indices: not a prefill engine")
	}
	if m.Fields["backend"] != g.cfg.TransferBackend { // no engine understands it, so none answers
		return fmt.Errorf("indices: of backend %q", m.Fields["backend"])
	}
	g.Mu.Lock()
	defer g.Mu.Unlock()
	rm := g.room(room)
	first := rm.Info == nil
	rm.Info = &DecodeInfo{Session: m.Fields["session"], Addr: addr, Blocks: m.Blocks}
	if first {
		close(rm.ready)
	}
	return nil
}

// roomGivenUp ends the legs of a room that decode has aborted. Indices without
// a prefill leg are dropped: a later leg waits for its timeout.
func (g *SGLang) roomGivenUp(room int64) {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	rm := g.Rooms[room]
	if rm == nil {
		return
	}
	delete(g.Rooms, room)
	rm.Info = nil
	for leg := range rm.legs {
		leg.cancel(&transferFailure{errAbortReq.Error()})
	}
}
