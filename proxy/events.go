package proxy

import (
	"net"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// eventWriter puts the events of one open stream on the wire, a flush after each
// write. On HTTP/1.1 it writes the chunks of the body itself, in one write each,
// once net/http has sent the head and the first events: the way through
// net/http's two buffers costs a tenth of what an event costs in all. Between
// writes nothing of the stream is buffered, so that chunks of either way may
// follow each other; the last one is net/http's.
type eventWriter struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	conn net.Conn // nil: everything goes through w
	buf  []byte   // what is read is framed in place
	open bool     // the head is out
}

// Room that a chunk of eventWriter.buf leaves for its framing: a size of six hex
// digits and two line ends.
const (
	chunkHead = 8
	chunkTail = 2
)

// newEventWriter returns the writer of x's answer, whose status is given. Events
// that are to be written without copying are those read into space.
func newEventWriter(x *exchange, status int, buf []byte) eventWriter {
	e := eventWriter{w: x.w, rc: &x.rc, buf: buf}
	_, wrapped := x.w.(interface{ Unwrap() http.ResponseWriter }) // a filter may want to see it
	if !wrapped && status == http.StatusOK && x.r.ProtoMajor == 1 && x.r.ProtoMinor == 1 {
		e.conn = downstream.Connection(x.ctx)
	}
	return e
}

// space is where to read what write gets.
func (e *eventWriter) space() []byte { return e.buf[chunkHead : len(e.buf)-chunkTail] }

// write writes whole events. The last ones go out together with the end of the
// answer.
func (e *eventWriter) write(events []byte, last bool) error {
	if e.conn != nil && e.open && !last && &events[0] == &e.buf[chunkHead] {
		_, err := e.conn.Write(e.frame(len(events)))
		return err
	}
	e.open = true
	_, err := e.w.Write(events)
	if err == nil && !last {
		err = e.rc.Flush()
	}
	return err
}

// frame makes a chunk (RFC 9112, 7.1) of the n bytes that space begins with.
func (e *eventWriter) frame(n int) []byte {
	end := chunkHead + n
	e.buf[end], e.buf[end+1] = '\r', '\n'
	at := chunkHead - 2
	e.buf[at], e.buf[at+1] = '\r', '\n'
	for ; n > 0; n >>= 4 {
		at--
		e.buf[at] = "0123456789abcdef"[n&15]
	}
	return e.buf[at : end+chunkTail]
}
