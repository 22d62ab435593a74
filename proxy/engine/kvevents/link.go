package kvevents

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

const (
	// maxMessage bounds a message in bytes: a batch of 2 million token ids has
	// about 10 MB.
	maxMessage = 32 << 20
	// maxFrames bounds the frames of a message; the longest known have four.
	maxFrames = 16
	// greetingLen is the length of what a ZMTP connection starts with. Source:
	// ZMTP 3.1, section Greeting.
	greetingLen = 64
	// handshakeTimeout bounds connecting and greeting.
	handshakeTimeout = 5 * time.Second
)

var errOversize = errors.New("read message: longer than the limit")

// link is one ZMTP connection to an engine. One goroutine uses it; the end of
// the context that it was dialled with closes it.
type link struct {
	tcp  net.Conn
	conn *zmq4.Conn
	stop func() bool
}

// dial connects a socket of the kind to "tcp://host:port".
func dial(ctx context.Context, endpoint string, kind zmq4.SocketType) (*link, error) {
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return nil, fmt.Errorf("dial %s: want tcp://host:port", endpoint)
	}
	d := net.Dialer{Timeout: handshakeTimeout, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3,
	}}
	tcp, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	l := &link{tcp: tcp, stop: context.AfterFunc(ctx, func() { tcp.Close() })}
	if err := l.greet(kind); err != nil {
		l.close()
		return nil, fmt.Errorf("greet %s: %w", endpoint, err)
	}
	return l, nil
}

// greet exchanges greetings and metadata. zmq4 panics at metadata whose lengths
// are wrong.
func (l *link) greet(kind zmq4.SocketType) (err error) {
	defer func() {
		if recover() != nil {
			err = errors.New("read metadata: not in its form")
		}
	}()
	if err := l.tcp.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	bounds := &bounded{Conn: l.tcp, r: bufio.NewReaderSize(l.tcp, 64<<10), skip: greetingLen}
	if l.conn, err = zmq4.Open(bounds, null.Security(), kind, nil, false, nil); err != nil {
		return err
	}
	return l.tcp.SetDeadline(time.Time{})
}

// close may be called twice.
func (l *link) close() {
	l.stop()
	l.tcp.Close()
}

// send sends a message.
func (l *link) send(frames ...[]byte) error {
	if err := l.tcp.SetWriteDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	return l.conn.SendMsg(zmq4.NewMsgFrom(frames...))
}

// recv returns the frames of the next message, which are the caller's. Pings
// are answered on the way. Idle is how long it may take; 0 is as long as it
// takes.
func (l *link) recv(idle time.Duration) ([][]byte, error) {
	for {
		if idle > 0 {
			if err := l.tcp.SetReadDeadline(time.Now().Add(idle)); err != nil {
				return nil, err
			}
		}
		m, err := l.conn.RecvMsg()
		if err != nil {
			return nil, err
		}
		if m.Type == zmq4.UsrMsg {
			return m.Frames, nil
		}
	}
}

// bounded is a connection whose reader finds no frame longer than the limit:
// zmq4 allocates a frame's length before it has read the frame. It follows the
// frames as they pass. zmq4 reads a frame's flags, length and body apart, so
// that a length that is refused is never seen by it.
type bounded struct {
	net.Conn
	r      *bufio.Reader
	skip   uint64  // bytes of the greeting or of a body that are left
	head   [9]byte // flags and length of the frame, as far as they are read
	have   int
	bytes  uint64 // of the message so far
	frames int
}

// The flags of a frame. Source: ZMTP 3.1, section Framing.
const (
	flagMore = 1
	flagLong = 2
)

// Read implements net.Conn.
func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if !b.pass(p[:n]) {
		return 0, errOversize
	}
	return n, err
}

// pass follows the frames through p and reports that they are in bounds.
func (b *bounded) pass(p []byte) bool {
	for len(p) > 0 {
		if b.skip > 0 {
			n := min(b.skip, uint64(len(p)))
			b.skip -= n
			p = p[n:]
			continue
		}
		b.head[b.have] = p[0]
		b.have++
		p = p[1:]
		long := b.head[0]&flagLong != 0
		if b.have < 2 || long && b.have < 9 {
			continue
		}
		b.skip = uint64(b.head[1])
		if long {
			b.skip = binary.BigEndian.Uint64(b.head[1:])
		}
		b.have = 0
		b.frames++
		if b.skip > maxMessage || b.bytes+b.skip > maxMessage || b.frames > maxFrames {
			return false
		}
		b.bytes += b.skip
		if b.head[0]&flagMore == 0 {
			b.bytes, b.frames = 0, 0
		}
	}
	return true
}
