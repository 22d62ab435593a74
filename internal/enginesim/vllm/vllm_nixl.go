package vllm

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

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// Side channel operations of the NixlConnector's pull mode. The real engine
// uses a ZMQ handshake, NIXL reads and NIXL notifications instead.
const (
	NixlHandshake = "nixl-handshake"
	NixlRead      = "nixl-read"
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
	blocks                      []core.BlockID
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
func parseNixl(params core.Fields, wire int) *nixlLeg {
	leg := &nixlLeg{}
	truthy := func(name string) bool {
		v, err := params.Boolean(name, false)
		return err == nil && v
	}
	leg.remoteDecode, leg.remotePrefill = truthy("do_remote_decode"), truthy("do_remote_prefill")
	text := func(name string) string {
		s, err := params.Str(name, "")
		if err != nil || s == "" {
			leg.missing = true
		}
		return s
	}
	leg.engine, leg.host = text("remote_engine_id"), text("remote_host")
	if wire >= core.NixlWireRequestID {
		leg.request = text("remote_request_id")
	}
	port, err := params.Integer("remote_port", 0)
	leg.port = int(port)
	leg.missing = leg.missing || err != nil || port == 0
	leg.blocks = parseBlockIDs(params["remote_block_ids"])
	size := func(name string, def int64) int {
		n, err := params.Integer(name, def)
		if err != nil {
			n = def
		}
		return int(n)
	}
	leg.tpSize, leg.ppSize = size("tp_size", 0), size("pp_size", 1)
	leg.tokens = size("remote_num_tokens", 0)
	leg.until, _ = params.Number("remote_blocks_expiry_time", 0)
	cached, err := params.Integer("remote_prefill_cached_tokens", -1)
	if leg.cached = int(cached); err != nil {
		leg.cached = -1
	}
	json.Unmarshal(params["remote_agent_epoch"], &leg.epoch)
	json.Unmarshal(params["remote_agent_tag"], &leg.tag)
	return leg
}

// transferParams finds kv_transfer_params: nil when absent or null. The token
// route also accepts them among the sampling parameters.
func transferParams(route string, f core.Fields) (core.Fields, *core.FieldError) {
	params, err := f.Object("kv_transfer_params")
	if err != nil || params != nil || route != core.RouteTokens {
		return params, err
	}
	sampling, err := f.Object("sampling_params")
	if err != nil {
		return nil, err
	}
	extra, err := sampling.Object("extra_args")
	if err != nil {
		return nil, err
	}
	return extra.Object("kv_transfer_params")
}

// parseBlockIDs reads remote_block_ids: a list of lists, one for each KV cache
// group, of which the simulator has one. Older releases sent a flat list.
func parseBlockIDs(raw json.RawMessage) []core.BlockID {
	var groups [][]core.BlockID
	if json.Unmarshal(raw, &groups) == nil {
		if len(groups) == 0 {
			return nil
		}
		return groups[0]
	}
	var flat []core.BlockID
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

// EpochOf and TagOf return the values of two members of Config.FutureParams: a 64-bit integer that no float64 can represent, and a
// string with many characters that JSON encoders often rewrite.
func EpochOf(e *core.Engine, request string) json.Number {
	h := fnv.New64a()
	h.Write([]byte(e.UUID + request))
	return json.Number(strconv.FormatUint(core.Mix(h.Sum64())>>1|1<<62|1, 10))
}

func TagOf(request string) string { return request + ` é/<&>"\ 🙂` }

// withFuture adds the members of Config.FutureParams for a request.
func withFuture(e *core.Engine, params core.Object, request string) core.Object {
	if !e.Cfg.FutureParams {
		return params
	}
	return params.With("remote_agent_epoch", EpochOf(e, request)).With("remote_agent_tag", TagOf(request))
}

// checkAgent checks the members of Config.FutureParams that decode passed on.
func checkAgent(e *core.Engine, request string, fields map[string]string) error {
	if e.Cfg.FutureParams && (fields["epoch"] != EpochOf(e, request).String() || fields["tag"] != TagOf(request)) {
		return errors.New("agent metadata mismatch")
	}
	return nil
}

// hold pins a finished prefill's blocks and returns the kv_transfer_params of
// its answer.
func (v *VLLM) hold(s *core.Sequence) any {
	if s.Req.Fault == core.FailNoParams || v.wire() < core.NixlWireLease && s.Finish != "length" {
		return nil
	}
	ids := s.Blocks[:s.Rank.Cache.BlocksFor(s.Computed)]
	s.Rank.Pin(s, s.ID, v.e.Cfg.Lease)
	return v.heldParams(s, ids, false, nil)
}

// errLoad is the load failure under the default policy "fail".
var errLoad = &core.APIError{Status: http.StatusInternalServerError, Type: "InternalServerError", Message: "Internal server error", Loading: true}

// errEngineCore is the answer to the request that ends the engine core.
var errEngineCore = &core.APIError{
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
func (v *VLLM) loadRemote(ctx context.Context, s *core.Sequence, leg *nixlLeg) error {
	if len(leg.blocks) == 0 {
		v.e.Crash("assertion num_external_tokens == 0")
		return errEngineCore
	}
	if leg.missing {
		v.e.Cfg.Log.Warn("invalid KVTransferParams", "request", s.ID)
		return s.Rank.WaitLoading(func() error {
			<-ctx.Done() // the load never starts
			v.e.Crash("KeyError in the clean-up of an aborted request")
			return context.Cause(ctx)
		})
	}
	if v.wire() < core.NixlWireRequestID {
		leg.request = s.ID // equals the id of prefill's leg if the proxy gave both legs the same id
	}
	if v.wire() >= core.NixlWireLease {
		v.beat(leg, 1)
		defer v.beat(leg, -1)
	}
	want := core.Room(s)
	if v.e.Cfg.Nixl.Lookahead {
		want++
	}
	if err := s.Rank.Reserve(ctx, s, want, false); err != nil {
		v.notifyDone(leg)
		return err
	}
	if s.Req.Fault == core.FailLoad {
		return v.loadFailed(ctx)
	}
	err := s.Rank.WaitLoading(func() error {
		leg.reading.Lock()
		defer leg.reading.Unlock()
		if err := v.shakeHands(s.Rank, leg); err != nil {
			return err
		}
		return v.pull(ctx, s, leg)
	})
	if err != nil {
		v.e.Cfg.Log.Error("KV load failed", "request", s.ID, "error", err)
		return v.loadFailed(ctx)
	}
	return ctx.Err()
}

// loadFailed returns the result of a request whose KV could not be loaded: an
// error, or nil when the engine computes the KV.
func (v *VLLM) loadFailed(ctx context.Context) error {
	if v.e.Cfg.Nixl.Recompute {
		return ctx.Err()
	}
	return errLoad
}

// shakeHands does the handshake with an unknown remote engine.
func (v *VLLM) shakeHands(r *core.Rank, leg *nixlLeg) error {
	ctx, cancel := context.WithTimeout(v.e.Ctx, v.e.Cfg.HandshakeTimeout)
	defer cancel()
	if err := r.Side.SetUp(ctx, leg.address(), leg.engine); err != nil {
		return err
	}
	v.mu.Lock()
	known := v.known[leg.engine]
	v.mu.Unlock()
	if known {
		return nil
	}
	answer, err := r.Side.Call(ctx, leg.address(), core.SideMessage{
		Op: NixlHandshake, Engine: leg.engine, Fields: map[string]string{"tp": strconv.Itoa(max(1, leg.tpSize))},
	})
	if err != nil && !errors.Is(err, core.ErrPeer) {
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
func (v *VLLM) compatibility() string {
	return fmt.Sprintf("%x-%d-%d", v.e.Weights, v.e.Cfg.BlockSize, v.wire())
}

// pull reads the blocks that are not in the local prefix cache and frees them
// on the prefill engine. After a local hit it reads only the tail of the remote
// blocks. Missing remote blocks leave the local ones unchanged.
//
// A request that was aborted during the read (ctx has ended) frees the blocks
// when they have arrived. They never enter the prefix cache (scheduler.py,
// _update_from_kv_xfer_finished), because the prefill engine may have given
// their memory to another request.
func (v *VLLM) pull(ctx context.Context, s *core.Sequence, leg *nixlLeg) error {
	hit := s.Computed / s.Rank.Cache.Size
	local := s.Blocks[hit:s.Rank.Cache.BlocksFor(len(s.Prompt))]
	remote := leg.blocks
	if len(remote) > len(local) {
		remote = remote[len(remote)-len(local):]
	}
	limit, cancel := context.WithTimeout(v.e.Ctx, nixlReadTimeout)
	defer cancel()
	answer, err := s.Rank.Side.Call(limit, leg.address(), core.SideMessage{
		Op: NixlRead, Engine: leg.engine, Key: leg.request, Blocks: remote, Fields: leg.fields(),
	})
	if err != nil {
		return err
	}
	v.notifyDone(leg)
	s.Rank.Store(local, answer.Payload)
	v.e.Stats.Transfers.Add(1)
	if ctx.Err() != nil {
		return nil
	}
	s.Rank.Loaded(s, len(s.Prompt)-1)
	if s.Cached = leg.cached; leg.cached < 0 {
		s.Cached = len(s.Prompt) - 1
	}
	return nil
}

// notifyDone informs the prefill engine that it may free the blocks: after a read, or, as an empty
// read, when no read will happen.
func (v *VLLM) notifyDone(leg *nixlLeg) {
	ctx, cancel := context.WithTimeout(v.e.Ctx, v.e.Cfg.HandshakeTimeout)
	defer cancel()
	world := v.e.Cfg.Nixl.TPSize
	for range max(1, world/max(1, leg.tpSize)) { // the ranks that read from one rank of prefill
		_, err := v.e.Ranks[0].Side.Call(ctx, leg.address(), core.SideMessage{
			Op: nixlDone, Engine: leg.engine, Key: leg.request, Fields: map[string]string{"world": strconv.Itoa(world)},
		})
		if err != nil {
			v.e.Cfg.Log.Warn("read notification failed", "error", err)
		}
	}
}

// doneBy counts the decode ranks that have read a request's blocks. It frees
// the blocks when all of decode's ranks have.
func (v *VLLM) doneBy(r *core.Rank, m core.SideMessage) {
	if r.Pinned(m.Key) == nil {
		v.e.Cfg.Log.Warn("potentially invalid KV blocks: a request that is not known was read", "request", m.Key)
		return
	}
	world, _ := strconv.Atoi(m.Fields["world"])
	v.mu.Lock()
	v.done[m.Key]++
	all := v.done[m.Key] >= max(1, world/v.e.Cfg.Nixl.TPSize)
	if all {
		delete(v.done, m.Key)
	}
	v.mu.Unlock()
	if all {
		r.Unpin(m.Key)
	}
}

// rejected is called for a leg that the serving layer has rejected: a request
// that is aborted before it runs frees the prefill's blocks.
func (v *VLLM) rejected(leg *nixlLeg) {
	switch {
	case leg == nil || !leg.remotePrefill || v.wire() < core.NixlWireLease:
	case leg.missing:
		v.e.Crash("KeyError in the clean-up of a rejected request")
	default:
		v.e.Spawn(func(context.Context) { v.notifyDone(leg) })
	}
}

// beat adds (1) or removes (-1) a remote request whose lease is renewed.
func (v *VLLM) beat(leg *nixlLeg, delta int) {
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
func (v *VLLM) heartbeat(ctx context.Context) {
	tick := time.NewTicker(max(v.e.Cfg.Lease/6, time.Millisecond))
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
			limit, cancel := context.WithTimeout(ctx, v.e.Cfg.HandshakeTimeout)
			v.e.Ranks[0].Side.Call(limit, addr, core.SideMessage{Op: nixlHeartbeat, Fields: map[string]string{"ids": ids}})
			cancel()
		}
	}
}

// Message answers a decode engine.
func (v *VLLM) Message(_ context.Context, r *core.Rank, m core.SideMessage) (core.SideMessage, error) {
	if v.Connector != nil {
		return v.Connector.Message(r, m)
	}
	if v.Push != nil {
		return v.Push.Message(r, m)
	}
	if !v.nixl {
		return core.SideMessage{}, errors.New("no KV connector")
	}
	answer := core.SideMessage{Op: m.Op}
	switch m.Op {
	case NixlHandshake:
		if tp := m.Fields["tp"]; tp != "" && tp != strconv.Itoa(v.e.Cfg.Nixl.TPSize) {
			return answer, errors.New("handshake: no such rank")
		}
		answer.Fields = map[string]string{"compatibility_hash": v.compatibility()}
	case NixlRead:
		if err := checkAgent(v.e, m.Key, m.Fields); err != nil {
			return answer, err
		}
		for _, id := range m.Blocks {
			if id < 0 || int(id) >= v.e.Cfg.KVBlocks {
				return answer, errors.New("block id out of range")
			}
		}
		answer.Payload = r.ReadPinned(m.Key, m.Blocks)
	case nixlDone:
		v.doneBy(r, m)
	case nixlHeartbeat:
		for id := range strings.SplitSeq(m.Fields["ids"], ",") {
			r.Renew(id, v.e.Cfg.Lease*2/3)
		}
	default:
		return answer, errors.New("unknown message")
	}
	return answer, nil
}
