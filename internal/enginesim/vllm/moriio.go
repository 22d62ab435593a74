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

// MoRIIO is vLLM's MoRIIOConnector in one of its modes. A prefill engine is a
// producer, a decode engine a consumer. An engine of role both does not use the
// connector. The handshake and the notifications use real ZMTP sockets and the
// engines' own messages. Only the RDMA operations are messages of the side
// channel, whose address the handshake contains.
//
// Source: vLLM 0.32, distributed/kv_transfer/kv_connector/v1/moriio/.
type MoRIIO struct {
	e        *core.Engine
	read     bool
	producer bool

	Host      string // announced
	Handshake int    // rank 0's ports
	Notify    int
	started   time.Time

	peers *core.ZMTPPeering // connections for notifications to peers

	mu sync.Mutex
	// sessions are the engines with which a handshake has completed, by address.
	sessions map[string]moriioSession
	// sending are a producer's transfers, receiving a consumer's.
	sending   map[moriioKey]*moriioSending
	receiving map[moriioKey]*moriioReceiving
}

// moriioKey is a transfer on one rank of this engine.
type moriioKey struct {
	rank     int
	transfer string
}

// moriioSession is the result of a handshake with a rank of a peer.
type moriioSession struct {
	engine string
	side   string // address of the side channel
}

// moriioSending is a transfer of a producer.
type moriioSending struct {
	leg      *MoRIIOLeg // nil until prefill has computed the prompt
	blocks   []core.BlockID
	lost     bool           // the fault "lost-notification"
	remote   []core.BlockID // the consumer's blocks, nil until the consumer has named them
	peerRank int
	peerGone <-chan struct{} // closed when the consumer that named the blocks has ended
	released bool            // the consumer has finished reading, or will not read
}

// moriioReceiving is a consumer's wait for a producer's write.
type moriioReceiving struct {
	rank *core.Rank
	done chan struct{} // closed by write_done
	got  bool
}

func newMoRIIO(e *core.Engine, read bool) *MoRIIO {
	return &MoRIIO{
		e: e, read: read, producer: e.Cfg.Role == core.RolePrefill,
		sessions: make(map[string]moriioSession), peers: core.NewZMTPPeering(e),
		sending: make(map[moriioKey]*moriioSending), receiving: make(map[moriioKey]*moriioReceiving),
	}
}

// Start opens the sockets of all ranks and begins to register. The engine's
// mutex is held.
func (m *MoRIIO) Start() error {
	host, _, err := net.SplitHostPort(m.e.Cfg.Listen)
	if err != nil {
		return err
	}
	handshakes, err := core.ListenRow(fmt.Sprintf("tcp://%s", net.JoinHostPort(host, fmt.Sprint(m.e.Cfg.MoRIIO.HandshakePort))), len(m.e.Ranks))
	if err != nil {
		return fmt.Errorf("listen handshake: %w", err)
	}
	m.e.Peers.Listeners = append(m.e.Peers.Listeners, handshakes...)
	notifies, err := core.ListenRow(fmt.Sprintf("tcp://%s", net.JoinHostPort(host, fmt.Sprint(m.e.Cfg.MoRIIO.NotifyPort))), len(m.e.Ranks))
	if err != nil {
		return fmt.Errorf("listen notify: %w", err)
	}
	m.e.Peers.Listeners = append(m.e.Peers.Listeners, notifies...)
	m.Host, _ = m.e.Ranks[0].Side.HostPort()
	m.Handshake = handshakes[0].Addr().(*net.TCPAddr).Port
	m.Notify = notifies[0].Addr().(*net.TCPAddr).Port
	for i, r := range m.e.Ranks {
		m.e.ServePeers(handshakes[i], "ROUTER", m.serveHandshake(r))
		m.e.ServePeers(notifies[i], "ROUTER", m.serveNotify(r))
	}
	m.started = time.Now()
	if m.e.Cfg.MoRIIO.Register != "" {
		m.e.Spawn(m.register)
	}
	return nil
}

func (m *MoRIIO) address() string {
	return fmt.Sprintf("host:%s,handshake:%d,notify:%d", m.Host, m.Handshake, m.Notify)
}

// run runs a sequence whose rank is chosen.
func (m *MoRIIO) run(ctx context.Context, s *core.Sequence, parsed any, emit func(core.Token)) error {
	leg, _ := parsed.(*MoRIIOLeg)
	if leg != nil && leg.problem != "" {
		m.e.Crash(leg.problem)
		return errEngineCore
	}
	var err error
	switch {
	case m.producer || !m.read && (leg == nil || !leg.remotePrefill):
		err = s.Rank.Reserve(ctx, s, core.Room(s), true)
	case m.read:
		err = m.pull(ctx, s, leg)
	default:
		err = m.await(ctx, s, leg)
	}
	if err != nil {
		return err
	}
	if err := s.Rank.AcquireUnheld(ctx, s); err != nil {
		return err
	}
	if err := s.Rank.Prefill(ctx, s); err != nil {
		return err
	}
	if err := s.Rank.Decode(ctx, s, emit); err != nil {
		return err
	}
	if m.producer && leg != nil && leg.remoteDecode {
		s.Ext = m.hold(s, leg)
	}
	return nil
}

// hold keeps a finished prefill's blocks and returns the parameters of its
// answer. Only a sequence that ended at its limit of tokens has parameters.
func (m *MoRIIO) hold(s *core.Sequence, leg *MoRIIOLeg) any {
	if s.Req.Fault == core.FailNoParams || s.Finish != "length" {
		return nil
	}
	ids := s.Blocks[:s.Rank.Cache.BlocksFor(s.Computed)]
	s.Rank.Pin(s, leg.Transfer, m.e.Cfg.MoRIIO.DeferTimeout)
	key := moriioKey{s.Rank.Index, leg.Transfer}
	m.mu.Lock()
	t := m.sendingOf(key)
	t.leg, t.blocks, t.lost = leg, ids, s.Req.Fault == core.FailNotify
	m.advance(key, t)
	m.mu.Unlock()
	return withFuture(m.e, core.Obj(
		"do_remote_prefill", true, "do_remote_decode", false,
		"remote_block_ids", [][]core.BlockID{ids}, "remote_engine_id", fmt.Sprintf("%s:%d", m.Host, m.Handshake),
		"remote_host", m.Host, "remote_handshake_port", m.Handshake, "remote_notify_port", m.Notify,
		"remote_dp_rank", s.Rank.Index, "remote_dp_rank_override", true,
		"remote_dp_size", len(m.e.Ranks), "remote_dp_size_local", len(m.e.Ranks), "tp_size", m.e.Cfg.MoRIIO.TPSize,
		"transfer_id", leg.Transfer,
	), leg.Transfer)
}

// sendingOf returns the transfer of key, and makes it if needed; mu is held.
func (m *MoRIIO) sendingOf(key moriioKey) *moriioSending {
	t := m.sending[key]
	if t == nil {
		t = &moriioSending{}
		m.sending[key] = t
	}
	return t
}

// advance does the next possible steps of a transfer; mu is held.
func (m *MoRIIO) advance(key moriioKey, t *moriioSending) {
	r := m.e.Ranks[key.rank]
	switch {
	case t.leg == nil:
	case t.released:
		delete(m.sending, key)
		r.Unpin(key.transfer)
	case t.remote != nil:
		delete(m.sending, key)
		if !r.Renew(key.transfer, nixlReadTimeout) {
			m.e.Cfg.Log.Warn("remote blocks came too late", "transfer", key.transfer) // the transfer is terminal
			return
		}
		m.e.Spawn(func(ctx context.Context) { m.write(ctx, r, key.transfer, t) })
	}
}

// write writes a prompt's KV into the consumer's blocks, notifies the consumer
// and frees the producer's blocks, whether or not the write succeeded.
func (m *MoRIIO) write(ctx context.Context, r *core.Rank, transfer string, t *moriioSending) {
	defer r.Unpin(transfer)
	ctx, cancel := context.WithTimeout(ctx, nixlReadTimeout)
	defer cancel()
	if len(t.remote) > len(t.blocks) {
		m.e.Cfg.Log.Error("KV write failed: the consumer has more blocks than the producer", "transfer", transfer)
		return
	}
	payload := r.ReadPinned(transfer, t.blocks[len(t.blocks)-len(t.remote):])
	_, err := m.transfer(ctx, r, t.leg.Peer, t.peerRank, t.peerGone, core.SideMessage{
		Op: moriioWrite, Key: transfer, Blocks: t.remote, Payload: payload,
	})
	if err != nil {
		m.e.Cfg.Log.Error("KV write failed", "transfer", transfer, "error", err)
		return
	}
	if !t.lost {
		m.tell(ctx, t.leg.Peer, t.peerRank, PackMap("type", "write_done", "transfer_id", transfer))
	}
}

// errNeverWritten reports that a producer has not written in time.
var errNeverWritten = errors.New("KV write timed out")
