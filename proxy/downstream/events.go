package downstream

import (
	"context"
	"net"
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

// Events writes the events of one open stream, and flushes after each write. Over
// HTTP/1.1 it writes the chunks of the body itself, in one write each, once net/http has
// sent the head and the first events: the two buffers of net/http cost a tenth of all
// that an event costs. Between two writes no buffer holds a part of the stream, so that
// chunks of both ways may follow each other. Net/http writes the last chunk.
type Events struct {
	w    http.ResponseWriter
	rc   *http.ResponseController
	conn net.Conn       // nil: everything goes through w
	buf  *buffer.Buffer // Write frames in place what was read into it; nil between Free and Take
	open bool           // the head has been sent
}

// eventsBuffer is the size in bytes of the memory that Take returns, with the room for
// framing. It holds many events and occupies few pages.
const eventsBuffer = 4 << 10

// Room for the framing of a chunk in Events.buf: a size of six hex digits and two line
// ends.
const (
	chunkHead = 8
	chunkTail = 2
)

// Events returns the writer of the events of the answer, which has begun with that
// status. It takes over buf, which no budget counts; nil is allowed.
func (c *Client) Events(status int, buf *buffer.Buffer) Events {
	e := Events{w: c.w, rc: &c.rc, buf: buf}
	_, wrapped := c.w.(interface{ Unwrap() http.ResponseWriter }) // a filter may process the answer
	if !wrapped && status == http.StatusOK && c.r.ProtoMajor == 1 && c.r.ProtoMinor == 1 {
		e.conn, _ = c.r.Context().Value(connKey{}).(net.Conn)
	}
	return e
}

// Take returns the memory into which the caller reads events for Write, which writes them
// without copying them. It is the same memory until Free. Take and Free are the methods of
// upstream.Space.
func (e *Events) Take() []byte {
	if e.buf == nil {
		e.buf = buffer.Get(eventsBuffer)
	}
	return e.buf.B[chunkHead : cap(e.buf.B)-chunkTail]
}

// Free gives the memory back to the pools. A stream that waits for the engine needs none.
func (e *Events) Free() {
	e.buf.Free()
	e.buf = nil
}

// Write writes whole events. The last events are not flushed: the end of the answer is
// sent with them. The error is ErrWrite.
func (e *Events) Write(events []byte, last bool) (err error) {
	// Only events that begin where Take's memory begins are framed in place.
	if e.conn != nil && e.open && !last && e.buf != nil && &events[0] == &e.buf.B[:chunkHead+1][chunkHead] {
		_, err = e.conn.Write(e.frame(len(events)))
	} else {
		e.open = true
		_, err = e.w.Write(events)
		if err == nil && !last {
			err = e.rc.Flush()
		}
	}
	if err != nil {
		return ErrWrite
	}
	return nil
}

// frame makes a chunk (RFC 9112, 7.1) of the first n bytes of Take's memory.
func (e *Events) frame(n int) []byte {
	end := chunkHead + n
	b := e.buf.B[:end+chunkTail]
	b[end], b[end+1] = '\r', '\n'
	at := chunkHead - 2
	b[at], b[at+1] = '\r', '\n'
	for ; n > 0; n >>= 4 {
		at--
		b[at] = "0123456789abcdef"[n&15]
	}
	return b[at:]
}

// connKey is the key under which the context of an HTTP/1.1 request has its
// connection.
type connKey struct{}

// WithConn adds to the context of HTTP/1.1 requests their connection, to which Events
// writes past net/http. nil: Events writes everything through the http.ResponseWriter.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// leavingKey is the key under which the context of a request has the channel of Leaving.
type leavingKey struct{}

// WithLeaving adds to the context of requests the channel that Leaving returns.
func WithLeaving(ctx context.Context, leaving <-chan struct{}) context.Context {
	return context.WithValue(ctx, leavingKey{}, leaving)
}

// Leaving returns a channel that is closed when the clients of this process must open new
// connections: the process drains, or a successor has its sockets. nil: never.
func Leaving(ctx context.Context) <-chan struct{} {
	leaving, _ := ctx.Value(leavingKey{}).(<-chan struct{})
	return leaving
}
