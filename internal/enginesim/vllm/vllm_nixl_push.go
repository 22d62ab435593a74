package vllm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// Side channel operations of the NixlConnector's push mode. The real engines
// send the registration and the notice of a write as NIXL notifications.
const (
	pushRegister = "nixl-push-reg"
	pushWrite    = "nixl-push-write"
)

// nixlPush is vLLM's NixlPushConnector. Decode registers its reserved blocks
// with prefill. Prefill writes into them when it has computed the prompt.
// Either may come first. Both requests' engine ids, without the random suffix,
// identify the transfer.
//
// Source: vLLM, distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py
// and push_worker.py.
type nixlPush struct {
	v *VLLM

	Mu sync.Mutex
	// finished are prefill's prompts for which no decode has registered.
	// registered are the decodes whose prompt is not computed yet. Both are
	// indexed by rank and the engine's own id.
	finished   map[pushKey][]core.BlockID
	Registered map[pushKey]pushRegistration
	// receiving are decode's requests that wait for a write.
	receiving map[pushKey]chan struct{}
}

// pushKey is a request on one rank of an engine.
type pushKey struct {
	rank    int
	request string
}

// pushRegistration is the destination of a prompt's KV in a decode engine.
type pushRegistration struct {
	engine, address, request string
	blocks                   []core.BlockID
}

func newNixlPush(v *VLLM) *nixlPush {
	return &nixlPush{
		v: v, finished: make(map[pushKey][]core.BlockID),
		Registered: make(map[pushKey]pushRegistration), receiving: make(map[pushKey]chan struct{}),
	}
}

// randomSuffix is the suffix that an engine adds to the id of a request.
var randomSuffix = regexp.MustCompile(`-[0-9a-f]{8}$`)

// same reports whether two requests are the legs of one exchange.
func (k pushKey) same(o pushKey) bool {
	return k.rank == o.rank && randomSuffix.ReplaceAllString(k.request, "") == randomSuffix.ReplaceAllString(o.request, "")
}

// engineID returns the id of a rank: each rank is a separate engine.
func (p *nixlPush) engineID(r *core.Rank) string {
	if len(p.v.e.Ranks) == 1 {
		return p.v.e.UUID
	}
	return fmt.Sprintf("%s_dp%d", p.v.e.UUID, r.Index)
}

// await registers a request's blocks with prefill and waits until they are
// written. It returns with them reserved and no slot held. They stay reserved
// until the write, even if the client has left, and no limit bounds that.
func (p *nixlPush) await(ctx context.Context, s *core.Sequence, leg *nixlLeg) error {
	if leg.missing || leg.tpSize == 0 {
		p.v.e.Crash("KeyError in the registration of a request")
		return errEngineCore
	}
	if err := s.Rank.Reserve(ctx, s, core.Room(s), false); err != nil {
		return err // prefill is not informed
	}
	key := pushKey{s.Rank.Index, s.ID}
	written := make(chan struct{})
	p.Mu.Lock()
	p.receiving[key] = written
	p.Mu.Unlock()
	s.Rank.AwaitKV(s)
	err := s.Rank.WaitLoading(func() error {
		if s.Req.Fault == core.FailLoad {
			return errNoSession
		}
		if err := p.register(s, leg); err != nil {
			return err
		}
		return p.waitWritten(ctx, written)
	})
	p.Mu.Lock()
	delete(p.receiving, key)
	p.Mu.Unlock()
	s.Rank.ReceivedKV(s)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		p.v.e.Cfg.Log.Error("KV load failed", "request", s.ID, "error", err)
		return p.v.loadFailed(ctx)
	}
	p.v.e.Stats.Transfers.Add(1)
	s.Rank.Loaded(s, len(s.Prompt)-1)
	s.Cached = len(s.Prompt) - 1
	return nil
}

// waitWritten waits until prefill has written. After the client has left, it
// waits at most ReclaimAfter.
func (p *nixlPush) waitWritten(ctx context.Context, written <-chan struct{}) error {
	select {
	case <-written:
		return nil
	case <-p.v.e.Ctx.Done():
		return context.Cause(p.v.e.Ctx)
	case <-ctx.Done():
	}
	var reclaim <-chan time.Time
	if d := p.v.e.Cfg.Nixl.ReclaimAfter; d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		reclaim = t.C
	}
	select {
	case <-written:
		return nil
	case <-p.v.e.Ctx.Done():
		return context.Cause(p.v.e.Ctx)
	case <-reclaim:
		p.v.e.Cfg.Log.Warn("reclaiming KV blocks that no engine has written")
		return errNeverWritten
	}
}

// register does the handshake with the prefill engine that the request names,
// and sends it the blocks that are not in the local prefix cache.
func (p *nixlPush) register(s *core.Sequence, leg *nixlLeg) error {
	ctx, cancel := context.WithTimeout(p.v.e.Ctx, p.v.e.Cfg.HandshakeTimeout)
	defer cancel()
	if err := s.Rank.Side.SetUp(ctx, leg.address(), leg.engine); err != nil {
		return err
	}
	call := func(m core.SideMessage) error {
		_, err := s.Rank.Side.Call(ctx, leg.address(), m)
		if err != nil && !errors.Is(err, core.ErrPeer) {
			<-ctx.Done() // a ZMQ socket keeps trying to connect
		}
		return err
	}
	if err := call(p.handshake(leg.engine, leg.tpSize, leg.ppSize)); err != nil || s.Req.Fault == core.FailNotify {
		return err
	}
	host, port := s.Rank.Side.HostPort()
	local := s.Blocks[s.Computed/s.Rank.Cache.Size : s.Rank.Cache.BlocksFor(len(s.Prompt))]
	return call(core.SideMessage{Op: pushRegister, Key: s.ID, Blocks: local, Fields: map[string]string{
		"decode_engine_id": p.engineID(s.Rank), "decode_host": host, "decode_port": strconv.Itoa(port),
		"decode_tp_size": strconv.Itoa(p.v.e.Cfg.Nixl.TPSize), "remote_engine_id": leg.engine,
	}})
}

// handshake requests a peer's metadata and returns it. tp and pp are the expected sizes.
func (p *nixlPush) handshake(engine string, tp, pp int) core.SideMessage {
	return core.SideMessage{Op: NixlHandshake, Fields: map[string]string{
		"engine": engine, "hash": p.v.compatibility(), "tp": strconv.Itoa(tp), "pp": strconv.Itoa(pp),
	}}
}

// hold keeps a finished prefill's blocks for the time of a lease, and returns
// the parameters of its answer.
func (p *nixlPush) hold(s *core.Sequence) any {
	if s.Req.Fault == core.FailNoParams {
		return nil
	}
	ids := s.Blocks[:s.Rank.Cache.BlocksFor(s.Computed)]
	s.Rank.Pin(s, s.ID, p.v.e.Cfg.Lease)
	key := pushKey{s.Rank.Index, s.ID}
	p.Mu.Lock()
	p.finished[key] = ids
	for k, reg := range p.Registered {
		if k.same(key) {
			delete(p.Registered, k)
			p.Start(s.Rank, key, reg)
			break
		}
	}
	p.Mu.Unlock()
	host, port := s.Rank.Side.HostPort()
	return core.Obj(
		"do_remote_prefill", true, "do_remote_decode", false,
		"remote_block_ids", [][]core.BlockID{ids}, "remote_engine_id", p.engineID(s.Rank), "remote_request_id", s.ID,
		"remote_host", host, "remote_port", port, "tp_size", p.v.e.Cfg.Nixl.TPSize, "pp_size", p.v.e.Cfg.Nixl.PPSize,
		"remote_num_tokens", s.Computed, "transfer_mode", "push",
	)
}

// Start writes a prompt's KV; mu is held.
func (p *nixlPush) Start(r *core.Rank, key pushKey, reg pushRegistration) {
	blocks := p.finished[key]
	delete(p.finished, key)
	p.v.e.Spawn(func(ctx context.Context) { p.write(ctx, r, key.request, blocks, reg) })
}

// write writes a prompt's KV into decode's blocks, which are the last ones of
// the prompt, and frees prefill's. If the write fails, the lease frees the
// blocks, and decode is not informed.
func (p *nixlPush) write(ctx context.Context, r *core.Rank, request string, blocks []core.BlockID, reg pushRegistration) {
	ctx, cancel := context.WithTimeout(ctx, nixlReadTimeout)
	defer cancel()
	if len(reg.blocks) > len(blocks) {
		p.v.e.Cfg.Log.Error("push block-count mismatch", "request", request, "local", len(blocks), "remote", len(reg.blocks))
		return
	}
	err := r.Side.SetUp(ctx, reg.address, reg.engine)
	if err == nil {
		_, err = r.Side.Call(ctx, reg.address, p.handshake(reg.engine, 0, 0))
	}
	if err == nil {
		payload := r.ReadPinned(request, blocks[len(blocks)-len(reg.blocks):])
		_, err = r.Side.Call(ctx, reg.address, core.SideMessage{Op: pushWrite, Key: reg.request, Blocks: reg.blocks, Payload: payload})
	}
	if err != nil {
		p.v.e.Cfg.Log.Error("KV write failed", "request", request, "error", err)
		return
	}
	r.Unpin(request)
}

// Message answers the peer of a transfer.
func (p *nixlPush) Message(r *core.Rank, m core.SideMessage) (core.SideMessage, error) {
	answer := core.SideMessage{Op: m.Op}
	switch m.Op {
	case NixlHandshake:
		return answer, p.checkPeer(r, m.Fields)
	case pushRegister:
		return answer, p.registration(r, m)
	case pushWrite:
		return answer, p.written(r, m)
	}
	return answer, errors.New("unknown message")
}

// checkPeer rejects a peer that expects another engine, or that is not
// compatible. The peer does not know sizes of 0.
func (p *nixlPush) checkPeer(r *core.Rank, f map[string]string) error {
	c := p.v.e.Cfg.Nixl
	switch tp, pp := f["tp"], f["pp"]; {
	case f["engine"] != p.engineID(r):
		return errors.New("engine id mismatch")
	case f["hash"] != p.v.compatibility():
		return errors.New("handshake: compatibility hash mismatch")
	case tp != "0" && tp != strconv.Itoa(c.TPSize), pp != "0" && pp != strconv.Itoa(c.PPSize):
		return errors.New("handshake: no such rank")
	}
	return nil
}

// registration records a decode's registration, and writes when the prompt is computed. A
// prompt whose lease has ended no longer exists.
func (p *nixlPush) registration(r *core.Rank, m core.SideMessage) error {
	if m.Fields["remote_engine_id"] != p.engineID(r) {
		return errors.New("engine id mismatch")
	}
	key := pushKey{r.Index, m.Key}
	reg := pushRegistration{
		engine: m.Fields["decode_engine_id"], request: m.Key, blocks: m.Blocks,
		address: net.JoinHostPort(m.Fields["decode_host"], m.Fields["decode_port"]),
	}
	p.Mu.Lock()
	defer p.Mu.Unlock()
	for k := range p.finished {
		if r.Pinned(k.request) == nil && k.rank == r.Index {
			delete(p.finished, k)
		}
	}
	for k := range p.finished {
		if k.same(key) {
			p.Start(r, k, reg)
			return nil
		}
	}
	p.Registered[key] = reg
	return nil
}

// written handles prefill's notice of a write, unless the blocks were reclaimed.
func (p *nixlPush) written(r *core.Rank, m core.SideMessage) error {
	for _, id := range m.Blocks {
		if id < 0 || int(id) >= p.v.e.Cfg.KVBlocks {
			return errors.New("block id out of range")
		}
	}
	key := pushKey{r.Index, m.Key}
	p.Mu.Lock()
	done := p.receiving[key]
	delete(p.receiving, key)
	p.Mu.Unlock()
	if done == nil {
		p.v.e.Stats.StaleReads.Add(1)
		return errors.New("nobody waits for this")
	}
	r.Store(m.Blocks, m.Payload)
	close(done)
	return nil
}

// rejected is called for a leg that the serving layer has rejected: prefill is
// not informed.
func (p *nixlPush) rejected(leg *nixlLeg) {
	if leg != nil && leg.remotePrefill && leg.missing {
		p.v.e.Crash("KeyError in the clean-up of a rejected request")
	}
}
