package zmtp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

const (
	// handshakeTimeout limits connecting, and then the handshake.
	handshakeTimeout = 5 * time.Second
	// sendTimeout limits writing one message or command.
	sendTimeout = 5 * time.Second
	// messageTimeout limits the time from the first byte of a message to the last byte,
	// if the caller of Receive sets no limit.
	messageTimeout = 30 * time.Second
)

// ErrLimit means that the peer sent a frame, a message or a command that is
// larger than the limit.
var ErrLimit = errors.New("read message: larger than the limit")

// Socket is the type of a ZeroMQ socket.
type Socket string

// The socket types of this side of a connection.
const (
	Sub    Socket = "SUB"
	Dealer Socket = "DEALER"
	Router Socket = "ROUTER"
)

// Options describe this side of a connection. All fields must be set.
type Options struct {
	Socket Socket
	// MaxMessage limits the bytes of all frames of a message together.
	MaxMessage int
	// MaxFrames limits the frames of a message.
	MaxFrames int
	// ReadBuffer is the size of the read buffer in bytes.
	ReadBuffer int
}

// Conn is one connection after its handshake. One goroutine at a time may use
// it, except for Close, which any goroutine may call at any time.
type Conn struct {
	conn    net.Conn
	r       *bufio.Reader
	o       Options
	stop    func() bool // ends the watch over the context
	armed   bool        // a read deadline is set
	message message
	command []byte // the body of the last command
	out     []byte // bytes to send
}

// Dial connects to "tcp://host:port" and makes the handshake of the NULL
// mechanism. The end of ctx closes the connection, also after Dial has returned.
func Dial(ctx context.Context, endpoint string, o Options) (*Conn, error) {
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
	c, err := open(ctx, tcp, "", o)
	if err != nil {
		return nil, fmt.Errorf("greet %s: %w", endpoint, err)
	}
	return c, nil
}

// Accept makes the handshake on a connection that a listener has accepted. With a
// password the peer must present it by the PLAIN mechanism, under any user name;
// without a password the peer must use the NULL mechanism. Accept owns conn: it
// closes conn if the handshake fails, and so does the end of ctx. The error wraps
// ErrMechanism or ErrPassword if the peer's security is the reason.
func Accept(ctx context.Context, conn net.Conn, password string, o Options) (*Conn, error) {
	return open(ctx, conn, password, o)
}

// open makes the handshake, and closes conn if the handshake fails.
func open(ctx context.Context, conn net.Conn, password string, o Options) (*Conn, error) {
	c := &Conn{conn: conn, r: bufio.NewReaderSize(conn, o.ReadBuffer), o: o}
	c.stop = context.AfterFunc(ctx, func() { conn.Close() })
	err := conn.SetDeadline(time.Now().Add(handshakeTimeout))
	if err == nil {
		err = c.handshake(password)
	}
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Close closes the connection. A second call does nothing.
func (c *Conn) Close() error {
	c.stop()
	return c.conn.Close()
}

// Subscribe subscribes to all messages whose first frame starts with topic; "" selects
// every message. Source: RFC 23, section The Publish-Subscribe Pattern.
func (c *Conn) Subscribe(topic string) error {
	return c.Send(append([]byte{1}, topic...))
}

// Send sends one message.
func (c *Conn) Send(frames ...[]byte) error {
	c.out = c.out[:0]
	for i, body := range frames {
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		c.out = appendFrame(c.out, flags, body)
	}
	return c.flush()
}

// flush writes the bytes that Send or a command has collected in out.
func (c *Conn) flush() error {
	if err := c.conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	_, err := c.conn.Write(c.out)
	return err
}

// Receive returns the frames of the next message. The frames are valid until the next
// call. Receive answers PINGs that arrive before the message. The message must be
// complete within limit. A limit of 0 allows any pause between two messages, but bounds
// the time of one message by messageTimeout. After an error the connection is no longer
// usable.
func (c *Conn) Receive(limit time.Duration) ([][]byte, error) {
	c.message.reset()
	if limit > 0 {
		if err := c.arm(limit); err != nil {
			return nil, err
		}
	}
	for {
		if limit == 0 && c.message.empty() {
			if err := c.idle(); err != nil {
				return nil, err
			}
		}
		last, err := c.frame()
		if err != nil {
			return nil, err
		}
		if last {
			return c.message.list(), nil
		}
	}
}

// Wait waits until the peer sends something, for limit at most. It reports whether something
// has arrived. After false the connection is still usable.
func (c *Conn) Wait(limit time.Duration) (arrived bool, err error) {
	if err := c.arm(limit); err != nil {
		return false, err
	}
	if _, err := c.r.Peek(1); errors.Is(err, os.ErrDeadlineExceeded) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return true, nil
}

// arm sets the read deadline.
func (c *Conn) arm(limit time.Duration) error {
	c.armed = true
	return c.conn.SetReadDeadline(time.Now().Add(limit))
}

// idle waits without a deadline until the peer sends something.
func (c *Conn) idle() error {
	if c.armed {
		c.armed = false
		if err := c.conn.SetReadDeadline(time.Time{}); err != nil {
			return err
		}
	}
	_, err := c.r.Peek(1)
	return err
}

// need sets the read deadline if the next n bytes have not all arrived and no
// deadline is set yet. Most messages arrive whole and need none.
func (c *Conn) need(n int) error {
	if c.armed || c.r.Buffered() >= n {
		return nil
	}
	return c.arm(messageTimeout)
}
