package upstream

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// conn is one connection to an engine. One call at a time uses it. Only abort may be
// called by other goroutines.
type conn struct {
	net.Conn                 // read and written by calls: the socket, or TLS on it
	socket   net.Conn        // abort closes it directly
	secure   bool            // TLS
	raw      syscall.RawConn // of the socket; nil if it has no descriptor
	peek     func(fd uintptr)
	isQuiet  bool // result of peek

	served    bool      // has carried an earlier call
	readTimed bool      // a read deadline is set
	idleSince time.Time // guarded by the pool's mu

	// buf[r:w] holds bytes that were read and not used yet. The buffer belongs to the
	// client's pool. An idle stream holds no buffer.
	buf  []byte
	r, w int

	follower follower // of the call that uses the connection

	vec   net.Buffers // the write in progress
	store [][]byte    // memory of vec
}

func newConn(socket net.Conn) *conn {
	c := &conn{Conn: socket, socket: socket}
	if s, ok := socket.(syscall.Conn); ok {
		c.raw, _ = s.SyscallConn()
	}
	c.peek = c.look
	return c
}

// dial opens a connection, with TLS if cfg is not nil.
func dial(ctx context.Context, o *Options, cfg *tls.Config) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, o.DialTimeout)
	defer cancel()
	nc, err := o.Dial(ctx, "tcp", o.address())
	if err != nil {
		return nil, err
	}
	c := newConn(nc)
	if cfg == nil {
		return c, nil
	}
	t := tls.Client(c.socket, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		nc.Close()
		return nil, err
	}
	c.Conn, c.secure = t, true
	return c, nil
}

// abort closes the connection at once, also during a blocked Read or Write. Closing TLS
// would first send an alert, and would block if the engine does not read.
func (c *conn) abort() { c.socket.Close() }

// discard is abort for an evicted call: the engine never receives bytes that it has not
// acknowledged yet. TCP would otherwise deliver the request when the link is back, and
// an engine that then reads KV by it would read another request's KV.
func (c *conn) discard() {
	if c.raw != nil {
		resetUnsent(c.raw)
	}
	c.abort()
}

// alive reports whether an idle connection can carry a request: the engine has not closed
// the connection and has sent no unrequested bytes. On a TLS connection a read deadline
// in the past is set afterwards.
func (c *conn) alive() bool {
	if c.raw != nil {
		c.isQuiet = false
		if err := c.raw.Control(c.peek); err != nil || !c.isQuiet {
			return false
		}
	}
	if !c.secure {
		return true
	}
	// The socket does not show records that TLS has read ahead. A read of TLS returns
	// them whatever the deadline, and reads no further.
	c.readDeadline(time.Unix(1, 0))
	n, err := c.Read(make([]byte, 1))
	return n == 0 && isTimeout(err)
}

// readDeadline sets the deadline of reads; zero: none.
func (c *conn) readDeadline(t time.Time) {
	if timed := !t.IsZero(); timed || c.readTimed {
		c.readTimed = timed
		c.SetReadDeadline(t)
	}
}

// send writes head and body in one write. On a TLS connection the bytes count as sent
// even if TLS reports none written.
func (c *conn) send(m *message) (sent bool, err error) {
	if len(m.rest) == 0 {
		n, err := c.Write(m.head)
		return n > 0 || c.secure, err
	}
	c.store = append(append(c.store[:0], m.head), m.rest...)
	c.vec = c.store
	n, err := c.vec.WriteTo(c.Conn)
	clear(c.store)
	c.vec = nil
	return n > 0 || c.secure, err
}

// readHead reads until the buffer holds a whole head, and returns the head. answered: at
// least one byte arrived. Bytes after the head stay buffered.
func (c *conn) readHead(limit int) (raw string, answered bool, err error) {
	searched := c.r
	for {
		if n := headEnd(c.buf[c.r:c.w], searched-c.r); n > limit {
			return "", true, errBigHead
		} else if n > 0 {
			raw = string(c.buf[c.r : c.r+n])
			c.r += n
			return raw, true, nil
		}
		searched = c.w
		if c.w-c.r >= limit {
			return "", true, errBigHead
		}
		if c.w == len(c.buf) {
			searched -= c.r
			c.grow(limit)
		}
		n, err := c.Read(c.buf[c.w:])
		c.w += n
		if n == 0 && err != nil { // with n > 0 the next read returns the error again
			if answered = c.r < c.w; answered && err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return "", answered, err
		}
	}
}

// headEnd returns the size of the head at the start of b, including the empty line, or
// 0 if b does not hold all of it. The first from bytes have been searched before.
func headEnd(b []byte, from int) int {
	for i := max(from-2, 0); ; i++ {
		j := bytes.IndexByte(b[i:], '\n')
		if j < 0 {
			return 0
		}
		i += j
		if rest := b[i+1:]; len(rest) > 0 && rest[0] == '\n' {
			return i + 2
		} else if len(rest) > 1 && rest[0] == '\r' && rest[1] == '\n' {
			return i + 3
		}
	}
}

// grow makes room after the buffered bytes.
func (c *conn) grow(limit int) {
	b := c.buf
	if c.r == 0 {
		b = make([]byte, min(2*len(c.buf), max(limit, len(c.buf)+1)))
	}
	c.w = copy(b, c.buf[c.r:c.w])
	c.r, c.buf = 0, b
}

// head is the parsed head of an answer.
type head struct {
	status    int
	fields    []Field // in the order of the answer; they share the head's memory
	length    int64   // Content-Length, -1 without one
	chunked   bool
	keepAlive bool // the engine keeps the connection open

	sawClose, sawKeepAlive bool // options in Connection
}

// parseHead parses the head of an answer. raw ends with the empty line. If the standard
// leaves a choice, parseHead rejects a head that two parsers could frame differently. A
// line may end with LF alone, as RFC 9112, 2.2 permits.
func parseHead(raw string) (head, error) {
	h := head{length: -1, fields: make([]Field, 0, max(strings.Count(raw, "\n")-2, 0))}
	line, rest, _ := strings.Cut(raw, "\n")
	minor, ok := h.parseStatus(strings.TrimSuffix(line, "\r"))
	if !ok {
		return h, errStatusLine
	}
	for {
		line, rest, _ = strings.Cut(rest, "\n")
		if line = strings.TrimSuffix(line, "\r"); line == "" {
			break
		}
		if err := h.parseField(line); err != nil {
			return h, err
		}
	}
	if h.chunked && h.length >= 0 {
		return h, errTwoFramings
	}
	if h.chunked && minor == '0' {
		return h, errCoding
	}
	h.keepAlive = !h.sawClose && (minor != '0' || h.sawKeepAlive)
	return h, nil
}

// parseStatus parses "HTTP/1.1 200 OK" and returns the minor version.
func (h *head) parseStatus(line string) (minor byte, ok bool) {
	const version = "HTTP/1."
	if len(line) < len("HTTP/1.1 200") || line[:len(version)] != version {
		return 0, false
	}
	minor = line[len(version)]
	code, reason := line[len("HTTP/1.1 "):len("HTTP/1.1 200")], line[len("HTTP/1.1 200"):]
	if minor != '0' && minor != '1' || line[len("HTTP/1.1")] != ' ' || reason != "" && reason[0] != ' ' {
		return 0, false
	}
	for i := range len(code) {
		if code[i] < '0' || code[i] > '9' {
			return 0, false
		}
		h.status = h.status*10 + int(code[i]-'0')
	}
	return minor, h.status >= 100 && isFieldValue(reason)
}

func (h *head) parseField(line string) error {
	if line[0] == ' ' || line[0] == '\t' {
		return errFolded
	}
	i := strings.IndexByte(line, ':')
	if i < 0 || !isToken(line[:i]) || !isFieldValue(line[i+1:]) {
		return errFieldLine
	}
	f := Field{Name: line[:i], Value: strings.Trim(line[i+1:], " \t")}
	h.fields = append(h.fields, f)
	switch {
	case sameName(f.Name, "Content-Length"):
		n, err := strconv.ParseUint(f.Value, 10, 63) // digits only
		if err != nil {
			return errLength
		}
		if h.length >= 0 && h.length != int64(n) {
			return errLengths
		}
		h.length = int64(n)
	case sameName(f.Name, "Transfer-Encoding"):
		if h.chunked || !sameName(f.Value, "chunked") {
			return errCoding
		}
		h.chunked = true
	case sameName(f.Name, "Connection"):
		for option := range strings.SplitSeq(f.Value, ",") {
			option = strings.Trim(option, " \t")
			h.sawClose = h.sawClose || sameName(option, "close")
			h.sawKeepAlive = h.sawKeepAlive || sameName(option, "keep-alive")
		}
	}
	return nil
}
