package edge

import (
	"bytes"
	"io"
	"strconv"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// framing follows the requests of one HTTP/1.1 connection: heads line by line, bodies by
// their length. Where net/http is more lenient than llhttp, the strict parser of Node, framing
// refuses the bytes, so that no server around the proxy reads another request in them. The zero
// value stands before the first request.
type framing struct {
	state    framingState
	inHead   bool          // the request line has been read
	http11   bool          // the request line ended in HTTP/1.1
	connect  bool          // the request line began with CONNECT
	chunked  bool          // this head has a Transfer-Encoding
	sized    bool          // this head has a Content-Length
	preface  int           // matched bytes of http2Preface, -1: the connection begins differently
	limit    int           // of a head in bytes, headSlack comes on top; 0: none
	size     int           // bytes of this head so far
	length   int64         // Content-Length of this head
	skip     int64         // remaining bytes of the body or chunk
	line     [64]byte      // the first bytes of the current line
	tail     [9]byte       // the last bytes of the current line
	n        int           // the length of the current line so far, may exceed len(line)
	refusing []byte        // bytes that Read returns before EOF, after framingEnd
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
	contentLength    = []byte("content-length")
	transferEncoding = []byte("transfer-encoding")
	http11           = []byte("HTTP/1.1")
	connect          = []byte("CONNECT ")
)

const (
	// http2Preface begins an HTTP/2 connection (RFC 9113 3.4). net/http accepts it only
	// as the first bytes of a connection.
	http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	// malformedLine ends a line that net/http accepts in no head, chunk size or trailer.
	malformedLine = "\x00\n"
)

// follow reads p and returns how many of its bytes may pass. If fewer than len(p) may pass
// the state is framingEnd.
func (f *framing) follow(p []byte) int {
	if f.preface >= 0 && f.preface < len(http2Preface) {
		f.matchPreface(p)
	}
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
			switch {
			case f.skip > 0:
			case f.state == framingBody:
				f.begin()
			default:
				f.state = framingChunk
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
	if n := len(f.tail) - len(part); n > 0 { // a line may come in pieces
		copy(f.tail[:n], f.tail[len(part):])
		copy(f.tail[n:], part)
	} else {
		copy(f.tail[:], part[-n:])
	}
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
	if f.state == framingEnd { // the LF does not pass, so the malformed line continues this line
		return i + end
	}
	return i + end + 1
}

// endLine handles one line. If whole is false, line is only the beginning of the line. If
// crlf is false, a bare LF ends the line, which another server may take for a part of the line.
func (f *framing) endLine(line []byte, whole, crlf bool) {
	switch {
	case f.state == framingHead && !f.inHead && len(bytes.TrimRight(line, "\r")) == 0:
		// empty lines before the request line do not count, as in net/http
	case f.state == framingHead && !crlf:
		f.refuse(errLine)
	case !crlf:
		f.end()
	case f.state == framingChunk:
		f.chunk(line, whole)
	case f.state == framingTrailer:
		f.trailer(line)
	case !f.inHead:
		f.inHead = true
		f.http11 = bytes.HasSuffix(bytes.TrimSuffix(f.tail[:], []byte("\r")), http11)
		target, isConnect := bytes.CutPrefix(bytes.TrimLeft(line, "\r"), connect)
		if f.connect = isConnect; isConnect && bytes.HasPrefix(target, []byte(" ")) {
			f.end() // net/http would accept the empty target
		}
	case len(line) > 0 && folded(line):
		f.refuse(errLine)
	case len(line) > 0:
		if !f.field(line, whole) {
			f.refuse(errFraming)
		}
	case f.chunked:
		f.state = framingChunk
	case f.length > 0:
		f.state, f.skip = framingBody, f.length
	default:
		f.begin()
	}
}

// folded reports whether net/http would append the line to the previous one (RFC 9112 5.2).
func folded(line []byte) bool { return line[0] == ' ' || line[0] == '\t' }

// field handles one header line. It returns false if the request must not pass. llhttp skips
// no tab beside the values of these two lines, and sees no body behind CONNECT.
func (f *framing) field(line []byte, whole bool) bool {
	name, value, _ := bytes.Cut(line, []byte(":"))
	switch {
	case len(name) == len(line): // net/http refuses a line without a colon
	case bytes.EqualFold(name, contentLength):
		n, err := strconv.ParseUint(string(bytes.Trim(value, " ")), 10, 63)
		if err != nil || !whole || f.sized || f.connect && n > 0 {
			return false
		}
		f.sized, f.length = true, int64(n)
	case bytes.EqualFold(name, transferEncoding):
		f.chunked = true
		if !f.http11 || f.connect || bytes.IndexByte(value, '\t') >= 0 {
			return false // net/http would ignore the line in HTTP/1.0 (RFC 9112 6.1: faulty framing)
		}
	}
	return !f.chunked || !f.sized
}

// trailer handles one line of a trailer. After a line that is folded, or has no proper name, or
// would frame a body, no byte passes.
func (f *framing) trailer(line []byte) {
	name, _, _ := bytes.Cut(line, []byte(":"))
	switch {
	case len(line) == 0:
		f.begin()
	case bytes.ContainsAny(name, " \t"), bytes.EqualFold(name, contentLength), bytes.EqualFold(name, transferEncoding):
		f.end()
	}
}

// chunk handles a chunk-size line: hex digits and an optional extension. After a line that
// net/http must refuse, no byte passes.
func (f *framing) chunk(line []byte, whole bool) {
	size, _, cut := bytes.Cut(line, []byte(";"))
	n, err := strconv.ParseUint(string(size), 16, 62)
	switch {
	case err != nil || !cut && !whole:
		f.end()
	case n == 0:
		f.state = framingTrailer
	default:
		f.state, f.skip = framingData, int64(n)+2 // with its line end
	}
}

// refuse makes net/http refuse the request.
func (f *framing) refuse(why *openai.Error) {
	f.end()
	f.refusal = why
}

// end lets no further byte pass. The malformed line takes the place of the rest. Without it,
// net/http would think that the client has left, and would cancel the earlier requests.
func (f *framing) end() { f.state, f.refusing = framingEnd, []byte(malformedLine) }

// readRefusal returns the malformed line, then io.EOF.
func (f *framing) readRefusal(p []byte) (int, error) {
	if len(f.refusing) == 0 {
		return 0, io.EOF
	}
	n := copy(p, f.refusing)
	f.refusing = f.refusing[n:]
	return n, nil
}
