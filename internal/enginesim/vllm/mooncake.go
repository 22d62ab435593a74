package vllm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// mooncake is vLLM's MooncakeConnector. Decode gets the addresses of prefill's workers
// from prefill's bootstrap server, and sends one worker the list of its reserved blocks.
// When prefill has computed the whole prompt, it writes into these blocks. A prefill
// engine is a producer, a decode engine a consumer, an engine of role both either
// (kv_both). The bootstrap server and the workers' sockets are real. Only the RDMA write
// is a message of the side channel.
//
// Source: vLLM, distributed/kv_transfer/kv_connector/v1/mooncake/, of a release
// that reports a failed load. Releases of summer 2026 and before did not report
// it: there the request and its blocks stay forever.
type mooncake struct {
	e         *core.Engine
	produces  bool
	consumes  bool
	bootstrap *mooncakeBootstrap // nil for a consumer

	mu sync.Mutex
	// agents are the workers of producers by engine id, as their bootstrap
	// servers reported them at the first contact.
	agents map[string]string
	// sending are a producer's transfers. receiving are a consumer's transfers,
	// by the id of its request.
	sending   map[moriioKey]*mooncakeSending
	receiving map[string]bool
}

// mooncakeSending is a transfer that prefill or the consumer has announced to a
// producer.
type mooncakeSending struct {
	request string         // prefill's; "" until it has begun
	blocks  []core.BlockID // of the prompt
	ready   chan struct{}  // closed when they hold its KV
	writing int            // number of running writes; it does not expire during them
	lost    bool           // the fault "lost-notification"
	expiry  *time.Timer
}

// mooncakeLeg is a request's kv_transfer_params as the connector reads them.
type mooncakeLeg struct {
	remoteDecode, remotePrefill bool
	transfer                    string
	bootstrap, engine           string // remote_bootstrap_addr, remote_engine_id
	whole                       bool   // all parameters that a consumer needs are present
}

// errKeys is the error of an engine core that does not find a required parameter.
const errKeys = "KeyError in add_new_req"

func newMooncake(e *core.Engine) *mooncake {
	m := &mooncake{
		e: e, produces: e.Cfg.Role != core.RoleDecode, consumes: e.Cfg.Role != core.RolePrefill,
		agents: make(map[string]string), sending: make(map[moriioKey]*mooncakeSending), receiving: make(map[string]bool),
	}
	if m.produces {
		m.bootstrap = newMooncakeBootstrap(e)
	}
	return m
}

// Start opens the bootstrap server and the sockets of all ranks. The engine's
// mutex is held.
func (m *mooncake) Start() error {
	if !m.produces {
		return nil
	}
	host, _, err := net.SplitHostPort(m.e.Cfg.Listen)
	if err != nil {
		return err
	}
	for _, r := range m.e.Ranks {
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if err != nil {
			return fmt.Errorf("listen worker: %w", err)
		}
		m.e.Peers.Listeners = append(m.e.Peers.Listeners, l)
		m.e.ServePeers(l, "ROUTER", m.serveWorker(r))
		m.bootstrap.register(mooncakeWorker{Engine: m.engineID(r), DPRank: r.Index, Address: "tcp://" + l.Addr().String()})
	}
	return m.bootstrap.Start(host)
}

// engineID is the id of a rank's engine core.
func (m *mooncake) engineID(r *core.Rank) string {
	if len(m.e.Ranks) == 1 {
		return m.e.UUID
	}
	return fmt.Sprintf("%s_dp%d", m.e.UUID, r.Index)
}

func (m *mooncake) Parse(params core.Fields, _ string) any {
	if params == nil {
		return nil
	}
	leg := &mooncakeLeg{}
	leg.remoteDecode, _ = params.Boolean("do_remote_decode", false)
	leg.remotePrefill, _ = params.Boolean("do_remote_prefill", false)
	leg.transfer, _ = params.Str("transfer_id", "")
	leg.bootstrap, _ = params.Str("remote_bootstrap_addr", "")
	leg.engine, _ = params.Str("remote_engine_id", "")
	leg.whole = params.Has("transfer_id") && params.Has("remote_bootstrap_addr") && params.Has("remote_engine_id")
	return leg
}

// run runs a sequence whose rank is chosen. A request without parameters is
// computed, on an engine of any role.
func (m *mooncake) run(ctx context.Context, s *core.Sequence, parsed any, emit func(core.Token)) error {
	leg, _ := parsed.(*mooncakeLeg)
	switch {
	case leg == nil:
		leg = &mooncakeLeg{}
	case leg.remotePrefill && !m.consumes, !leg.remotePrefill && leg.remoteDecode && !m.produces:
		m.e.Crash("AssertionError: a leg of the other role")
		return errEngineCore
	}
	if leg.remotePrefill {
		if err := m.await(ctx, s, leg); err != nil {
			return err
		}
		if err := s.Rank.AcquireSlot(ctx, s); err != nil {
			return err
		}
	} else if err := s.Rank.Reserve(ctx, s, core.Room(s), true); err != nil {
		return err
	}
	sends := leg.remoteDecode && !leg.remotePrefill && leg.transfer != ""
	key := moriioKey{s.Rank.Index, leg.transfer}
	if sends {
		m.begin(key, s.ID)
	}
	err := s.Rank.Prefill(ctx, s)
	if err == nil {
		err = s.Rank.Decode(ctx, s, emit)
	}
	if sends {
		m.finish(key, s, err)
	}
	return err
}

// sendingOf returns the transfer of key, and makes it if needed; mu is held.
func (m *mooncake) sendingOf(key moriioKey) *mooncakeSending {
	t := m.sending[key]
	if t == nil {
		t = &mooncakeSending{ready: make(chan struct{})}
		m.sending[key] = t
	}
	return t
}

// begin records that prefill of a transfer has its blocks. The consumer may have
// requested it before.
func (m *mooncake) begin(key moriioKey, request string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.sendingOf(key)
	if t.request != "" {
		m.e.Stats.DuplicateIDs.Add(1)
		m.e.Cfg.Log.Warn("transfer is in flight already", "transfer", key.transfer)
	}
	t.request = request
}

// finish keeps the blocks of a prefill that ended at its limit of tokens. After any other
// end prefill keeps no blocks, and a consumer that has requested them waits until its
// timeout.
func (m *mooncake) finish(key moriioKey, s *core.Sequence, err error) {
	kept := err == nil && s.Finish == "length"
	var ids []core.BlockID
	if kept {
		ids = s.Blocks[:s.Rank.Cache.BlocksFor(s.Computed)]
		s.Rank.Pin(s, key.transfer, 0)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.sendingOf(key)
	if !kept {
		delete(m.sending, key)
		return
	}
	t.blocks, t.lost = ids, s.Req.Fault == core.FailNotify
	t.expiry = time.AfterFunc(m.e.Cfg.Mooncake.AbortTimeout, func() { m.expire(key, t) })
	close(t.ready)
}

// expire frees blocks that no consumer has taken.
func (m *mooncake) expire(key moriioKey, t *mooncakeSending) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.sending[key] != t || m.e.Ctx.Err() != nil:
	case t.writing > 0:
		t.expiry.Reset(m.e.Cfg.Mooncake.AbortTimeout)
	default:
		delete(m.sending, key)
		if m.e.Ranks[key.rank].Unpin(key.transfer) {
			m.e.Stats.LeasesExpired.Add(1)
			m.e.Cfg.Log.Warn("request timed out without being sent", "request", t.request)
		}
	}
}

// Message receives a producer's write. RDMA rejects nothing: a write without a
// waiting request goes into memory that may belong to another request.
func (m *mooncake) Message(r *core.Rank, op core.SideMessage) (core.SideMessage, error) {
	if op.Op != mooncakeWrite {
		return core.SideMessage{}, errors.New("unknown message")
	}
	for _, id := range op.Blocks {
		if id < 0 || int(id) >= m.e.Cfg.KVBlocks {
			return core.SideMessage{}, errors.New("block id out of range")
		}
	}
	m.mu.Lock()
	waits := m.receiving[op.Key]
	m.mu.Unlock()
	if !waits {
		m.e.Stats.StaleReads.Add(1)
		m.e.Cfg.Log.Warn("no request waits for the written KV", "request", op.Key)
	}
	r.Store(op.Blocks, op.Payload)
	return core.SideMessage{Op: op.Op}, nil
}
