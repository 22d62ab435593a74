package enginesim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// moriio is vLLM's MoRIIOConnector in one of its modes. A prefill engine is a
// producer, a decode engine a consumer. An engine of role both does not use the
// connector. The handshake and the notifications use real ZMTP sockets and the
// engines' own messages. Only the RDMA operations are messages of the side
// channel, whose address the handshake contains.
//
// Source: vLLM 0.32, distributed/kv_transfer/kv_connector/v1/moriio/.
type moriio struct {
	e        *Engine
	read     bool
	producer bool

	host      string // announced
	handshake int    // rank 0's ports
	notify    int
	started   time.Time

	peers *zmtpPeering // connections for notifications to peers

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
	leg      *moriioLeg // nil until prefill has computed the prompt
	blocks   []blockID
	lost     bool      // the fault "lost-notification"
	remote   []blockID // the consumer's blocks, nil until the consumer has named them
	peerRank int
	peerGone <-chan struct{} // closed when the consumer that named the blocks has ended
	released bool            // the consumer has finished reading, or will not read
}

// moriioReceiving is a consumer's wait for a producer's write.
type moriioReceiving struct {
	rank *rank
	done chan struct{} // closed by write_done
	got  bool
}

func newMoRIIO(e *Engine, read bool) *moriio {
	return &moriio{
		e: e, read: read, producer: e.cfg.Role == RolePrefill,
		sessions: make(map[string]moriioSession), peers: newZMTPPeering(e),
		sending: make(map[moriioKey]*moriioSending), receiving: make(map[moriioKey]*moriioReceiving),
	}
}

// start opens the sockets of all ranks and begins to register. The engine's
// mutex is held.
func (m *moriio) start() error {
	host, _, err := net.SplitHostPort(m.e.cfg.Listen)
	if err != nil {
		return err
	}
	handshakes, err := listenRow(fmt.Sprintf("tcp://%s", net.JoinHostPort(host, fmt.Sprint(m.e.cfg.MoRIIO.HandshakePort))), len(m.e.ranks))
	if err != nil {
		return fmt.Errorf("listen handshake: %w", err)
	}
	m.e.peers.listeners = append(m.e.peers.listeners, handshakes...)
	notifies, err := listenRow(fmt.Sprintf("tcp://%s", net.JoinHostPort(host, fmt.Sprint(m.e.cfg.MoRIIO.NotifyPort))), len(m.e.ranks))
	if err != nil {
		return fmt.Errorf("listen notify: %w", err)
	}
	m.e.peers.listeners = append(m.e.peers.listeners, notifies...)
	m.host, _ = m.e.ranks[0].side.hostPort()
	m.handshake = handshakes[0].Addr().(*net.TCPAddr).Port
	m.notify = notifies[0].Addr().(*net.TCPAddr).Port
	for i, r := range m.e.ranks {
		m.e.servePeers(handshakes[i], "ROUTER", m.serveHandshake(r))
		m.e.servePeers(notifies[i], "ROUTER", m.serveNotify(r))
	}
	m.started = time.Now()
	if m.e.cfg.MoRIIO.Register != "" {
		m.e.spawn(m.register)
	}
	return nil
}

func (m *moriio) address() string {
	return fmt.Sprintf("host:%s,handshake:%d,notify:%d", m.host, m.handshake, m.notify)
}

// run runs a sequence whose rank is chosen.
func (m *moriio) run(ctx context.Context, s *sequence, parsed any, emit func(token)) error {
	leg, _ := parsed.(*moriioLeg)
	if leg != nil && leg.problem != "" {
		m.e.crash(leg.problem)
		return errEngineCore
	}
	var err error
	switch {
	case m.producer || !m.read && (leg == nil || !leg.remotePrefill):
		err = s.rank.reserve(ctx, s, room(s), true)
	case m.read:
		err = m.pull(ctx, s, leg)
	default:
		err = m.await(ctx, s, leg)
	}
	if err != nil {
		return err
	}
	if err := s.rank.acquireUnheld(ctx, s); err != nil {
		return err
	}
	if err := s.rank.prefill(ctx, s); err != nil {
		return err
	}
	if err := s.rank.decode(ctx, s, emit); err != nil {
		return err
	}
	if m.producer && leg != nil && leg.remoteDecode {
		s.ext = m.hold(s, leg)
	}
	return nil
}

// hold keeps a finished prefill's blocks and returns the parameters of its
// answer. Only a sequence that ended at its limit of tokens has parameters.
func (m *moriio) hold(s *sequence, leg *moriioLeg) any {
	if s.req.fault == failNoParams || s.finish != "length" {
		return nil
	}
	ids := s.blocks[:s.rank.cache.blocksFor(s.computed)]
	s.rank.pin(s, leg.transfer, m.e.cfg.MoRIIO.DeferTimeout)
	key := moriioKey{s.rank.index, leg.transfer}
	m.mu.Lock()
	t := m.sendingOf(key)
	t.leg, t.blocks, t.lost = leg, ids, s.req.fault == failNotify
	m.advance(key, t)
	m.mu.Unlock()
	return withFuture(m.e, obj(
		"do_remote_prefill", true, "do_remote_decode", false,
		"remote_block_ids", [][]blockID{ids}, "remote_engine_id", fmt.Sprintf("%s:%d", m.host, m.handshake),
		"remote_host", m.host, "remote_handshake_port", m.handshake, "remote_notify_port", m.notify,
		"remote_dp_rank", s.rank.index, "remote_dp_rank_override", true,
		"remote_dp_size", len(m.e.ranks), "remote_dp_size_local", len(m.e.ranks), "tp_size", m.e.cfg.MoRIIO.TPSize,
		"transfer_id", leg.transfer,
	), leg.transfer)
}

// sendingOf returns the transfer of key, and makes it if needed; mu is held.
func (m *moriio) sendingOf(key moriioKey) *moriioSending {
	t := m.sending[key]
	if t == nil {
		t = &moriioSending{}
		m.sending[key] = t
	}
	return t
}

// advance does the next possible steps of a transfer; mu is held.
func (m *moriio) advance(key moriioKey, t *moriioSending) {
	r := m.e.ranks[key.rank]
	switch {
	case t.leg == nil:
	case t.released:
		delete(m.sending, key)
		r.unpin(key.transfer)
	case t.remote != nil:
		delete(m.sending, key)
		if !r.renew(key.transfer, nixlReadTimeout) {
			m.e.cfg.Log.Warn("remote blocks came too late", "transfer", key.transfer) // the transfer is terminal
			return
		}
		m.e.spawn(func(ctx context.Context) { m.write(ctx, r, key.transfer, t) })
	}
}

// write writes a prompt's KV into the consumer's blocks, notifies the consumer
// and frees the producer's blocks, whether or not the write succeeded.
func (m *moriio) write(ctx context.Context, r *rank, transfer string, t *moriioSending) {
	defer r.unpin(transfer)
	ctx, cancel := context.WithTimeout(ctx, nixlReadTimeout)
	defer cancel()
	if len(t.remote) > len(t.blocks) {
		m.e.cfg.Log.Error("KV write failed: the consumer has more blocks than the producer", "transfer", transfer)
		return
	}
	payload := r.readPinned(transfer, t.blocks[len(t.blocks)-len(t.remote):])
	_, err := m.transfer(ctx, r, t.leg.peer, t.peerRank, t.peerGone, sideMessage{
		Op: moriioWrite, Key: transfer, Blocks: t.remote, Payload: payload,
	})
	if err != nil {
		m.e.cfg.Log.Error("KV write failed", "transfer", transfer, "error", err)
		return
	}
	if !t.lost {
		m.tell(ctx, t.leg.peer, t.peerRank, packMap("type", "write_done", "transfer_id", transfer))
	}
}

// errNeverWritten reports that a producer has not written in time.
var errNeverWritten = errors.New("KV write timed out")
