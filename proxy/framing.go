package proxy

import (
	"bytes"
	"net"
	"strconv"
)

// framingListener refuses requests with both Content-Length and
// Transfer-Encoding, the classic way to smuggle one request inside another.
// net/http lets them pass and hides the length from the handler, so the check
// sits below it: it follows the bytes of a connection and spoils the head of
// such a request, which net/http then answers in its turn with 400 and closes.
type framingListener struct{ net.Listener }

// Accept implements net.Listener.
func (l framingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &framingConn{Conn: c}, nil
}

type framingConn struct {
	net.Conn
	f framing // only Read touches it, and net/http has one reader at a time
}

// Read implements net.Conn.
func (c *framingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.f.follow(p[:n])
	return n, err
}

// CloseWrite lets net/http send its FIN before it closes a connection with
// unread input, so that the client can read the refusal.
func (c *framingConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// framing follows the requests of one HTTP/1.1 connection: heads line by line,
// bodies by their length. The zero value stands before the first request.
type framing struct {
	state   framingState
	line    [64]byte // the begin of the current line
	n       int      // its length so far, also past len(line)
	skip    int64    // bytes of the body or chunk still to come
	length  int64    // Content-Length of this head, -1 none
	chunked bool     // this head has a Transfer-Encoding
	inHead  bool     // the request line has been read
}

type framingState uint8

const (
	framingHead    framingState = iota // request line and header lines
	framingBody                        // skip bytes, then the next head
	framingChunk                       // a chunk-size line
	framingData                        // skip bytes of a chunk, then a size line
	framingTrailer                     // lines until an empty one
	framingOff                         // HTTP/2, or spoiled: nothing to follow
)

var (
	contentLength    = []byte("content-length:")
	transferEncoding = []byte("transfer-encoding:")
	http2Preface     = []byte("PRI * HTTP/2.0")
)

// follow reads p and spoils in it what must not pass.
func (f *framing) follow(p []byte) {
	for i := 0; i < len(p); {
		switch f.state {
		case framingOff:
			return
		case framingBody, framingData:
			step := min(f.skip, int64(len(p)-i))
			f.skip -= step
			i += int(step)
			if f.skip == 0 {
				if f.state == framingBody {
					f.begin()
				} else {
					f.state = framingChunk
				}
			}
		default:
			i = f.readLine(p, i)
		}
	}
}

// begin stands before the next request.
func (f *framing) begin() {
	*f = framing{length: -1}
}

// readLine takes the rest of a line that is in p and acts on its end.
func (f *framing) readLine(p []byte, i int) int {
	start := i
	if f.n > 0 {
		start = -1 // it began in an earlier read
	}
	end := bytes.IndexByte(p[i:], '\n')
	part := p[i:]
	if end >= 0 {
		part = p[i : i+end]
	}
	if f.n < len(f.line) {
		copy(f.line[f.n:], part)
	}
	f.n += len(part)
	if end < 0 {
		return len(p)
	}
	line := bytes.TrimSuffix(f.line[:min(f.n, len(f.line))], []byte("\r"))
	f.n = 0
	if f.endLine(line) {
		f.spoil(p, start, i+end)
	}
	return i + end + 1
}

// endLine acts on one line; true means that the request must not pass.
func (f *framing) endLine(line []byte) bool {
	switch f.state {
	case framingChunk:
		f.chunk(line)
	case framingTrailer:
		if len(line) == 0 {
			f.begin()
		}
	case framingHead:
		switch {
		case !f.inHead:
			if len(line) == 0 {
				return false // empty lines before a request are skipped
			}
			f.inHead, f.length = true, -1
			if bytes.Equal(line, http2Preface) {
				f.state = framingOff
			}
		case len(line) == 0:
			f.endHead()
		default:
			return f.field(line)
		}
	}
	return false
}

// field looks at one header line.
func (f *framing) field(line []byte) bool {
	switch {
	case hasPrefixFold(line, contentLength):
		n, err := strconv.ParseInt(string(bytes.TrimSpace(line[len(contentLength):])), 10, 64)
		if err != nil || n < 0 {
			f.state = framingOff // net/http refuses it
			return false
		}
		f.length = n
	case hasPrefixFold(line, transferEncoding):
		f.chunked = true
	default:
		return false
	}
	return f.chunked && f.length >= 0
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

// chunk acts on a chunk-size line: hex digits, then perhaps an extension.
func (f *framing) chunk(line []byte) {
	if i := bytes.IndexByte(line, ';'); i >= 0 {
		line = line[:i]
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(line)), 16, 62)
	switch {
	case err != nil || n < 0:
		f.state = framingOff // net/http refuses it
	case n == 0:
		f.state = framingTrailer
	default:
		f.state, f.skip = framingData, n+2 // with its line end
	}
}

// spoil makes the head malformed: in the line's name where that is still in
// hand (start >= 0), else at its end.
func (f *framing) spoil(p []byte, start, end int) {
	f.state = framingOff
	switch {
	case start >= 0:
		p[start] = 0
	case end > 0:
		p[end-1] = 0
	default:
		p[end] = 0
	}
}

func hasPrefixFold(b, prefix []byte) bool {
	return len(b) >= len(prefix) && bytes.EqualFold(b[:len(prefix)], prefix)
}
