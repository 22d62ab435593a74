package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Side channel operations of the NixlConnector's pull mode. The real engine
// uses a ZMQ handshake, NIXL reads and NIXL notifications instead.
const (
	nixlHandshake = "nixl-handshake"
	nixlRead      = "nixl-read"
	nixlDone      = "nixl-done"
	nixlHeartbeat = "nixl-heartbeat"
)

// nixlReadTimeout is the limit of a read of blocks.
const nixlReadTimeout = 30 * time.Second

// nixlLeg holds a request's kv_transfer_params as the connector reads them. It
// ignores unknown keys, except the two that stand for fields of future
// releases: they must have the values that the prefill engine sent.
type nixlLeg struct {
	remoteDecode, remotePrefill bool
	engine, request, host       string
	port                        int
	blocks                      []blockID
	// tpSize and ppSize are prefill's sizes according to the request; 0 and 1
	// when it has none.
	tpSize, ppSize int
	// missing: one of the remote_* keys is absent or null.
	missing bool
	tokens  int         // remote_num_tokens
	until   float64     // remote_blocks_expiry_time; 0: absent
	epoch   json.Number // remote_agent_epoch
	tag     string      // remote_agent_tag
	// cached is remote_prefill_cached_tokens: the prefix hit that usage
	// reports; -1 when it is absent.
	cached int
	// reading serialises the n samples of a request, which all read the same
	// remote blocks: the samples after the first read memory that is already
	// freed.
	reading sync.Mutex
}

// parseNixl reads the kv_transfer_params of a generation without checks: the
// real server accepts any object.
func parseNixl(params fields, wire int) *nixlLeg {
	leg := &nixlLeg{}
	truthy := func(name string) bool {
		v, err := params.boolean(name, false)
		return err == nil && v
	}
	leg.remoteDecode, leg.remotePrefill = truthy("do_remote_decode"), truthy("do_remote_prefill")
	text := func(name string) string {
		s, err := params.str(name, "")
		if err != nil || s == "" {
			leg.missing = true
		}
		return s
	}
	leg.engine, leg.host = text("remote_engine_id"), text("remote_host")
	if wire >= NixlWireRequestID {
		leg.request = text("remote_request_id")
	}
	port, err := params.integer("remote_port", 0)
	leg.port = int(port)
	leg.missing = leg.missing || err != nil || port == 0
	leg.blocks = parseBlockIDs(params["remote_block_ids"])
	size := func(name string, def int64) int {
		n, err := params.integer(name, def)
		if err != nil {
			n = def
		}
		return int(n)
	}
	leg.tpSize, leg.ppSize = size("tp_size", 0), size("pp_size", 1)
	leg.tokens = size("remote_num_tokens", 0)
	leg.until, _ = params.number("remote_blocks_expiry_time", 0)
	cached, err := params.integer("remote_prefill_cached_tokens", -1)
	if leg.cached = int(cached); err != nil {
		leg.cached = -1
	}
	json.Unmarshal(params["remote_agent_epoch"], &leg.epoch)
	json.Unmarshal(params["remote_agent_tag"], &leg.tag)
	return leg
}

// transferParams finds kv_transfer_params: nil when absent or null. The token
// route also accepts them among the sampling parameters.
func transferParams(route string, f fields) (fields, *fieldError) {
	params, err := f.object("kv_transfer_params")
	if err != nil || params != nil || route != routeTokens {
		return params, err
	}
	sampling, err := f.object("sampling_params")
	if err != nil {
		return nil, err
	}
	extra, err := sampling.object("extra_args")
	if err != nil {
		return nil, err
	}
	return extra.object("kv_transfer_params")
}

// parseBlockIDs reads remote_block_ids: a list of lists, one for each KV cache
// group, of which the simulator has one. Older releases sent a flat list.
func parseBlockIDs(raw json.RawMessage) []blockID {
	var groups [][]blockID
	if json.Unmarshal(raw, &groups) == nil {
		if len(groups) == 0 {
			return nil
		}
		return groups[0]
	}
	var flat []blockID
	if json.Unmarshal(raw, &flat) == nil {
		return flat
	}
	return nil
}

// address is the address of prefill's side channel.
func (leg *nixlLeg) address() string { return net.JoinHostPort(leg.host, strconv.Itoa(leg.port)) }

// fields returns the values of a leg that the prefill engine checks.
func (leg *nixlLeg) fields() map[string]string {
	return map[string]string{"epoch": leg.epoch.String(), "tag": leg.tag}
}

// epochOf and tagOf return the values of two members of Config.FutureParams: a 64-bit integer that no float64 can represent, and a
// string with many characters that JSON encoders often rewrite.
func epochOf(e *Engine, request string) json.Number {
	h := fnv.New64a()
	h.Write([]byte(e.id + request))
	return json.Number(strconv.FormatUint(mix(h.Sum64())>>1|1<<62|1, 10))
}

func tagOf(request string) string { return request + ` é/<&>"\ 🙂` }

// withFuture adds the members of Config.FutureParams for a request.
func withFuture(e *Engine, params object, request string) object {
	if !e.cfg.FutureParams {
		return params
	}
	return params.with("remote_agent_epoch", epochOf(e, request)).with("remote_agent_tag", tagOf(request))
}

// checkAgent checks the members of Config.FutureParams that decode passed on.
func checkAgent(e *Engine, request string, fields map[string]string) error {
	if e.cfg.FutureParams && (fields["epoch"] != epochOf(e, request).String() || fields["tag"] != tagOf(request)) {
		return errors.New("agent metadata mismatch")
	}
	return nil
}

// hold pins a finished prefill's blocks and returns the kv_transfer_params of
// its answer.
func (v *vllm) hold(s *sequence) any {
	if s.req.fault == failNoParams || v.wire() < NixlWireLease && s.finish != "length" {
		return nil
	}
	ids := s.blocks[:s.rank.cache.blocksFor(s.computed)]
	s.rank.pin(s, s.id, v.e.cfg.Lease)
	return v.heldParams(s, ids, false, nil)
}

// errLoad is the load failure under the default policy "fail".
var errLoad = &apiError{Status: http.StatusInternalServerError, Type: "InternalServerError", Message: "Internal server error", loading: true}

// errEngineCore is the answer to the request that ends the engine core.
var errEngineCore = &apiError{
	Status: http.StatusInternalServerError, Type: "InternalServerError",
	Message: "EngineCore encountered an issue. See stack trace (above) for the root cause.",
}

// loadRemote gets the prompt's KV from the prefill engine. It excludes the last token's
// KV, which decode computes again to sample from it. It returns with the sequence's
// blocks reserved and no slot held. If the client leaves before the blocks are reserved,
// decode informs the prefill engine that it will not read them. A read that has begun
// always completes. Parameters that no prefill engine sends end the engine, as in vLLM
// 0.32. Parameters without blocks end it at once. With parameters that lack a remote_*
// key the request hangs, and its abort ends the engine.
func (v *vllm) loadRemote(ctx context.Context, s *sequence, leg *nixlLeg) error {
	if len(leg.blocks) == 0 {
		v.e.crash("assertion num_external_tokens == 0")
		return errEngineCore
	}
	if leg.missing {
		v.e.cfg.Log.Warn("invalid KVTransferParams", "request", s.id)
		return s.rank.waitLoading(func() error {
			<-ctx.Done() // the load never starts
			v.e.crash("KeyError in the clean-up of an aborted request")
			return context.Cause(ctx)
		})
	}
	if v.wire() < NixlWireRequestID {
		leg.request = s.id // equals the id of prefill's leg if the proxy gave both legs the same id
	}
	if v.wire() >= NixlWireLease {
		v.beat(leg, 1)
		defer v.beat(leg, -1)
	}
	want := room(s)
	if v.e.cfg.Nixl.Lookahead {
		want++
	}
	if err := s.rank.reserve(ctx, s, want, false); err != nil {
		v.notifyDone(leg)
		return err
	}
	if s.req.fault == failLoad {
		return v.loadFailed(ctx)
	}
	err := s.rank.waitLoading(func() error {
		leg.reading.Lock()
		defer leg.reading.Unlock()
		if err := v.shakeHands(s.rank, leg); err != nil {
			return err
		}
		return v.pull(ctx, s, leg)
	})
	if err != nil {
		v.e.cfg.Log.Error("KV load failed", "request", s.id, "error", err)
		return v.loadFailed(ctx)
	}
	return ctx.Err()
}

// loadFailed returns the result of a request whose KV could not be loaded: an
// error, or nil when the engine computes the KV.
func (v *vllm) loadFailed(ctx context.Context) error {
	if v.e.cfg.Nixl.Recompute {
		return ctx.Err()
	}
	return errLoad
}

// shakeHands does the handshake with an unknown remote engine.
func (v *vllm) shakeHands(r *rank, leg *nixlLeg) error {
	ctx, cancel := context.WithTimeout(v.e.ctx, v.e.cfg.HandshakeTimeout)
	defer cancel()
	if err := r.side.setUp(ctx, leg.address(), leg.engine); err != nil {
		return err
	}
	v.mu.Lock()
	known := v.known[leg.engine]
	v.mu.Unlock()
	if known {
		return nil
	}
	answer, err := r.side.call(ctx, leg.address(), sideMessage{
		Op: nixlHandshake, Engine: leg.engine, Fields: map[string]string{"tp": strconv.Itoa(max(1, leg.tpSize))},
	})
	if err != nil && !errors.Is(err, errPeer) {
		<-ctx.Done() // a ZMQ socket keeps trying to connect
	}
	if err != nil {
		return err
	}
	if answer.Fields["compatibility_hash"] != v.compatibility() {
		return errors.New("handshake: compatibility hash mismatch")
	}
	v.mu.Lock()
	v.known[leg.engine] = true
	v.mu.Unlock()
	return nil
}

// compatibility returns the values on which both engines of a pair must agree.
func (v *vllm) compatibility() string {
	return fmt.Sprintf("%x-%d-%d", v.e.weights, v.e.cfg.BlockSize, v.wire())
}

// pull reads the blocks that are not in the local prefix cache and frees them
// on the prefill engine. After a local hit it reads only the tail of the remote
// blocks. Missing remote blocks leave the local ones unchanged.
//
// A request that was aborted during the read (ctx has ended) frees the blocks
// when they have arrived. They never enter the prefix cache (scheduler.py,
// _update_from_kv_xfer_finished), because the prefill engine may have given
// their memory to another request.
func (v *vllm) pull(ctx context.Context, s *sequence, leg *nixlLeg) error {
	hit := s.computed / s.rank.cache.size
	local := s.blocks[hit:s.rank.cache.blocksFor(len(s.prompt))]
	remote := leg.blocks
	if len(remote) > len(local) {
		remote = remote[len(remote)-len(local):]
	}
	limit, cancel := context.WithTimeout(v.e.ctx, nixlReadTimeout)
	defer cancel()
	answer, err := s.rank.side.call(limit, leg.address(), sideMessage{
		Op: nixlRead, Engine: leg.engine, Key: leg.request, Blocks: remote, Fields: leg.fields(),
	})
	if err != nil {
		return err
	}
	v.notifyDone(leg)
	s.rank.store(local, answer.Payload)
	v.e.stats.transfers.Add(1)
	if ctx.Err() != nil {
		return nil
	}
	s.rank.loaded(s, len(s.prompt)-1)
	if s.cached = leg.cached; leg.cached < 0 {
		s.cached = len(s.prompt) - 1
	}
	return nil
}

// notifyDone informs the prefill engine that it may free the blocks: after a read, or, as an empty
// read, when no read will happen.
func (v *vllm) notifyDone(leg *nixlLeg) {
	ctx, cancel := context.WithTimeout(v.e.ctx, v.e.cfg.HandshakeTimeout)
	defer cancel()
	world := v.e.cfg.Nixl.TPSize
	for range max(1, world/max(1, leg.tpSize)) { // the ranks that read from one rank of prefill
		_, err := v.e.ranks[0].side.call(ctx, leg.address(), sideMessage{
			Op: nixlDone, Engine: leg.engine, Key: leg.request, Fields: map[string]string{"world": strconv.Itoa(world)},
		})
		if err != nil {
			v.e.cfg.Log.Warn("read notification failed", "error", err)
		}
	}
}

// doneBy counts the decode ranks that have read a request's blocks. It frees
// the blocks when all of decode's ranks have.
func (v *vllm) doneBy(r *rank, m sideMessage) {
	if r.pinned(m.Key) == nil {
		v.e.cfg.Log.Warn("potentially invalid KV blocks: a request that is not known was read", "request", m.Key)
		return
	}
	world, _ := strconv.Atoi(m.Fields["world"])
	v.mu.Lock()
	v.done[m.Key]++
	all := v.done[m.Key] >= max(1, world/v.e.cfg.Nixl.TPSize)
	if all {
		delete(v.done, m.Key)
	}
	v.mu.Unlock()
	if all {
		r.unpin(m.Key)
	}
}

// rejected is called for a leg that the serving layer has rejected: a request
// that is aborted before it runs frees the prefill's blocks.
func (v *vllm) rejected(leg *nixlLeg) {
	switch {
	case leg == nil || !leg.remotePrefill || v.wire() < NixlWireLease:
	case leg.missing:
		v.e.crash("KeyError in the clean-up of a rejected request")
	default:
		v.e.spawn(func(context.Context) { v.notifyDone(leg) })
	}
}

// beat adds (1) or removes (-1) a remote request whose lease is renewed.
func (v *vllm) beat(leg *nixlLeg, delta int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	addr := leg.address()
	if v.beats[addr] == nil {
		v.beats[addr] = make(map[string]int)
	}
	v.beats[addr][leg.request] += delta
	if v.beats[addr][leg.request] == 0 {
		delete(v.beats[addr], leg.request)
	}
	if len(v.beats[addr]) == 0 {
		delete(v.beats, addr)
	}
}

// heartbeat sends a message to each prefill engine six times per lease.
func (v *vllm) heartbeat(ctx context.Context) {
	tick := time.NewTicker(max(v.e.cfg.Lease/6, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		v.mu.Lock()
		due := make(map[string]string, len(v.beats))
		for addr, requests := range v.beats {
			ids := make([]string, 0, len(requests))
			for id := range requests {
				ids = append(ids, id)
			}
			due[addr] = strings.Join(ids, ",")
		}
		v.mu.Unlock()
		for addr, ids := range due {
			limit, cancel := context.WithTimeout(ctx, v.e.cfg.HandshakeTimeout)
			v.e.ranks[0].side.call(limit, addr, sideMessage{Op: nixlHeartbeat, Fields: map[string]string{"ids": ids}})
			cancel()
		}
	}
}

// message answers a decode engine.
func (v *vllm) message(_ context.Context, r *rank, m sideMessage) (sideMessage, error) {
	if v.connector != nil {
		return v.connector.message(r, m)
	}
	if v.push != nil {
		return v.push.message(r, m)
	}
	if !v.nixl {
		return sideMessage{}, errors.New("no KV connector")
	}
	answer := sideMessage{Op: m.Op}
	switch m.Op {
	case nixlHandshake:
		if tp := m.Fields["tp"]; tp != "" && tp != strconv.Itoa(v.e.cfg.Nixl.TPSize) {
			return answer, errors.New("handshake: no such rank")
		}
		answer.Fields = map[string]string{"compatibility_hash": v.compatibility()}
	case nixlRead:
		if err := checkAgent(v.e, m.Key, m.Fields); err != nil {
			return answer, err
		}
		for _, id := range m.Blocks {
			if id < 0 || int(id) >= v.e.cfg.KVBlocks {
				return answer, errors.New("block id out of range")
			}
		}
		answer.Payload = r.readPinned(m.Key, m.Blocks)
	case nixlDone:
		v.doneBy(r, m)
	case nixlHeartbeat:
		for id := range strings.SplitSeq(m.Fields["ids"], ",") {
			r.renew(id, v.e.cfg.Lease*2/3)
		}
	default:
		return answer, errors.New("unknown message")
	}
	return answer, nil
}
