package enginesim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"sync"
	"time"
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
	v *vllm

	mu sync.Mutex
	// finished are prefill's prompts for which no decode has registered.
	// registered are the decodes whose prompt is not computed yet. Both are
	// indexed by rank and the engine's own id.
	finished   map[pushKey][]blockID
	registered map[pushKey]pushRegistration
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
	blocks                   []blockID
}

func newNixlPush(v *vllm) *nixlPush {
	return &nixlPush{
		v: v, finished: make(map[pushKey][]blockID),
		registered: make(map[pushKey]pushRegistration), receiving: make(map[pushKey]chan struct{}),
	}
}

// randomSuffix is the suffix that an engine adds to the id of a request.
var randomSuffix = regexp.MustCompile(`-[0-9a-f]{8}$`)

// same reports whether two requests are the legs of one exchange.
func (k pushKey) same(o pushKey) bool {
	return k.rank == o.rank && randomSuffix.ReplaceAllString(k.request, "") == randomSuffix.ReplaceAllString(o.request, "")
}

// engineID returns the id of a rank: each rank is a separate engine.
func (p *nixlPush) engineID(r *rank) string {
	if len(p.v.e.ranks) == 1 {
		return p.v.e.id
	}
	return fmt.Sprintf("%s_dp%d", p.v.e.id, r.index)
}

// await registers a request's blocks with prefill and waits until they are
// written. It returns with them reserved and no slot held. They stay reserved
// until the write, even if the client has left, and no limit bounds that.
func (p *nixlPush) await(ctx context.Context, s *sequence, leg *nixlLeg) error {
	if leg.missing || leg.tpSize == 0 {
		p.v.e.crash("KeyError in the registration of a request")
		return errEngineCore
	}
	if err := s.rank.reserve(ctx, s, room(s), false); err != nil {
		return err // prefill is not informed
	}
	key := pushKey{s.rank.index, s.id}
	written := make(chan struct{})
	p.mu.Lock()
	p.receiving[key] = written
	p.mu.Unlock()
	s.rank.awaitKV(s)
	err := s.rank.waitLoading(func() error {
		if s.req.fault == failLoad {
			return errNoSession
		}
		if err := p.register(s, leg); err != nil {
			return err
		}
		return p.waitWritten(ctx, written)
	})
	p.mu.Lock()
	delete(p.receiving, key)
	p.mu.Unlock()
	s.rank.receivedKV(s)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		p.v.e.cfg.Log.Error("KV load failed", "request", s.id, "error", err)
		return p.v.loadFailed(ctx)
	}
	p.v.e.stats.transfers.Add(1)
	s.rank.loaded(s, len(s.prompt)-1)
	s.cached = len(s.prompt) - 1
	return nil
}

// waitWritten waits until prefill has written. After the client has left, it
// waits at most ReclaimAfter.
func (p *nixlPush) waitWritten(ctx context.Context, written <-chan struct{}) error {
	select {
	case <-written:
		return nil
	case <-p.v.e.ctx.Done():
		return context.Cause(p.v.e.ctx)
	case <-ctx.Done():
	}
	var reclaim <-chan time.Time
	if d := p.v.e.cfg.Nixl.ReclaimAfter; d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		reclaim = t.C
	}
	select {
	case <-written:
		return nil
	case <-p.v.e.ctx.Done():
		return context.Cause(p.v.e.ctx)
	case <-reclaim:
		p.v.e.cfg.Log.Warn("reclaiming KV blocks that no engine has written")
		return errNeverWritten
	}
}

// register does the handshake with the prefill engine that the request names,
// and sends it the blocks that are not in the local prefix cache.
func (p *nixlPush) register(s *sequence, leg *nixlLeg) error {
	ctx, cancel := context.WithTimeout(p.v.e.ctx, p.v.e.cfg.HandshakeTimeout)
	defer cancel()
	if err := s.rank.side.setUp(ctx, leg.address(), leg.engine); err != nil {
		return err
	}
	call := func(m sideMessage) error {
		_, err := s.rank.side.call(ctx, leg.address(), m)
		if err != nil && !errors.Is(err, errPeer) {
			<-ctx.Done() // a ZMQ socket keeps trying to connect
		}
		return err
	}
	if err := call(p.handshake(leg.engine, leg.tpSize, leg.ppSize)); err != nil || s.req.fault == failNotify {
		return err
	}
	host, port := s.rank.side.hostPort()
	local := s.blocks[s.computed/s.rank.cache.size : s.rank.cache.blocksFor(len(s.prompt))]
	return call(sideMessage{Op: pushRegister, Key: s.id, Blocks: local, Fields: map[string]string{
		"decode_engine_id": p.engineID(s.rank), "decode_host": host, "decode_port": strconv.Itoa(port),
		"decode_tp_size": strconv.Itoa(p.v.e.cfg.Nixl.TPSize), "remote_engine_id": leg.engine,
	}})
}

// handshake requests a peer's metadata and returns it. tp and pp are the expected sizes.
func (p *nixlPush) handshake(engine string, tp, pp int) sideMessage {
	return sideMessage{Op: nixlHandshake, Fields: map[string]string{
		"engine": engine, "hash": p.v.compatibility(), "tp": strconv.Itoa(tp), "pp": strconv.Itoa(pp),
	}}
}

// hold keeps a finished prefill's blocks for the time of a lease, and returns
// the parameters of its answer.
func (p *nixlPush) hold(s *sequence) any {
	if s.req.fault == failNoParams {
		return nil
	}
	ids := s.blocks[:s.rank.cache.blocksFor(s.computed)]
	s.rank.pin(s, s.id, p.v.e.cfg.Lease)
	key := pushKey{s.rank.index, s.id}
	p.mu.Lock()
	p.finished[key] = ids
	for k, reg := range p.registered {
		if k.same(key) {
			delete(p.registered, k)
			p.start(s.rank, key, reg)
			break
		}
	}
	p.mu.Unlock()
	host, port := s.rank.side.hostPort()
	return obj(
		"do_remote_prefill", true, "do_remote_decode", false,
		"remote_block_ids", [][]blockID{ids}, "remote_engine_id", p.engineID(s.rank), "remote_request_id", s.id,
		"remote_host", host, "remote_port", port, "tp_size", p.v.e.cfg.Nixl.TPSize, "pp_size", p.v.e.cfg.Nixl.PPSize,
		"remote_num_tokens", s.computed, "transfer_mode", "push",
	)
}

// start writes a prompt's KV; mu is held.
func (p *nixlPush) start(r *rank, key pushKey, reg pushRegistration) {
	blocks := p.finished[key]
	delete(p.finished, key)
	p.v.e.spawn(func(ctx context.Context) { p.write(ctx, r, key.request, blocks, reg) })
}

// write writes a prompt's KV into decode's blocks, which are the last ones of
// the prompt, and frees prefill's. If the write fails, the lease frees the
// blocks, and decode is not informed.
func (p *nixlPush) write(ctx context.Context, r *rank, request string, blocks []blockID, reg pushRegistration) {
	ctx, cancel := context.WithTimeout(ctx, nixlReadTimeout)
	defer cancel()
	if len(reg.blocks) > len(blocks) {
		p.v.e.cfg.Log.Error("push block-count mismatch", "request", request, "local", len(blocks), "remote", len(reg.blocks))
		return
	}
	err := r.side.setUp(ctx, reg.address, reg.engine)
	if err == nil {
		_, err = r.side.call(ctx, reg.address, p.handshake(reg.engine, 0, 0))
	}
	if err == nil {
		payload := r.readPinned(request, blocks[len(blocks)-len(reg.blocks):])
		_, err = r.side.call(ctx, reg.address, sideMessage{Op: pushWrite, Key: reg.request, Blocks: reg.blocks, Payload: payload})
	}
	if err != nil {
		p.v.e.cfg.Log.Error("KV write failed", "request", request, "error", err)
		return
	}
	r.unpin(request)
}

// message answers the peer of a transfer.
func (p *nixlPush) message(r *rank, m sideMessage) (sideMessage, error) {
	answer := sideMessage{Op: m.Op}
	switch m.Op {
	case nixlHandshake:
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
func (p *nixlPush) checkPeer(r *rank, f map[string]string) error {
	c := p.v.e.cfg.Nixl
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
func (p *nixlPush) registration(r *rank, m sideMessage) error {
	if m.Fields["remote_engine_id"] != p.engineID(r) {
		return errors.New("engine id mismatch")
	}
	key := pushKey{r.index, m.Key}
	reg := pushRegistration{
		engine: m.Fields["decode_engine_id"], request: m.Key, blocks: m.Blocks,
		address: net.JoinHostPort(m.Fields["decode_host"], m.Fields["decode_port"]),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for k := range p.finished {
		if r.pinned(k.request) == nil && k.rank == r.index {
			delete(p.finished, k)
		}
	}
	for k := range p.finished {
		if k.same(key) {
			p.start(r, k, reg)
			return nil
		}
	}
	p.registered[key] = reg
	return nil
}

// written handles prefill's notice of a write, unless the blocks were reclaimed.
func (p *nixlPush) written(r *rank, m sideMessage) error {
	for _, id := range m.Blocks {
		if id < 0 || int(id) >= p.v.e.cfg.KVBlocks {
			return errors.New("block id out of range")
		}
	}
	key := pushKey{r.index, m.Key}
	p.mu.Lock()
	done := p.receiving[key]
	delete(p.receiving, key)
	p.mu.Unlock()
	if done == nil {
		p.v.e.stats.staleReads.Add(1)
		return errors.New("nobody waits for this")
	}
	r.store(m.Blocks, m.Payload)
	close(done)
	return nil
}

// rejected is called for a leg that the serving layer has rejected: prefill is
// not informed.
func (p *nixlPush) rejected(leg *nixlLeg) {
	if leg != nil && leg.remotePrefill && leg.missing {
		p.v.e.crash("KeyError in the clean-up of a rejected request")
	}
}
