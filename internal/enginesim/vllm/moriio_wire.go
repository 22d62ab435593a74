package vllm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// Side channel operations that stand for RDMA operations.
const (
	moriioRead  = "moriio-read"
	moriioWrite = "moriio-write"
)

// MoRIIOPeer is the address of an engine's sockets: the host and the ports of
// its rank 0.
type MoRIIOPeer struct {
	Host              string
	Handshake, Notify int
}

// MoRIIOLeg is a request's kv_transfer_params as the connector reads them.
type MoRIIOLeg struct {
	remoteDecode, remotePrefill bool
	Transfer                    string
	Peer                        MoRIIOPeer // by the request id, else by the parameters
	named                       MoRIIOPeer // by the parameters alone
	blocks                      []core.BlockID
	rank                        int   // remote_dp_rank
	leader                      *bool // is_request_leader
	override                    bool  // remote_dp_rank_override
	epoch, tag                  string
	// problem is the reason for which the scheduler raises; "" for none.
	problem string
}

var (
	prefillAddress = regexp.MustCompile(`___prefill_addr_(.+?)___decode_addr_`)
	decodeAddress  = regexp.MustCompile(`___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$`)
)

func (m *MoRIIO) Parse(params core.Fields, id string) any {
	if params == nil {
		return nil
	}
	leg := &MoRIIOLeg{}
	flag := func(name string) bool {
		v, err := params.Boolean(name, false)
		return err == nil && v
	}
	number := func(name string) int { // some releases write ports as strings
		if v, err := params.Integer(name, 0); err == nil {
			return int(v)
		}
		s, _ := params.Str(name, "")
		n, _ := strconv.Atoi(s)
		return n
	}
	leg.remoteDecode, leg.remotePrefill = flag("do_remote_decode"), flag("do_remote_prefill")
	leg.override, leg.rank = flag("remote_dp_rank_override"), number("remote_dp_rank")
	if params.Has("is_request_leader") {
		v := flag("is_request_leader")
		leg.leader = &v
	}
	leg.blocks = parseBlockIDs(params["remote_block_ids"])
	if leg.Transfer, _ = params.Str("transfer_id", ""); leg.Transfer == "" {
		leg.Transfer = "sidecar-" + id + core.RandomID() // differs on the two legs
	}
	leg.epoch = string(params["remote_agent_epoch"])
	leg.tag, _ = params.Str("remote_agent_tag", "")
	leg.named.Host, _ = params.Str("remote_host", "")
	leg.named.Handshake, leg.named.Notify = number("remote_handshake_port"), number("remote_notify_port")
	leg.Peer = leg.named
	pattern := prefillAddress
	if m.producer {
		pattern = decodeAddress
	}
	if found := pattern.FindStringSubmatch(id); found != nil {
		leg.Peer = MoRIIOPeer{}
		for part := range strings.SplitSeq(found[1], ",") {
			name, value, _ := strings.Cut(part, ":")
			port, _ := strconv.Atoi(value)
			switch name {
			case "host":
				leg.Peer.Host = value
			case "handshake":
				leg.Peer.Handshake = port
			case "notify":
				leg.Peer.Notify = port
			}
		}
	}
	switch {
	case leg.Peer.Host == "" || leg.Peer.Handshake == 0 || leg.Peer.Notify == 0:
		leg.problem = "ValueError: cannot route MoRI-IO transfer"
	case params["remote_block_ids"] == nil || params["remote_engine_id"] == nil:
		leg.problem = "KeyError in add_new_req"
	}
	return leg
}

// tells reports whether this rank of the consumer sends the block ids to the
// producer.
func (leg *MoRIIOLeg) tells(rank int) bool {
	switch {
	case leg.leader != nil:
		return *leg.leader
	case leg.override:
		return rank == leg.rank
	}
	return true
}

func (leg *MoRIIOLeg) fields() map[string]string {
	return map[string]string{"epoch": leg.epoch, "tag": leg.tag}
}

// PackMap encodes a map of names and values as Python's msgpack does.
func PackMap(pairs ...any) []byte {
	b := msgp.AppendMapHeader(nil, uint32(len(pairs)/2))
	for i := 0; i < len(pairs); i += 2 {
		b = msgp.AppendString(b, pairs[i].(string))
		switch v := pairs[i+1].(type) {
		case string:
			b = msgp.AppendString(b, v)
		case int:
			b = core.AppendInt(b, int64(v))
		case []byte:
			b = msgp.AppendBytes(b, v)
		case []int:
			b = msgp.AppendArrayHeader(b, uint32(len(v)))
			for _, n := range v {
				b = core.AppendInt(b, int64(n))
			}
		default:
			b = msgp.AppendNil(b)
		}
	}
	return b
}

// readMessage decodes a message, a map whose keys are strings.
func readMessage(b []byte) (map[string]any, error) {
	v, rest, err := msgp.ReadIntfBytes(b)
	if err != nil {
		return nil, err
	}
	m, ok := v.(map[string]any)
	if !ok || len(rest) > 0 {
		return nil, errors.New("unpack message: not a map")
	}
	return m, nil
}

func blockList(ids []core.BlockID) []int {
	list := make([]int, len(ids))
	for i, id := range ids {
		list[i] = int(id)
	}
	return list
}

// whole returns a number of an unpacked message.
func whole(v any) (int, bool) {
	switch n := v.(type) {
	case int64:
		return int(n), true
	case uint64:
		return int(n), true
	}
	return 0, false
}

// serveHandshake answers metadata queries for a rank, each with two messages:
// the agent's metadata and the layers'.
func (m *MoRIIO) serveHandshake(r *core.Rank) func(context.Context, *core.ZMTPConn) {
	return func(_ context.Context, c *core.ZMTPConn) {
		for {
			frames, err := c.Receive()
			if err != nil {
				return
			}
			if len(frames) != 1 || string(frames[0]) != "get_meta_msg" {
				m.e.Crash("HandshakeError: unexpected msg type")
				return
			}
			host, port := r.Side.HostPort()
			metadata := PackMap("engine_id", m.e.UUID, "agent_metadata", []byte(net.JoinHostPort(host, strconv.Itoa(port))),
				"kv_caches_base_addr", []int{4096}, "num_blocks", m.e.Cfg.KVBlocks, "block_len", m.e.Cfg.BlockSize, "attn_backend_name", "SIM")
			if c.Send(nil, metadata) != nil || c.Send(nil, PackMap()) != nil {
				return
			}
		}
	}
}

// session does the handshake with a rank of a peer, unless it was done before.
func (m *MoRIIO) session(ctx context.Context, peer MoRIIOPeer, rank int) (moriioSession, error) {
	addr := net.JoinHostPort(peer.Host, strconv.Itoa(peer.Handshake+rank))
	m.mu.Lock()
	s, known := m.sessions[addr]
	m.mu.Unlock()
	if known {
		return s, nil
	}
	ctx, cancel := context.WithTimeout(ctx, m.e.Cfg.HandshakeTimeout)
	defer cancel()
	c, err := m.e.DialPeer(ctx, addr)
	if err != nil {
		return s, fmt.Errorf("handshake: %w", err)
	}
	defer m.e.HangUp(c)
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if err := c.Send([]byte("get_meta_msg")); err != nil {
		return s, fmt.Errorf("handshake: %w", err)
	}
	var metadata map[string]any
	for n := range 2 {
		frames, err := c.Receive()
		if err != nil {
			return s, fmt.Errorf("handshake: %w", err)
		}
		if len(frames) != 2 || len(frames[0]) != 0 {
			return s, errNoSession
		}
		if n == 0 {
			if metadata, err = readMessage(frames[1]); err != nil {
				return s, err
			}
		}
	}
	side, _ := metadata["agent_metadata"].([]byte)
	engine, _ := metadata["engine_id"].(string)
	if length, _ := whole(metadata["block_len"]); length != m.e.Cfg.BlockSize || len(side) == 0 {
		return s, errNoSession
	}
	s = moriioSession{engine: engine, side: string(side)}
	m.mu.Lock()
	m.sessions[addr] = s
	m.mu.Unlock()
	return s, nil
}

// transfer does an RDMA operation on a rank of a peer. If the engine has restarted, it
// makes a new session, but not for blocks of an engine process that has ended.
func (m *MoRIIO) transfer(ctx context.Context, r *core.Rank, peer MoRIIOPeer, rank int, gone <-chan struct{}, op core.SideMessage) (core.SideMessage, error) {
	for first := true; ; first = false {
		s, err := m.session(ctx, peer, rank)
		if err != nil {
			return core.SideMessage{}, err
		}
		if err := r.Side.SetUp(ctx, s.side, s.engine); err != nil {
			return core.SideMessage{}, err
		}
		op.Engine = s.engine
		answer, err := r.Side.Call(ctx, s.side, op)
		if err == nil || !first || ctx.Err() != nil {
			return answer, err
		}
		m.mu.Lock()
		delete(m.sessions, net.JoinHostPort(peer.Host, strconv.Itoa(peer.Handshake+rank)))
		m.mu.Unlock()
		select {
		case <-gone:
			return answer, err
		default:
		}
	}
}

// shortestRestart is the shortest time in which a real engine starts again. A leg
// for the ended process has failed by then: its decode has a session with the ended
// process, whose memory key the network adapter refuses, and makes no second
// handshake (MoRIIOConnectorWorker._eager_handshaked_engines). Simulated engines
// start again at once and handshake again, so they refuse such reads by this time.
const shortestRestart = 5 * time.Second

// Message handles a peer's RDMA operation. Except for the reads of shortestRestart
// it rejects nothing, as RDMA rejects nothing: a write without a waiting request
// goes into memory that may belong to another request.
func (m *MoRIIO) Message(r *core.Rank, op core.SideMessage) (core.SideMessage, error) {
	for _, id := range op.Blocks {
		if id < 0 || int(id) >= m.e.Cfg.KVBlocks {
			return core.SideMessage{}, errors.New("block id out of range")
		}
	}
	answer := core.SideMessage{Op: op.Op}
	switch op.Op {
	case moriioRead:
		if err := checkAgent(m.e, op.Key, op.Fields); err != nil {
			return answer, err
		}
		if time.Since(m.started) < shortestRestart && !r.EverPinned(op.Key) {
			return answer, errors.New("memory key of an engine process that has ended")
		}
		answer.Payload = r.ReadPinned(op.Key, op.Blocks)
	case moriioWrite:
		m.mu.Lock()
		wait := m.receiving[moriioKey{r.Index, op.Key}]
		m.mu.Unlock()
		if wait == nil {
			m.e.Stats.StaleReads.Add(1)
			m.e.Cfg.Log.Warn("no request waits for the written KV", "transfer", op.Key)
		}
		r.Store(op.Blocks, op.Payload)
	default:
		return answer, errors.New("unknown message")
	}
	return answer, nil
}

// serveNotify receives notifications for a rank. An invalid one ends the
// engine's listener, and with it the engine.
func (m *MoRIIO) serveNotify(r *core.Rank) func(context.Context, *core.ZMTPConn) {
	return func(_ context.Context, c *core.ZMTPConn) {
		gone := make(chan struct{})
		defer close(gone)
		for {
			frames, err := c.Receive()
			if err != nil {
				return
			}
			if err := m.notified(r, gone, frames[len(frames)-1]); err != nil {
				m.e.Crash(err.Error())
				return
			}
		}
	}
}

// notified handles a notification of a peer. gone is closed when the peer ends.
func (m *MoRIIO) notified(r *core.Rank, gone <-chan struct{}, message []byte) error {
	data, err := readMessage(message)
	if err != nil {
		return err
	}
	transfer, _ := data["transfer_id"].(string)
	key := moriioKey{r.Index, transfer}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch kind, _ := data["type"].(string); {
	case kind == "remote_blocks" && m.producer:
		list, _ := data["block_notify_list"].([]any)
		if len(list) == 0 {
			return errors.New("block_notify_list cannot be empty in remote allocate message")
		}
		t := m.sendingOf(key)
		t.peerRank, _ = whole(data["decode_rank"])
		t.peerGone = gone
		for _, v := range list {
			id, ok := whole(v)
			if !ok {
				return errors.New("block_notify_list: not a list of numbers")
			}
			t.remote = append(t.remote, core.BlockID(id))
		}
		m.advance(key, t)
	case kind == "release" && m.producer:
		if n, ok := whole(data["consumer_tp_size"]); !ok || n < 1 {
			return errors.New("invalid consumer_tp_size in release message")
		}
		if r.Unpin(transfer) {
			delete(m.sending, key)
			return nil
		}
		t := m.sendingOf(key) // prefill may not have finished
		t.released = true
		time.AfterFunc(m.e.Cfg.MoRIIO.DeferTimeout, func() { m.forget(key, t) })
	case kind == "write_done" && !m.producer:
		if wait := m.receiving[key]; wait != nil && !wait.got {
			wait.got = true
			close(wait.done)
		}
	default:
		return fmt.Errorf("unhandled message type %q for this role", kind)
	}
	return nil
}

// forget drops a release without a prefill.
func (m *MoRIIO) forget(key moriioKey, t *moriioSending) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sending[key] == t {
		delete(m.sending, key)
	}
}

// tell sends a notification to a rank of a peer.
func (m *MoRIIO) tell(ctx context.Context, peer MoRIIOPeer, rank int, message []byte) {
	m.peers.Send(ctx, net.JoinHostPort(peer.Host, strconv.Itoa(peer.Notify+rank)), message)
}
