package sglang

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// sglangReceiver is a decode leg that has reserved its blocks and sent their
// indices.
type sglangReceiver struct {
	leg    *sglangLeg
	rank   *core.Rank
	addr   string // the prefill's bootstrap registry
	blocks []core.BlockID
	refuse bool // the fault "load"
	// done is closed when the KV and the metadata have arrived.
	done chan struct{}
	meta transferMetadata
}

// transferMetadata is the buffer that is sent with the KV.
type transferMetadata struct {
	room   int64
	first  core.Token
	cached int
}

// sglangPrefill is decode's knowledge of a prefill engine.
type sglangPrefill struct {
	topology prefillTopology
	ranks    map[int]string // side channel addresses, by rank
	misses   int            // consecutive missed heartbeats
}

// rankPoll is the pause between two /query_dp_ranks calls.
const rankPoll = 20 * time.Millisecond

// decode runs the decode leg: find the prefill, reserve, send the indices, wait
// for the KV, then continue decoding after the first token.
func (g *SGLang) decode(ctx context.Context, s *core.Sequence, leg *sglangLeg, emit func(core.Token)) error {
	r := g.e.PickRank(s.Req.Rank)
	s.Rank = r
	defer r.Release(s)
	if leg.host == fakeBootstrapHost {
		if err := r.Reserve(ctx, s, core.Room(s), true); err != nil {
			return g.ended(s, err, emit)
		}
		s.Computed = len(s.Prompt) // whatever the content of the blocks
		return g.ended(s, r.Decode(ctx, s, emit), emit)
	}
	if err := g.transfer(ctx, r, s, leg); err != nil {
		return err
	}
	err := r.AcquireSlot(ctx, s)
	if err == nil {
		err = r.Decode(ctx, s, emit)
	}
	return g.ended(s, err, emit)
}

// transfer gets the prompt's KV and the first token for the sequence.
func (g *SGLang) transfer(ctx context.Context, r *core.Rank, s *core.Sequence, leg *sglangLeg) error {
	q := &g.Queues[r.Index]
	q.Prealloc.Add(1)
	addr, peer, err := g.handshake(ctx, leg)
	if err == nil {
		q.ready.Add(1)
		err = r.Reserve(ctx, s, core.Room(s), false)
		q.ready.Add(-1)
	}
	q.Prealloc.Add(-1)
	if err != nil {
		if ctx.Err() != nil {
			return g.interrupted(ctx, phaseDecodeHandshake, leg)
		}
		return err
	}
	q.transfer.Add(1)
	defer q.transfer.Add(-1)
	recv := &sglangReceiver{
		leg: leg, rank: r, addr: addr, done: make(chan struct{}), refuse: s.Req.Fault == core.FailLoad,
		blocks: s.Blocks[:r.Cache.BlocksFor(len(s.Prompt))],
	}
	r.AwaitKV(s)
	g.expect(recv)
	err = r.WaitLoading(func() error { return g.awaitKV(ctx, recv, peer) })
	g.unexpect(recv)
	r.ReceivedKV(s)
	if err != nil {
		g.notify(r, peer, core.SideMessage{Op: opAbort, Key: roomKey(leg.room)})
		return err
	}
	if recv.meta.room != leg.room {
		return &core.APIError{Status: http.StatusInternalServerError, Type: "500", Message: "Metadata corruption detected - bootstrap_room mismatch"}
	}
	s.Replay = []core.Token{recv.meta.first}
	r.Loaded(s, len(s.Prompt))
	s.Cached = recv.meta.cached
	return nil
}

// expect registers a receiver for the peer's messages. Of two receivers with
// one room, the newer gets the KV.
func (g *SGLang) expect(recv *sglangReceiver) {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	if g.receivers[recv.leg.room] != nil {
		g.e.Stats.DuplicateIDs.Add(1)
	}
	g.receivers[recv.leg.room] = recv
}

func (g *SGLang) unexpect(recv *sglangReceiver) {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	if g.receivers[recv.leg.room] == recv {
		delete(g.receivers, recv.leg.room)
	}
}

// AwaitKV sends the indices to the prefill rank at peer, which never rejects
// them, and waits for the KV. An abort of the meantime is sent after the
// indices, as on the engine's only socket to that rank.
func (g *SGLang) awaitKV(ctx context.Context, recv *sglangReceiver, peer string) error {
	host, port := recv.rank.Side.HostPort()
	g.notify(recv.rank, peer, core.SideMessage{
		Op: opIndices, Key: roomKey(recv.leg.room), Blocks: slices.Clone(recv.blocks),
		Fields: map[string]string{"session": g.e.UUID, "host": host, "port": strconv.Itoa(port), "backend": g.cfg.TransferBackend},
	})
	limit := time.NewTimer(g.cfg.WaitingTimeout)
	defer limit.Stop()
	select {
	case <-recv.done:
		return nil
	case <-limit.C:
		g.forgetRanks(recv.addr)
		return kvError(phaseDecodeTransfer, recv.leg, fmt.Sprintf("Request %d timed out after %.1fs in KVPoll.WaitingForInput",
			recv.leg.room, g.cfg.WaitingTimeout.Seconds()))
	case <-ctx.Done():
		return g.interrupted(ctx, phaseDecodeTransfer, recv.leg)
	}
}

// receive stores the KV that a prefill pushes for a room.
func (g *SGLang) receive(room int64, m core.SideMessage) error {
	first, err1 := strconv.Atoi(m.Fields["first_token"])
	cached, err2 := strconv.Atoi(m.Fields["cached_tokens"])
	meta, err3 := strconv.ParseInt(m.Fields["bootstrap_room"], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil || !core.Token(first).Valid() {
		return errors.New("kv: malformed metadata")
	}
	g.Mu.Lock()
	defer g.Mu.Unlock()
	recv := g.receivers[room]
	if recv == nil {
		return errors.New("kv: no such room")
	}
	if recv.refuse {
		recv.leg.cancel(&transferFailure{errPrefillDead})
		return errors.New("kv: transfer failed")
	}
	if len(m.Blocks) > len(recv.blocks) || !slices.Equal(m.Blocks, recv.blocks[:len(m.Blocks)]) ||
		len(m.Payload) != len(m.Blocks)*recv.rank.Cache.Size*core.BytesPerKV {
		return errors.New("kv: blocks not reserved")
	}
	delete(g.receivers, room)
	recv.rank.Store(m.Blocks, m.Payload)
	recv.meta = transferMetadata{room: meta, first: core.Token(first), cached: cached}
	g.e.Stats.Transfers.Add(1)
	close(recv.done)
	return nil
}

// handshake finds the side channel address of the prefill rank of the room. It requests
// the topology from each registry once, then the rank, then the rank's address.
func (g *SGLang) handshake(ctx context.Context, leg *sglangLeg) (addr, peer string, err error) {
	port := leg.port
	if port == 0 {
		if port = g.e.Cfg.BootstrapPort; port == 0 {
			port = core.DefaultBootstrapPort
		}
	}
	addr = net.JoinHostPort(leg.host, strconv.Itoa(port))
	topology, err := g.topology(ctx, addr, leg)
	if err != nil {
		return addr, "", err
	}
	if a, b := max(g.cfg.TPSize, topology.AttnTPSize), min(g.cfg.TPSize, topology.AttnTPSize); a%b != 0 {
		// Integer division maps some of decode's ranks to no rank of prefill.
		return addr, "", kvError(phaseDecodeHandshake, leg, fmt.Sprintf(
			"Could not fetch bootstrap info for: prefill_dp_rank: 0 prefill_cp_rank: 0 target_tp_rank: %d and target_pp_rank 0", b))
	}
	rank := leg.prefillRank
	switch {
	case rank >= 0:
	case topology.DPSize == 1:
		rank = 0
	case topology.FollowBootstrapRoom && !g.cfg.ForceQueryRank:
		rank = int(uint64(leg.room) % uint64(topology.DPSize))
	default:
		if rank, err = g.queryRank(ctx, addr, leg.room); err != nil {
			return addr, "", err
		}
	}
	peer, err = g.rankAddress(ctx, addr, rank)
	if err != nil {
		return addr, "", kvError(phaseDecodeHandshake, leg, fmt.Sprintf(
			"Could not fetch bootstrap info for: prefill_dp_rank: %d prefill_cp_rank: 0 target_tp_rank: 0 and target_pp_rank 0", rank))
	}
	return addr, peer, nil
}

// topology returns the registry's sentinel answer, cached. An incompatible pair
// ends the engine, as the exception in its scheduler does.
func (g *SGLang) topology(ctx context.Context, addr string, leg *sglangLeg) (prefillTopology, error) {
	for attempt := 1; ; attempt++ {
		g.Mu.Lock()
		known := g.Prefills[addr]
		g.Mu.Unlock()
		if known != nil {
			return known.topology, nil
		}
		var t prefillTopology
		err := g.ask(ctx, http.MethodGet, "http://"+addr+"/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1", nil, &t)
		if err == nil {
			if !g.fits(t) {
				g.e.Cfg.Log.Error("prefill does not fit", "registry", addr, "topology", fmt.Sprintf("%+v", t))
				g.e.Kill()
				return t, core.ErrEnded
			}
			g.Mu.Lock()
			g.Prefills[addr] = &sglangPrefill{topology: t, ranks: make(map[int]string)}
			g.Mu.Unlock()
			return t, nil
		}
		if attempt >= g.cfg.HandshakeAttempts {
			g.e.Cfg.Log.Error("could not fetch prefill parallel info", "registry", addr, "attempts", attempt)
			return t, kvError(phaseDecodeHandshake, leg, errAbortReq.Error())
		}
		if err := core.Sleep(ctx, g.cfg.HandshakeInterval); err != nil {
			return t, err
		}
	}
}

// fits does the checks of a prefill in decode's scheduler, which ends when one
// fails. They include the sizes of _resolve_rank_mapping.
func (g *SGLang) fits(t prefillTopology) bool {
	return t.PageSize == g.e.Cfg.BlockSize && t.KVCacheDtype == g.cfg.KVCacheDtype &&
		(g.cfg.PPSize == t.PPSize || g.cfg.PPSize == 1)
}

// queryRank requests the rank of a room from the registry until the registry knows it.
func (g *SGLang) queryRank(ctx context.Context, addr string, room int64) (int, error) {
	body, _ := json.Marshal(map[string][]int64{"bootstrap_rooms": {room}})
	for {
		var found map[string]int
		if g.ask(ctx, http.MethodPost, "http://"+addr+"/query_dp_ranks", body, &found) == nil {
			if rank, ok := found[roomKey(room)]; ok {
				return rank, nil
			}
		}
		if err := core.Sleep(ctx, rankPoll); err != nil {
			return 0, err
		}
	}
}

// rankAddress returns the side channel address of a prefill rank. It is cached
// while the registry answers heartbeats, or until a wait for the KV times out.
func (g *SGLang) rankAddress(ctx context.Context, addr string, rank int) (string, error) {
	g.Mu.Lock()
	if p := g.Prefills[addr]; p != nil && p.ranks[rank] != "" {
		defer g.Mu.Unlock()
		return p.ranks[rank], nil
	}
	g.Mu.Unlock()
	var a rankAddress
	url := fmt.Sprintf("http://%s/route?prefill_dp_rank=%d&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", addr, rank)
	if err := g.ask(ctx, http.MethodGet, url, nil, &a); err != nil {
		return "", err
	}
	peer := net.JoinHostPort(a.IP, strconv.Itoa(a.Port))
	g.Mu.Lock()
	defer g.Mu.Unlock()
	if p := g.Prefills[addr]; p != nil {
		p.ranks[rank] = peer
	}
	return peer, nil
}

// forgetRanks drops the ranks' addresses of a registry: the process of the prefill may be another
// one (common/conn.py, invalidate_cached_bootstrap_infos). An aborted request drops nothing.
func (g *SGLang) forgetRanks(addr string) {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	if p := g.Prefills[addr]; p != nil {
		clear(p.ranks)
	}
}

// askTimeout bounds a call to a registry.
const askTimeout = 5 * time.Second

// ask calls a bootstrap registry and decodes a 200 answer into v.
func (g *SGLang) ask(ctx context.Context, method, url string, body []byte, v any) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("ask registry: %w", err)
	}
	resp, err := g.http.Do(req)
	if err != nil {
		return fmt.Errorf("ask registry: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("ask registry: status %d", resp.StatusCode)
	}
	if v == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	return json.NewDecoder(resp.Body).Decode(v)
}

// heartbeat watches every registry that decode knows. After too many missed heartbeats
// decode drops the registry. Then decode contacts a restarted prefill again, and the legs
// that wait for the old registry fail.
func (g *SGLang) heartbeat(ctx context.Context) {
	for core.Sleep(ctx, g.cfg.HeartbeatInterval) == nil {
		g.Mu.Lock()
		addrs := make([]string, 0, len(g.Prefills))
		for addr := range g.Prefills {
			addrs = append(addrs, addr)
		}
		g.Mu.Unlock()
		for _, addr := range addrs {
			g.noteHeartbeat(addr, g.ask(ctx, http.MethodGet, "http://"+addr+"/health", nil, nil) == nil)
		}
	}
}

// noteHeartbeat records the result of one heartbeat.
func (g *SGLang) noteHeartbeat(addr string, alive bool) {
	g.Mu.Lock()
	defer g.Mu.Unlock()
	p := g.Prefills[addr]
	switch {
	case p == nil:
	case alive:
		p.misses = 0
	case p.misses+1 < g.cfg.HeartbeatFailures:
		p.misses++
	default:
		delete(g.Prefills, addr)
		for _, recv := range g.receivers {
			if recv.addr == addr {
				recv.leg.cancel(&transferFailure{fmt.Sprintf("Lost connection with prefill instance (bootstrap_addr: %s)", addr)})
			}
		}
	}
}
