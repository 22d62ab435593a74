package core

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// The listening side of ZMTP 3.0 with the NULL mechanism
// (https://rfc.zeromq.org/spec/23/), as far as PUB and ROUTER need it. In that
// version subscriptions arrive as messages.

// Flags of a frame.
const (
	frameMore    = 1
	frameLong    = 2
	frameCommand = 4
)

// maxPeerFrame is the largest frame of a peer in bytes, MaxPeerFrames the
// largest number of frames of a message.
const (
	maxPeerFrame  = 64 << 10
	MaxPeerFrames = 16
)

// greetTimeout is the limit of the handshake.
const greetTimeout = 10 * time.Second

// ZMTPConn is one connection of a peer. One goroutine reads messages; any
// goroutine may write.
type ZMTPConn struct {
	net.Conn
	br *bufio.Reader
	mu sync.Mutex // writes
}

func NewZMTPConn(conn net.Conn) *ZMTPConn {
	return &ZMTPConn{Conn: conn, br: bufio.NewReader(conn)}
}

// GreetPeer does the handshake as a socket of the given kind.
func GreetPeer(conn net.Conn, kind string) (*ZMTPConn, error) {
	c := NewZMTPConn(conn)
	if err := conn.SetDeadline(time.Now().Add(greetTimeout)); err != nil {
		return nil, err
	}
	hello := make([]byte, 64) // signature, version 3.0, mechanism, as-server false
	hello[0], hello[9], hello[10] = 0xff, 0x7f, 3
	copy(hello[12:32], "NULL")
	if _, err := conn.Write(hello); err != nil {
		return nil, err
	}
	theirs := make([]byte, 64)
	if _, err := io.ReadFull(c.br, theirs); err != nil {
		return nil, err
	}
	if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || string(theirs[12:17]) != "NULL\x00" {
		return nil, errors.New("greet peer: not ZMTP 3 with NULL security")
	}
	ready := append([]byte{5}, "READY"...)
	for _, property := range [][2]string{{"Socket-Type", kind}, {"Identity", ""}} {
		ready = append(append(ready, byte(len(property[0]))), property[0]...)
		ready = append(binary.BigEndian.AppendUint32(ready, uint32(len(property[1]))), property[1]...)
	}
	if err := c.command(ready); err != nil {
		return nil, err
	}
	flags, body, err := c.frame()
	if err != nil {
		return nil, err
	}
	if flags&frameCommand == 0 || len(body) < 6 || string(body[:6]) != "\x05READY" {
		return nil, errors.New("greet peer: no READY")
	}
	return c, conn.SetDeadline(time.Time{})
}

// frame reads one frame.
func (c *ZMTPConn) frame() (flags byte, body []byte, err error) {
	if flags, err = c.br.ReadByte(); err != nil {
		return 0, nil, err
	}
	size := make([]byte, 8)
	short := size[7:]
	if flags&frameLong != 0 {
		short = size
	}
	if _, err := io.ReadFull(c.br, short); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint64(size)
	if n > maxPeerFrame {
		return 0, nil, fmt.Errorf("read frame: %d bytes", n)
	}
	body = make([]byte, n)
	_, err = io.ReadFull(c.br, body)
	return flags, body, err
}

// Receive reads one message and answers the pings before it.
func (c *ZMTPConn) Receive() ([][]byte, error) {
	var frames [][]byte
	for {
		flags, body, err := c.frame()
		if err != nil {
			return nil, err
		}
		if flags&frameCommand != 0 {
			// The body of PING is its name, two bytes of time to live and a
			// context.
			if len(body) >= 7 && string(body[:5]) == "\x04PING" {
				if err := c.command(append([]byte("\x04PONG"), body[7:]...)); err != nil {
					return nil, err
				}
			}
			continue
		}
		if frames = append(frames, body); len(frames) > MaxPeerFrames {
			return nil, errors.New("read message: too many frames")
		}
		if flags&frameMore == 0 {
			return frames, nil
		}
	}
}

// Send writes one message.
func (c *ZMTPConn) Send(frames ...[]byte) error {
	var b []byte
	for i, body := range frames {
		flags := byte(frameMore)
		if i == len(frames)-1 {
			flags = 0
		}
		b = appendFrame(b, flags, body)
	}
	return c.write(b)
}

func (c *ZMTPConn) command(body []byte) error { return c.write(appendFrame(nil, frameCommand, body)) }

func (c *ZMTPConn) write(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.Write(b)
	return err
}

func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		b = binary.BigEndian.AppendUint64(append(b, flags|frameLong), uint64(len(body)))
	} else {
		b = append(b, flags, byte(len(body)))
	}
	return append(b, body...)
}

// zmtpPeers are the ZMTP listeners and connections of an engine.
type zmtpPeers struct {
	Listeners []net.Listener // guarded by the engine's mutex
	conns     *connSet
}

// Close ends all of them; with abrupt it resets the connections. The caller
// holds the engine's mutex.
func (p *zmtpPeers) Close(abrupt bool) {
	for _, l := range p.Listeners {
		l.Close()
	}
	p.conns.Close(abrupt)
}

// ServePeers accepts connections until the listener closes. It serves each one,
// after its handshake as a socket of the given kind, until the connection
// closes.
func (e *Engine) ServePeers(l net.Listener, kind string, serve func(context.Context, *ZMTPConn)) {
	e.Spawn(func(context.Context) {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			e.Peers.conns.State(conn, http.StateNew)
			e.Spawn(func(ctx context.Context) {
				defer e.Peers.conns.State(conn, http.StateClosed)
				defer conn.Close()
				if e.HasEnded() {
					return // too late for close, which has closed the others
				}
				if c, err := GreetPeer(conn, kind); err == nil {
					serve(ctx, c)
				}
			})
		}
	})
}
