package downstream

import (
	"context"
	"net/http"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

// Events writes the events of one open stream, and flushes after each write. Between two writes no
// buffer holds a part of the stream.
type Events struct {
	w      http.ResponseWriter
	rc     http.ResponseController
	buf    *buffer.Buffer // nil between Free and Take
	client *Client
	renews bool // the protocol of the client needs a deadline for writes
}

// eventsBuffer is the size in bytes of the memory that Take returns. It holds many events and
// occupies few pages.
const eventsBuffer = 4 << 10

// Events returns the writer of the events of the answer, which has begun. It takes over buf, which no
// budget counts; nil is allowed.
func (c *Client) Events(buf *buffer.Buffer) Events {
	return Events{w: c.w, rc: c.rc, buf: buf, client: c, renews: c.r.ProtoMajor >= 2}
}

// Take returns the memory into which the caller reads events for Write. It is the same memory until
// Free. Take and Free are methods of upstream.Sink.
func (e *Events) Take() []byte {
	if e.buf == nil {
		e.buf = buffer.Get(eventsBuffer)
	}
	return e.buf.B[:cap(e.buf.B)]
}

// Free gives the memory back to the pools. A stream that waits for the engine needs none.
func (e *Events) Free() {
	e.buf.Free()
	e.buf = nil
}

// Write writes whole events. The last events are not flushed: the end of the answer is
// sent with them. The error is ErrWrite.
func (e *Events) Write(events []byte, last bool) error {
	n, err := e.w.Write(events)
	e.client.sent += int64(n)
	if err == nil && !last {
		err = e.rc.Flush()
	}
	if err != nil {
		return ErrWrite
	}
	return nil
}

// RenewWrites gives the client more time to receive the bytes that are written to it, as
// Client.LimitWrites does. A deadline that has passed resets the stream, even if no write is in
// progress. So the deadline is later than timeouts.stream_idle, which ends the stream with an error
// event. The stream calls RenewWrites whenever bytes have come from the engine; now is that time.
func (e *Events) RenewWrites(now time.Time) {
	c := e.client
	if e.renews && now.Sub(c.renewed) > renewEvery {
		c.renewed = now
		idle := time.Duration(c.cfg.Timeouts.StreamIdle) + 2*renewEvery
		e.rc.SetWriteDeadline(now.Add(max(time.Duration(c.cfg.Server.WriteTimeout), idle)))
	}
}

// renewEvery is how often an open stream renews its write deadline.
const renewEvery = time.Second

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
