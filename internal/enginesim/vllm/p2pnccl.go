package vllm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
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
	e        *core.Engine
	producer bool
	address  string // announced
	peers    *core.ZMTPPeering

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

func newP2PNCCL(e *core.Engine) *p2pNCCL {
	return &p2pNCCL{
		e: e, producer: e.Cfg.Role == core.RolePrefill, peers: core.NewZMTPPeering(e),
		sending: make(map[string]*p2pSending), buffer: make(map[string]*p2pReceived),
	}
}

// Start opens the socket, and begins to register. The engine's mutex is held.
func (m *p2pNCCL) Start() error {
	host, _, err := net.SplitHostPort(m.e.Cfg.Listen)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, fmt.Sprint(m.e.Cfg.P2PNCCL.Port)))
	if err != nil {
		return fmt.Errorf("listen kv port: %w", err)
	}
	m.e.Peers.Listeners = append(m.e.Peers.Listeners, l)
	side, _ := m.e.Ranks[0].Side.HostPort()
	m.address = net.JoinHostPort(side, fmt.Sprint(l.Addr().(*net.TCPAddr).Port))
	m.e.ServePeers(l, "ROUTER", m.serve)
	if m.e.Cfg.MoRIIO.Register != "" {
		m.e.Spawn(m.register)
	}
	return nil
}

// register sends the engine's registration to the proxy every few seconds.
func (m *p2pNCCL) register(ctx context.Context) {
	kind := "D"
	if m.producer {
		kind = "P"
	}
	message := PackMap("type", kind, "http_address", m.e.Addr(), "zmq_address", m.address)
	proxy := core.NewZMTPPeering(m.e) // separate, so that its failures do not delay transfers
	tick := time.NewTicker(m.e.Cfg.MoRIIO.PingInterval)
	defer tick.Stop()
	for {
		proxy.Send(ctx, strings.TrimPrefix(m.e.Cfg.MoRIIO.Register, "tcp://"), message)
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

// Parse returns the addresses in the id: the connector has no parameters.
func (m *p2pNCCL) Parse(_ core.Fields, id string) any {
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
func (m *p2pNCCL) run(ctx context.Context, s *core.Sequence, parsed any, emit func(core.Token)) error {
	peer, _ := parsed.(string)
	id := s.ID[:len(s.ID)-len("-01234567")] // the id of the serving layer
	if err := s.Rank.Reserve(ctx, s, core.Room(s), true); err != nil {
		m.drop(id)
		return err
	}
	defer m.drop(id)
	needs := m.producer || len(s.Prompt)-1 > s.Computed
	if needs && peer == "" {
		m.e.Crash("ValueError: Request id does not contain hostname and port")
		return errEngineCore
	}
	if !m.producer && needs {
		if err := m.take(ctx, s, id); err != nil {
			return err
		}
	}
	if err := s.Rank.Prefill(ctx, s); err != nil {
		return err
	}
	if m.producer {
		if err := m.put(s, id, peer); err != nil {
			m.e.Cfg.Log.Error("KV was not sent", "request", id, "error", err)
			return errLoad
		}
	}
	return s.Rank.Decode(ctx, s, emit)
}

// put sends a prompt's KV to a consumer and waits until the consumer has it.
func (m *p2pNCCL) put(s *core.Sequence, id, peer string) error {
	ids := s.Blocks[:s.Rank.Cache.BlocksFor(len(s.Prompt))]
	t := &p2pSending{payload: s.Rank.Content(ids), fetched: make(chan struct{})}
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
	limit, cancel := context.WithTimeout(m.e.Ctx, m.limit())
	defer cancel()
	host, port := s.Rank.Side.HostPort()
	// Both messages use one connection. The real engine dies when its consumer
	// restarts between them, and no proxy can prevent that.
	m.peers.Send(limit, peer,
		PackMap("cmd", "NEW", "unique_id", []byte(net.JoinHostPort(host, fmt.Sprint(port)))),
		PackMap("cmd", "PUT", "tensor_id", id+"#layer", "shape", []int{len(ids), m.e.Cfg.BlockSize}, "dtype", "bfloat16"))
	select {
	case <-t.fetched:
		return nil
	case <-limit.Done():
		return context.Cause(limit)
	}
}

// limit returns the time limit of waits, which the real engine does not have.
func (m *p2pNCCL) limit() time.Duration {
	if d := m.e.Cfg.P2PNCCL.BufferTimeout; d > 0 {
		return d
	}
	return 24 * time.Hour
}

// serve takes the announcements of one producer, one after another.
func (m *p2pNCCL) serve(ctx context.Context, c *core.ZMTPConn) {
	r := m.e.Ranks[0]
	side := ""
	for {
		frames, err := c.Receive()
		if err != nil {
			return
		}
		data, err := readMessage(frames[len(frames)-1])
		if err != nil {
			m.e.Crash("listen_for_requests: " + err.Error())
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
				m.e.Crash("listen_for_requests: KeyError")
				return
			}
			blocks, _ := whole(shape[0])
			if size, _ := whole(shape[1]); size != m.e.Cfg.BlockSize {
				m.e.Crash("NotImplementedError: only symmetric TP is supported")
				return
			}
			if c.Send([]byte("0")) != nil {
				return
			}
			m.receive(ctx, r, side, id, blocks)
		default:
			m.e.Cfg.Log.Warn("unexpected message", "cmd", command)
		}
	}
}

// receive fetches the KV of a request into the buffer.
func (m *p2pNCCL) receive(ctx context.Context, r *core.Rank, side, id string, blocks int) {
	limit, cancel := context.WithTimeout(ctx, m.limit())
	defer cancel()
	if r.Side.SetUp(limit, side, "") != nil {
		return
	}
	// The KV is in the buffer before the producer can have answered.
	m.mu.Lock()
	b := m.entry(id)
	m.mu.Unlock()
	answer, err := r.Side.Call(limit, side, core.SideMessage{Op: p2pFetch, Key: id})
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.buffer[id] != b {
		return // its time is up
	}
	if err != nil {
		m.e.Cfg.Log.Error("KV was not received", "request", id, "error", err)
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
func (m *p2pNCCL) take(ctx context.Context, s *core.Sequence, id string) error {
	m.mu.Lock()
	b := m.entry(id)
	m.mu.Unlock()
	err := s.Rank.WaitLoading(func() error {
		limit := time.NewTimer(m.limit())
		defer limit.Stop()
		select {
		case <-b.here:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-limit.C:
			m.e.Cfg.Log.Error("the engine waits for KV that no engine sends", "request", id)
			return errLoad
		case <-m.e.Ctx.Done():
			return context.Cause(m.e.Ctx)
		}
	})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return err
	case s.Req.Fault == core.FailLoad:
		return errLoad
	}
	hit := s.Computed / s.Rank.Cache.Size
	local := s.Blocks[hit:s.Rank.Cache.BlocksFor(len(s.Prompt))]
	if b.blocks != hit+len(local) {
		m.e.Crash("shape mismatch: the KV is of another prompt")
		return errEngineCore
	}
	s.Rank.Store(local, b.payload[len(b.payload)/b.blocks*hit:])
	m.e.Stats.Transfers.Add(1)
	s.Rank.Loaded(s, len(s.Prompt)-1)
	s.Cached = len(s.Prompt) - 1
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
	if m.e.Ctx.Err() != nil {
		return 0
	}
	for _, b := range m.buffer {
		n += b.blocks
	}
	return n
}

// Message returns KV that was announced to a consumer.
func (m *p2pNCCL) Message(_ *core.Rank, op core.SideMessage) (core.SideMessage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t := m.sending[op.Key]
	if op.Op != p2pFetch || t == nil {
		return core.SideMessage{}, errors.New("nothing is sent under this id")
	}
	delete(m.sending, op.Key)
	close(t.fetched)
	return core.SideMessage{Op: op.Op, Payload: t.payload}, nil
}
