package enginesim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"
	"sync"
	"time"
)

// p2pNCCL is vLLM's P2pNcclConnector with send_type PUT_ASYNC. A producer sends
// the KV of a prompt, before it answers, to the consumer whose address is in
// the request id. The consumer keeps the KV in a buffer under the id until its
// own request of that id ends. The announcements use real ZMTP and the engines'
// own messages. NCCL's operations are messages of the side channel, whose
// address is the unique id.
//
// The ids are those of the serving layer: the simulated engine adds nothing to
// them (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION, or a release without random
// suffixes).
//
// Source: vLLM before pull request 44854, distributed/kv_transfer/kv_connector/v1/
// p2p/.
type p2pNCCL struct {
	e        *Engine
	producer bool
	address  string // announced
	peers    *zmtpPeering

	mu sync.Mutex
	// sending holds the KV that peers may fetch, buffer the received KV, both
	// by request id.
	sending map[string]*p2pSending
	buffer  map[string]*p2pReceived
}

// p2pSending is KV for a consumer.
type p2pSending struct {
	payload []byte
	fetched chan struct{} // closed when it was fetched
}

// p2pReceived is the KV of a request in a consumer's buffer.
type p2pReceived struct {
	here    chan struct{} // closed when the KV has arrived
	payload []byte
	blocks  int
	expiry  *time.Timer
}

// p2pFetch is the side channel operation that stands for ncclSend and ncclRecv.
const p2pFetch = "p2p-fetch"

func newP2PNCCL(e *Engine) *p2pNCCL {
	return &p2pNCCL{
		e: e, producer: e.cfg.Role == RolePrefill, peers: newZMTPPeering(e),
		sending: make(map[string]*p2pSending), buffer: make(map[string]*p2pReceived),
	}
}

// start opens the socket, and begins to register. The engine's mutex is held.
func (m *p2pNCCL) start() error {
	host, _, err := net.SplitHostPort(m.e.cfg.Listen)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, fmt.Sprint(m.e.cfg.P2PNCCL.Port)))
	if err != nil {
		return fmt.Errorf("listen kv port: %w", err)
	}
	m.e.peers.listeners = append(m.e.peers.listeners, l)
	side, _ := m.e.ranks[0].side.hostPort()
	m.address = net.JoinHostPort(side, fmt.Sprint(l.Addr().(*net.TCPAddr).Port))
	m.e.servePeers(l, "ROUTER", m.serve)
	if m.e.cfg.MoRIIO.Register != "" {
		m.e.spawn(m.register)
	}
	return nil
}

// register sends the engine's registration to the proxy every few seconds.
func (m *p2pNCCL) register(ctx context.Context) {
	kind := "D"
	if m.producer {
		kind = "P"
	}
	message := packMap("type", kind, "http_address", m.e.Addr(), "zmq_address", m.address)
	proxy := newZMTPPeering(m.e) // separate, so that its failures do not delay transfers
	tick := time.NewTicker(m.e.cfg.MoRIIO.PingInterval)
	defer tick.Stop()
	for {
		proxy.send(ctx, strings.TrimPrefix(m.e.cfg.MoRIIO.Register, "tcp://"), message)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// The patterns of parse_request_id, by the role of the engine that parses.
var (
	p2pDecodeAddress  = regexp.MustCompile(`___decode_addr_(.*):(\d+)`)
	p2pPrefillAddress = regexp.MustCompile(`___prefill_addr_(.*):(\d+)___`)
)

// parse returns the addresses in the id: the connector has no parameters.
func (m *p2pNCCL) parse(_ fields, id string) any {
	pattern := p2pPrefillAddress
	if m.producer {
		pattern = p2pDecodeAddress
	}
	if found := pattern.FindStringSubmatch(id); found != nil {
		return net.JoinHostPort(found[1], found[2])
	}
	return ""
}

// rejected does nothing: the connector informs no peer.
func (m *p2pNCCL) rejected(any) {}

// run runs a sequence whose rank is chosen. A request whose id names no address
// ends the engine, unless it needs no KV.
func (m *p2pNCCL) run(ctx context.Context, s *sequence, parsed any, emit func(token)) error {
	peer, _ := parsed.(string)
	id := s.id[:len(s.id)-len("-01234567")] // the id of the serving layer
	if err := s.rank.reserve(ctx, s, room(s), true); err != nil {
		m.drop(id)
		return err
	}
	defer m.drop(id)
	needs := m.producer || len(s.prompt)-1 > s.computed
	if needs && peer == "" {
		m.e.crash("ValueError: Request id does not contain hostname and port")
		return errEngineCore
	}
	if !m.producer && needs {
		if err := m.take(ctx, s, id); err != nil {
			return err
		}
	}
	if err := s.rank.prefill(ctx, s); err != nil {
		return err
	}
	if m.producer {
		if err := m.put(s, id, peer); err != nil {
			m.e.cfg.Log.Error("KV was not sent", "request", id, "error", err)
			return errLoad
		}
	}
	return s.rank.decode(ctx, s, emit)
}

// put sends a prompt's KV to a consumer and waits until the consumer has it.
func (m *p2pNCCL) put(s *sequence, id, peer string) error {
	ids := s.blocks[:s.rank.cache.blocksFor(len(s.prompt))]
	t := &p2pSending{payload: s.rank.content(ids), fetched: make(chan struct{})}
	m.mu.Lock()
	m.sending[id] = t
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.sending[id] == t {
			delete(m.sending, id)
		}
	}()
	limit, cancel := context.WithTimeout(m.e.ctx, m.limit())
	defer cancel()
	host, port := s.rank.side.hostPort()
	// Both messages use one connection. The real engine dies when its consumer
	// restarts between them, and no proxy can prevent that.
	m.peers.send(limit, peer,
		packMap("cmd", "NEW", "unique_id", []byte(net.JoinHostPort(host, fmt.Sprint(port)))),
		packMap("cmd", "PUT", "tensor_id", id+"#layer", "shape", []int{len(ids), m.e.cfg.BlockSize}, "dtype", "bfloat16"))
	select {
	case <-t.fetched:
		return nil
	case <-limit.Done():
		return context.Cause(limit)
	}
}

// limit returns the time limit of waits, which the real engine does not have.
func (m *p2pNCCL) limit() time.Duration {
	if d := m.e.cfg.P2PNCCL.BufferTimeout; d > 0 {
		return d
	}
	return 24 * time.Hour
}

// serve takes the announcements of one producer, one after another.
func (m *p2pNCCL) serve(ctx context.Context, c *zmtpConn) {
	r := m.e.ranks[0]
	side := ""
	for {
		frames, err := c.receive()
		if err != nil {
			return
		}
		data, err := readMessage(frames[len(frames)-1])
		if err != nil {
			m.e.crash("listen_for_requests: " + err.Error())
			return
		}
		switch command, _ := data["cmd"].(string); command {
		case "NEW":
			unique, _ := data["unique_id"].([]byte)
			side = string(unique)
		case "PUT":
			tensor, _ := data["tensor_id"].(string)
			id, _, _ := strings.Cut(tensor, "#")
			shape, _ := data["shape"].([]any)
			if side == "" || len(shape) != 2 {
				m.e.crash("listen_for_requests: KeyError")
				return
			}
			blocks, _ := whole(shape[0])
			if size, _ := whole(shape[1]); size != m.e.cfg.BlockSize {
				m.e.crash("NotImplementedError: only symmetric TP is supported")
				return
			}
			if c.send([]byte("0")) != nil {
				return
			}
			m.receive(ctx, r, side, id, blocks)
		default:
			m.e.cfg.Log.Warn("unexpected message", "cmd", command)
		}
	}
}

// receive fetches the KV of a request into the buffer.
func (m *p2pNCCL) receive(ctx context.Context, r *rank, side, id string, blocks int) {
	limit, cancel := context.WithTimeout(ctx, m.limit())
	defer cancel()
	if r.side.setUp(limit, side, "") != nil {
		return
	}
	// The KV is in the buffer before the producer can have answered.
	m.mu.Lock()
	b := m.entry(id)
	m.mu.Unlock()
	answer, err := r.side.call(limit, side, sideMessage{Op: p2pFetch, Key: id})
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.buffer[id] != b {
		return // its time is up
	}
	if err != nil {
		m.e.cfg.Log.Error("KV was not received", "request", id, "error", err)
		delete(m.buffer, id)
		return
	}
	if b.payload == nil {
		b.payload, b.blocks = answer.Payload, blocks
		close(b.here)
	}
}

// entry returns the buffer's entry of a request, and makes it if needed; mu is
// held.
func (m *p2pNCCL) entry(id string) *p2pReceived {
	b := m.buffer[id]
	if b == nil {
		b = &p2pReceived{here: make(chan struct{})}
		b.expiry = time.AfterFunc(m.limit(), func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.buffer[id] == b {
				delete(m.buffer, id)
			}
		})
		m.buffer[id] = b
	}
	return b
}

// take moves the KV of a request from the buffer into its blocks. The real
// engine stops until the KV is there. This one fails when the time is up. An
// aborted request ends at once: vLLM's server forgets its id at once
// (v1/engine/async_llm.py, abort), and the engine's core gets the abort before a
// later request with this id.
func (m *p2pNCCL) take(ctx context.Context, s *sequence, id string) error {
	m.mu.Lock()
	b := m.entry(id)
	m.mu.Unlock()
	err := s.rank.waitLoading(func() error {
		limit := time.NewTimer(m.limit())
		defer limit.Stop()
		select {
		case <-b.here:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-limit.C:
			m.e.cfg.Log.Error("the engine waits for KV that no engine sends", "request", id)
			return errLoad
		case <-m.e.ctx.Done():
			return context.Cause(m.e.ctx)
		}
	})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return err
	case s.req.fault == failLoad:
		return errLoad
	}
	hit := s.computed / s.rank.cache.size
	local := s.blocks[hit:s.rank.cache.blocksFor(len(s.prompt))]
	if b.blocks != hit+len(local) {
		m.e.crash("shape mismatch: the KV is of another prompt")
		return errEngineCore
	}
	s.rank.store(local, b.payload[len(b.payload)/b.blocks*hit:])
	m.e.stats.transfers.Add(1)
	s.rank.loaded(s, len(s.prompt)-1)
	s.cached = len(s.prompt) - 1
	return nil
}

// drop removes the buffer's content of a request that has ended.
func (m *p2pNCCL) drop(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.buffer[id]; b != nil && !m.producer {
		b.expiry.Stop()
		delete(m.buffer, id)
	}
}

// held returns the number of blocks whose KV is in the buffer.
func (m *p2pNCCL) held() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.e.ctx.Err() != nil {
		return 0
	}
	for _, b := range m.buffer {
		n += b.blocks
	}
	return n
}

// message returns KV that was announced to a consumer.
func (m *p2pNCCL) message(_ *rank, op sideMessage) (sideMessage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.sending[op.Key]
	if op.Op != p2pFetch || t == nil {
		return sideMessage{}, errors.New("nothing is sent under this id")
	}
	delete(m.sending, op.Key)
	close(t.fetched)
	return sideMessage{Op: op.Op, Payload: t.payload}, nil
}
