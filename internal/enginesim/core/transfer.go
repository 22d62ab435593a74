package core

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"time"
)

// SideMessage is one message of the simulator's side channel: it stands for the
// RDMA transfers and notifications of the real engines. A frame is a 4-byte
// big-endian length of the JSON head, the head, a 4-byte length of the payload
// and the payload.
type SideMessage struct {
	// Op is the protocol's name of the message.
	Op string `json:"op"`
	// Engine is the engine id that the sender expects. A channel of another
	// engine rejects the message (the peer has restarted). Empty: no check.
	Engine string `json:"engine,omitempty"`
	// Key names the pinned set or the transfer.
	Key string `json:"key,omitempty"`
	// Blocks are block ids in the receiver's cache.
	Blocks []BlockID `json:"blocks,omitempty"`
	// Fields are the protocol's own.
	Fields map[string]string `json:"fields,omitempty"`
	// Error is set in an answer that rejects a message.
	Error string `json:"error,omitempty"`
	// Payload is KV content.
	Payload []byte `json:"-"`
}

// maxSideFrame bounds either part of a frame.
const maxSideFrame = 1 << 28

// ErrPeer reports that the peer engine rejected a message.
var ErrPeer = errors.New("peer refused")

// sideChannel is the side channel of one rank: it answers peers and calls them.
type sideChannel struct {
	r        *Rank
	Listener net.Listener

	Mu    sync.Mutex
	idle  map[string][]*sideConn // connections to peers, by address
	Conns map[net.Conn]struct{}  // all open connections, in both directions
	begun map[string]time.Time   // when the set-up of the connection to a peer began, by address and engine
	ended bool
}

// sideConn is a connection that carries one call at a time.
type sideConn struct {
	net.Conn
	br *bufio.Reader
}

// OpenSideChannel listens on the rank's side channel port.
func OpenSideChannel(r *Rank, host string, port int) (*sideChannel, error) {
	if port != 0 {
		port += r.Index
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("listen side channel: %w", err)
	}
	return &sideChannel{r: r, Listener: l, idle: make(map[string][]*sideConn), Conns: make(map[net.Conn]struct{}), begun: make(map[string]time.Time)}, nil
}

// HostPort is the address that peers dial.
func (c *sideChannel) HostPort() (string, int) {
	a := c.Listener.Addr().(*net.TCPAddr)
	if a.IP.IsUnspecified() {
		return "127.0.0.1", a.Port
	}
	return a.IP.String(), a.Port
}

// track registers a connection until forget. It returns false when the channel
// has ended.
func (c *sideChannel) track(conn net.Conn) bool {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if c.ended {
		conn.Close()
		return false
	}
	c.Conns[conn] = struct{}{}
	return true
}

func (c *sideChannel) forget(conn net.Conn) {
	c.Mu.Lock()
	delete(c.Conns, conn)
	c.Mu.Unlock()
	conn.Close()
}

// accept serves peers until the listener closes. Each connection's goroutine is
// counted by the engine and ends with the connection.
func (c *sideChannel) accept(ctx context.Context) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil {
			return
		}
		if !c.track(conn) {
			return
		}
		c.r.Engine.Spawn(func(context.Context) {
			defer c.forget(conn)
			c.serve(ctx, conn)
		})
	}
}

// serve answers the messages of one connection in order.
func (c *sideChannel) serve(ctx context.Context, conn net.Conn) {
	br := bufio.NewReader(conn)
	for {
		m, err := ReadSide(br)
		if err != nil {
			return
		}
		answer, err := c.answer(ctx, m)
		if err != nil {
			answer = SideMessage{Op: m.Op, Error: err.Error()}
		}
		if WriteSide(conn, answer) != nil {
			return
		}
	}
}

// answer lets the protocol handle a message if it is for this engine.
func (c *sideChannel) answer(ctx context.Context, m SideMessage) (SideMessage, error) {
	if m.Engine != "" && m.Engine != c.r.Engine.UUID {
		return SideMessage{}, errors.New("engine id mismatch")
	}
	return c.r.Engine.Proto.Message(ctx, c.r, m)
}

// Call sends m to the peer at addr and waits for its answer. The error wraps
// ErrPeer when the peer rejected the message, else it is the network's or
// ctx's. A dead pooled connection is replaced once.
func (c *sideChannel) Call(ctx context.Context, addr string, m SideMessage) (SideMessage, error) {
	for {
		conn, reused, err := c.dial(ctx, addr)
		if err != nil {
			return SideMessage{}, err
		}
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		err = WriteSide(conn, m)
		var answer SideMessage
		if err == nil {
			answer, err = ReadSide(conn.br)
		}
		if !stop() {
			c.forget(conn)
			return SideMessage{}, context.Cause(ctx)
		}
		if err != nil {
			c.forget(conn)
			if reused {
				continue
			}
			return SideMessage{}, fmt.Errorf("call peer: %w", err)
		}
		c.putIdle(addr, conn)
		if answer.Error != "" {
			return SideMessage{}, fmt.Errorf("%s: %w: %s", m.Op, ErrPeer, answer.Error)
		}
		return answer, nil
	}
}

// SetUp waits until the connection to a rank of a peer is set up: ConnectDelay
// after the first transfer. A restarted peer counts as another peer.
func (c *sideChannel) SetUp(ctx context.Context, addr, engine string) error {
	delay := c.r.Engine.Cfg.ConnectDelay
	if delay <= 0 {
		return nil
	}
	key := addr + " " + engine
	c.Mu.Lock()
	begun, ok := c.begun[key]
	if !ok {
		begun = time.Now()
		c.begun[key] = begun
		c.r.Engine.Stats.peerConnections.Add(1)
	}
	c.Mu.Unlock()
	left := time.Until(begun.Add(delay))
	if ok && left <= 0 {
		return nil
	}
	c.r.Engine.Stats.connectionWaits.Add(1)
	return Sleep(ctx, left)
}

func (c *sideChannel) dial(ctx context.Context, addr string) (conn *sideConn, reused bool, err error) {
	c.Mu.Lock()
	if list := c.idle[addr]; len(list) > 0 {
		conn = list[len(list)-1]
		c.idle[addr] = list[:len(list)-1]
	}
	c.Mu.Unlock()
	if conn != nil {
		return conn, true, nil
	}
	var d net.Dialer
	raw, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, false, fmt.Errorf("dial peer: %w", err)
	}
	conn = &sideConn{Conn: raw, br: bufio.NewReader(raw)}
	if !c.track(conn) {
		return nil, false, net.ErrClosed
	}
	return conn, false, nil
}

func (c *sideChannel) putIdle(addr string, conn *sideConn) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if !c.ended {
		c.idle[addr] = append(c.idle[addr], conn)
	}
}

// Close ends the channel and every connection of it; abrupt resets them.
func (c *sideChannel) Close(abrupt bool) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	c.ended = true
	c.Listener.Close()
	for conn := range c.Conns {
		closeConn(conn, abrupt)
	}
}

func ReadSide(br *bufio.Reader) (SideMessage, error) {
	var m SideMessage
	head, err := readPart(br)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(head, &m); err != nil {
		return m, fmt.Errorf("decode side message: %w", err)
	}
	m.Payload, err = readPart(br)
	return m, err
}

func readPart(br *bufio.Reader) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(br, size[:]); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(size[:])
	if n > maxSideFrame {
		return nil, fmt.Errorf("side message part of %d bytes", n)
	}
	part, err := io.ReadAll(io.LimitReader(br, int64(n))) // memory grows only with received data
	if err == nil && len(part) < int(n) {
		err = io.ErrUnexpectedEOF
	}
	return part, err
}

func WriteSide(w io.Writer, m SideMessage) error {
	head, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode side message: %w", err)
	}
	out := make([]byte, 0, 8+len(head)+len(m.Payload))
	out = binary.BigEndian.AppendUint32(out, uint32(len(head)))
	out = append(out, head...)
	out = binary.BigEndian.AppendUint32(out, uint32(len(m.Payload)))
	out = append(out, m.Payload...)
	_, err = w.Write(out)
	return err
}
