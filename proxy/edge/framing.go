package edge

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"strconv"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/proxy/inflight"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// framingListener refuses requests with ambiguous framing, above all Content-Length
// together with Transfer-Encoding. Attackers use such requests to smuggle one request
// inside another. net/http accepts them and hides the length from the handler, so the
// check stands below net/http and follows the bytes of the connection. In place of the
// rest of a bad or too large head it gives net/http a malformed line; net/http refuses the
// line and closes the connection. A connection whose framing cannot be followed ends, too: no
// byte reaches net/http unchecked. Each refusal that net/http writes by itself becomes an
// answer with JSON.
type framingListener struct {
	net.Listener
	conns     *clientConns
	headLimit int // of HTTP/1.1, in bytes; headSlack comes on top
}

// Accept implements net.Listener.
func (l framingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	fc := &framingConn{Conn: c, tcp: tcpOf(c), conns: l.conns, f: framing{limit: l.headLimit}}
	l.conns.add(fc)
	return fc, nil
}

type framingConn struct {
	net.Conn
	tcp      *tcpConn // below Conn; may be nil
	conns    *clientConns
	f        framing                        // only Read uses it, and net/http has one reader at a time
	tlsState *tls.ConnectionState           // nil without TLS
	handled  atomic.Bool                    // a handler of HTTP/1.1 has the present request; before, net/http writes only refusals
	refused  bool                           // a refusal has been sent; only the goroutine of net/http uses it
	http2    atomic.Bool                    // the preface of HTTP/2 has been read
	taken    atomic.Pointer[inflight.Group] // counts the connection, because a handler has taken it over; else nil
	heads    headWatch                      // of HTTP/2; only Read uses it
	away     goAway                         // of HTTP/2
}

// Write implements net.Conn.
func (c *framingConn) Write(p []byte) (int, error) {
	if c.http2.Load() {
		return c.away.write(c.Conn, p)
	}
	switch {
	case c.handled.Load():
	case c.refused:
		return len(p), nil
	default:
		e := ownRefusal(p)
		if e == nil {
			break
		}
		if c.f.refusal != nil { // framing made net/http refuse the head
			e = c.f.refusal
		}
		if err := c.refuse(e); err != nil {
			return 0, err
		}
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// Close implements net.Conn.
func (c *framingConn) Close() error {
	c.conns.remove(c)
	err := c.Conn.Close()
	if g := c.taken.Swap(nil); g != nil {
		g.Done()
	}
	return err
}

// takenOver records that a handler has taken over the connection for another protocol, so
// that every byte passes. The connection stays counted in g until Close. No Read runs.
func (c *framingConn) takenOver(g *inflight.Group) {
	if c.f.state != framingEnd { // after a refusal no byte passes
		c.f.state = framingRaw
	}
	c.taken.Store(g)
}

// Read implements net.Conn.
func (c *framingConn) Read(p []byte) (int, error) {
	if c.f.state == framingEnd {
		return c.f.readRefusal(p)
	}
	n, err := c.Conn.Read(p)
	if c.f.state == framingRaw {
		return n, err
	}
	if c.f.state == framingOff {
		c.watchHead(p[:n])
		return n, err
	}
	begun := c.f.preface
	pass := c.f.follow(p[:n])
	if c.f.state == framingOff {
		c.http2.Store(true)
		c.watchHead(p[len(http2Preface)-begun : n])
	}
	if pass < n {
		err = nil // the next Read returns the malformed line
	}
	return pass, err
}

// watchHead records the begins and ends of request heads among the frames in p.
func (c *framingConn) watchHead(p []byte) {
	was, parts := c.heads.inside(), c.heads.parts
	c.heads.follow(p)
	switch inside := c.heads.inside(); {
	case c.tcp == nil:
	case !inside && was:
		c.tcp.head.end()
	case inside && (!was || c.heads.parts != parts):
		c.tcp.head.begin(&c.tcp.all.watch)
	}
}

// CloseWrite lets net/http send FIN before it closes a connection with unread input, so
// that the client can read the answer.
func (c *framingConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// framing follows the requests of one HTTP/1.1 connection: heads line by line, bodies by
// their length. Where net/http is lenient, framing reads the bytes as net/http does, or
// refuses them. The zero value stands before the first request.
type framing struct {
	state    framingState
	inHead   bool          // the request line has been read
	http11   bool          // the request line ended in HTTP/1.1
	chunked  bool          // this head has a Transfer-Encoding
	sized    bool          // this head has a Content-Length
	framed   bool          // the last header line was one of these two
	preface  int           // matched bytes of http2Preface, -1: the connection begins differently
	limit    int           // of a head in bytes, headSlack comes on top; 0: none
	size     int           // bytes of this head so far
	length   int64         // Content-Length of this head
	skip     int64         // remaining bytes of the body or chunk
	line     [64]byte      // the first bytes of the current line
	tail     [9]byte       // the last bytes of the current line
	n        int           // the length of the current line so far, may exceed len(line)
	refusing []byte        // bytes that Read returns before EOF
	refusal  *openai.Error // the reason; nil: no head was refused
}

type framingState uint8

const (
	framingHead    framingState = iota // request line and header lines
	framingBody                        // skip bytes, then the next head
	framingChunk                       // a chunk-size line
	framingData                        // skip bytes of a chunk, then a size line
	framingTrailer                     // lines until an empty one
	framingOff                         // HTTP/2: every byte passes
	framingRaw                         // another protocol after HTTP/1.1: every byte passes
	framingEnd                         // no byte passes any more
)

var (
	contentLength    = []byte("content-length:")
	transferEncoding = []byte("transfer-encoding:")
	http11           = []byte("HTTP/1.1")
)

const (
	// http2Preface begins an HTTP/2 connection (RFC 9113 3.4). net/http accepts it only
	// as the first bytes of a connection.
	http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	// malformedLine is a header line that net/http answers with 400.
	malformedLine = "\x00\n"
)

// follow reads p and returns how many of its bytes may pass. If fewer than len(p) may pass
// the state is framingEnd.
func (f *framing) follow(p []byte) int {
	f.matchPreface(p)
	for i := 0; i < len(p); {
		switch f.state {
		case framingOff, framingRaw:
			return len(p)
		case framingEnd:
			return i
		case framingBody, framingData:
			step := min(f.skip, int64(len(p)-i))
			f.skip -= step
			i += int(step)
			if f.skip == 0 {
				f.bodyDone()
			}
		default:
			i = f.readLine(p, i)
		}
	}
	return len(p)
}

// matchPreface compares the first bytes of the connection with the preface. Until the
// preface is complete, framing follows the connection as HTTP/1.1.
func (f *framing) matchPreface(p []byte) {
	if f.preface < 0 || f.preface == len(http2Preface) {
		return
	}
	n := min(len(p), len(http2Preface)-f.preface)
	if string(p[:n]) != http2Preface[f.preface:f.preface+n] {
		f.preface = -1
		return
	}
	if f.preface += n; f.preface == len(http2Preface) {
		f.state = framingOff
	}
}

// begin resets f for the next request.
func (f *framing) begin() { *f = framing{preface: f.preface, limit: f.limit} }

func (f *framing) bodyDone() {
	if f.state == framingBody {
		f.begin()
	} else {
		f.state = framingChunk
	}
}

// readLine reads the rest of a line from p[i:] and handles the end of the line. It returns
// the index at which the next line begins.
func (f *framing) readLine(p []byte, i int) int {
	end := bytes.IndexByte(p[i:], '\n')
	part := p[i:]
	if end >= 0 {
		part = p[i : i+end]
	}
	if f.n < len(f.line) {
		copy(f.line[f.n:], part)
	}
	f.keepTail(part)
	f.n += len(part)
	if f.state == framingHead && f.limit > 0 {
		if f.size += len(part) + 1; f.size > f.limit+headSlack {
			f.refuse(headTooLarge(f.limit))
			return i + len(part)
		}
	}
	if end < 0 {
		return len(p)
	}
	whole := f.n <= len(f.line)
	line := bytes.TrimSuffix(f.line[:min(f.n, len(f.line))], []byte("\r"))
	crlf := f.n > 0 && f.tail[len(f.tail)-1] == '\r'
	f.n = 0
	f.endLine(line, whole, crlf)
	return i + end + 1
}

// keepTail keeps the last bytes of a line that may come in pieces.
func (f *framing) keepTail(part []byte) {
	if n := len(f.tail) - len(part); n > 0 {
		copy(f.tail[:n], f.tail[len(part):])
		copy(f.tail[n:], part)
		return
	}
	copy(f.tail[:], part[len(part)-len(f.tail):])
}

// endLine handles one line. If whole is false, line is only the beginning of the line. If
// crlf is false, a bare LF ends the line. After such a line of a trailer no byte passes: a
// server in front of the proxy may take the next request for a part of the trailer.
func (f *framing) endLine(line []byte, whole, crlf bool) {
	switch f.state {
	case framingChunk:
		f.chunk(line, whole)
	case framingTrailer:
		switch {
		case !crlf:
			f.state = framingEnd
		case len(line) == 0:
			f.begin()
		}
	case framingHead:
		switch {
		case !f.inHead:
			f.requestLine(line)
		case len(line) == 0:
			f.endHead()
		case !f.field(line, whole):
			f.refuse(errFraming)
		}
	}
}

// requestLine handles the first line of a head. Empty lines before it do not count, as in
// net/http.
func (f *framing) requestLine(line []byte) {
	if len(bytes.TrimRight(line, "\r")) == 0 {
		return
	}
	f.inHead = true
	f.http11 = bytes.HasSuffix(bytes.TrimSuffix(f.tail[:], []byte("\r")), http11)
}

// field handles one header line. It returns false if the request must not pass.
func (f *framing) field(line []byte, whole bool) bool {
	framed := f.framed
	f.framed = false
	switch {
	case line[0] == ' ' || line[0] == '\t':
		return !framed // net/http would append it to the line before
	case hasPrefixFold(line, contentLength):
		n, ok := parseLength(line[len(contentLength):])
		if !ok || !whole || f.sized && n != f.length {
			return false
		}
		f.sized, f.framed, f.length = true, true, n
	case hasPrefixFold(line, transferEncoding):
		f.chunked, f.framed = true, true
		if !f.http11 {
			return false // net/http would ignore the line (RFC 9112 6.1: faulty framing)
		}
	}
	return !f.chunked || !f.sized
}

func (f *framing) endHead() {
	switch {
	case f.chunked:
		f.state = framingChunk
	case f.length > 0:
		f.state, f.skip = framingBody, f.length
	default:
		f.begin()
	}
}

// chunk handles a chunk-size line: hex digits and an optional extension. After a line that
// net/http must refuse, no byte passes.
func (f *framing) chunk(line []byte, whole bool) {
	size, _, cut := bytes.Cut(line, []byte(";"))
	if !cut {
		size = bytes.TrimRight(size, " \t")
	}
	n, err := strconv.ParseUint(string(size), 16, 62)
	switch {
	case err != nil || !cut && !whole:
		f.state = framingEnd
	case n == 0:
		f.state = framingTrailer
	default:
		f.state, f.skip = framingData, int64(n)+2 // with its line end
	}
}

// refuse makes net/http refuse the request.
func (f *framing) refuse(why *openai.Error) {
	f.state, f.refusing, f.refusal = framingEnd, []byte(malformedLine), why
}

// readRefusal returns the bytes that make net/http refuse the request, then io.EOF.
func (f *framing) readRefusal(p []byte) (int, error) {
	if len(f.refusing) == 0 {
		return 0, io.EOF
	}
	n := copy(p, f.refusing)
	f.refusing = f.refusing[n:]
	return n, nil
}

// parseLength parses the value of a Content-Length line, which must be digits only.
func parseLength(v []byte) (int64, bool) {
	n, err := strconv.ParseUint(string(bytes.Trim(v, " \t")), 10, 63)
	return int64(n), err == nil
}

func hasPrefixFold(b, prefix []byte) bool {
	return len(b) >= len(prefix) && bytes.EqualFold(b[:len(prefix)], prefix)
}
