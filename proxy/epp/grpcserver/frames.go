package grpcserver

import (
	"context"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// maxUseless bounds the frames of one second that carry nothing, such as pings and empty parts of
	// messages.
	maxUseless = 1000
	// uselessPerMessage is the number of such frames that do not count for each message. A client of
	// grpc-go may ping after each answer, to measure the bandwidth, and a client may end a stream that
	// the server has just ended.
	uselessPerMessage = 4
)

// rate bounds the events of one second.
type rate struct {
	most, n int
	since   time.Time
}

// exceeded counts an event. It reports whether there are too many of them.
func (r *rate) exceeded() bool {
	if r.n++; r.n <= r.most {
		return false
	}
	now := time.Now()
	if now.Sub(r.since) < time.Second {
		return true
	}
	r.n, r.since = 0, now
	return false
}

// forget forgets n events of the second.
func (r *rate) forget(n int) { r.n = max(0, r.n-n) }

// errCalm ends a connection whose client sends useless frames.
const errCalm = http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)

// waste counts a frame that carries nothing.
func (c *conn) waste() error {
	if c.useless.exceeded() {
		return errCalm
	}
	return nil
}

// frame handles a frame without a part of a message.
func (c *conn) frame(f http2.Frame) error {
	switch f := f.(type) {
	case *http2.MetaHeadersFrame:
		return c.headers(f)
	case *http2.SettingsFrame:
		if f.IsAck() {
			return c.waste()
		}
		return c.settings(f)
	case *http2.PingFrame:
		return c.ping(f)
	case *http2.WindowUpdateFrame:
		return c.windowUpdate(f)
	case *http2.RSTStreamFrame:
		return c.resetByClient(f.StreamID)
	case *http2.PushPromiseFrame, *http2.ContinuationFrame:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	return c.waste() // a client that sends GOAWAY accepts no streams of the server, which opens none
}

// settings applies the client's settings. Frames of the server have a length that each client accepts,
// and its header lines use no table.
func (c *conn) settings(f *http2.SettingsFrame) error {
	if f.HasDuplicates() {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	if err := f.ForeachSetting(func(s http2.Setting) error {
		if err := s.Valid(); err != nil {
			return err
		}
		if s.ID == http2.SettingInitialWindowSize {
			return c.resize(int64(s.Val))
		}
		return nil
	}); err != nil {
		return err
	}
	c.out.control(func(f *http2.Framer) { _ = f.WriteSettingsAck() })
	return c.waste()
}

// resize changes the windows of all streams by the change of the initial window.
func (c *conn) resize(initial int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	change := initial - c.out.initial
	c.out.initial = initial
	for _, s := range c.streams {
		if s.window += change; s.window > maxWindow {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
	}
	c.out.wake()
	return nil
}

func (c *conn) ping(f *http2.PingFrame) error {
	switch {
	case !f.IsAck():
		data := f.Data
		c.out.control(func(f *http2.Framer) { _ = f.WritePing(true, data) })
	case f.Data == drainPing:
		c.refuseMore()
	}
	return c.waste()
}

func (c *conn) windowUpdate(f *http2.WindowUpdateFrame) error {
	if f.StreamID == 0 {
		if !c.out.grant(nil, int64(f.Increment)) {
			return http2.ConnectionError(http2.ErrCodeFlowControl)
		}
		return nil
	}
	s, idle := c.find(f.StreamID)
	if idle {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	if s != nil && !c.out.grant(s, int64(f.Increment)) {
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeFlowControl}
	}
	return nil
}

// find returns an open stream; nil: it has ended, or the client has not opened it yet.
func (c *conn) find(id uint32) (s *Stream, idle bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s = c.streams[id]
	return s, s == nil && (id%2 == 0 || id > c.last)
}

// resetByClient ends a stream that the client has reset.
func (c *conn) resetByClient(id uint32) error {
	s, idle := c.find(id)
	if idle {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	if s == nil { // some clients reset each stream that the server has ended
		return nil
	}
	c.out.mu.Lock()
	s.closed = true
	c.out.mu.Unlock()
	c.abandon(s)
	if c.resets.exceeded() {
		return errCalm
	}
	return nil
}

// reset resets a stream, open or not. A stream whose head is malformed has been opened too.
func (c *conn) reset(id uint32, code http2.ErrCode) error {
	s, _ := c.find(id)
	c.mu.Lock()
	if id%2 == 1 {
		c.last = max(c.last, id)
	}
	c.mu.Unlock()
	c.out.control(func(f *http2.Framer) {
		if s != nil {
			s.closed = true
		}
		_ = f.WriteRSTStream(id, code)
	})
	if s != nil {
		c.abandon(s)
	}
	return c.waste()
}

// headers opens a stream, or ends the client's side of an open one.
func (c *conn) headers(f *http2.MetaHeadersFrame) error {
	id := f.StreamID
	s, idle := c.find(id)
	switch {
	case s != nil && f.StreamEnded():
		return c.endHalf(s)
	case s != nil:
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
	case !idle || id%2 == 0:
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	c.mu.Lock()
	c.last = id
	most := c.server.options.MaxStreams // handlers may go on after the ends of their streams
	full := c.leaving == left || len(c.streams) >= most || c.live >= 2*most
	c.mu.Unlock()
	if full {
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeRefusedStream}
	}
	call, ok := callOf(f)
	method, found := c.server.options.Methods[call.path]
	switch {
	case !ok:
		return http2.StreamError{StreamID: id, Code: http2.ErrCodeProtocol}
	case call.refusal != "":
		return c.refuse(f, block(":status", call.refusal))
	case f.Truncated:
		return c.refuse(f, endBlock(errMetadata, true))
	case !found:
		return c.refuse(f, endBlock(status.Errorf(codes.Unimplemented, "there is no method %s", call.path), true))
	case f.StreamEnded():
		return c.refuse(f, endBlock(nil, true)) // the stream was opened for nothing
	case !c.server.unused.enter(c):
		return c.refuse(f, endBlock(errUnused, true))
	}
	c.open(id, method, call.timeout)
	return nil
}

// open opens a stream.
func (c *conn) open(id uint32, method Method, timeout time.Duration) {
	s := &Stream{conn: c, id: id, method: method, opened: time.Now(), timeout: timeout, arrived: make(chan struct{}, 1), credit: window, open: true, unused: true}
	s.queue = s.first[:0]
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams[id] = s
	c.live++
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	s.window = c.out.initial
}

// refuse answers the head of a stream with the head of an answer that also ends the stream.
func (c *conn) refuse(head *http2.MetaHeadersFrame, answer []byte) error {
	id, half := head.StreamID, head.StreamEnded()
	c.out.control(func(f *http2.Framer) {
		c.out.header(id, answer, true)
		if !half {
			_ = f.WriteRSTStream(id, http2.ErrCodeNo)
		}
	})
	return c.waste()
}

// endHalf ends the client's side of a stream.
func (c *conn) endHalf(s *Stream) error {
	c.mu.Lock()
	again := s.half
	s.half = true
	begun, waits := s.begun, len(s.queue) > 0
	c.mu.Unlock()
	switch {
	case again:
		return http2.StreamError{StreamID: s.id, Code: http2.ErrCodeStreamClosed}
	case begun && s.method.Request:
		s.cancel(context.Canceled)
	case !begun && s.assembly.have > 0:
		c.fail(s, status.Error(codes.Internal, "the stream ended inside a message"))
	case !begun && !waits:
		c.fail(s, nil) // it was opened for nothing
	}
	return nil
}

// fail ends a stream with a status, although its handler may run.
func (c *conn) fail(s *Stream, err error) {
	c.end(s, err)
	c.abandon(s)
	c.out.control(func(*http2.Framer) {})
}

// abandon ends a stream to which nothing more can be sent.
func (c *conn) abandon(s *Stream) {
	c.closed(s)
	c.mu.Lock()
	begun := s.begun
	c.mu.Unlock()
	if begun {
		s.cancel(context.Canceled)
	}
}

// end ends a stream with a status, without a write. It returns false if the stream has ended.
func (c *conn) end(s *Stream, err error) bool {
	c.mu.Lock()
	half := s.half
	c.mu.Unlock()
	o := &c.out
	o.mu.Lock()
	if s.closed || o.failed {
		o.mu.Unlock()
		return false
	}
	s.closed = true
	o.header(s.id, endBlock(err, !s.answered), true)
	if !half {
		_ = o.framer.WriteRSTStream(s.id, http2.ErrCodeNo)
	}
	o.mu.Unlock()
	c.closed(s)
	return true
}

// closed records that a stream is not open any more.
func (c *conn) closed(s *Stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !s.open {
		return
	}
	s.open = false
	delete(c.streams, s.id)
	c.ends(s)
	c.settle(s)
}

// settle ends the counting of a stream that is not open and has no handler. The caller holds c.mu.
func (c *conn) settle(s *Stream) {
	if s.open || s.serving || s.settled {
		return
	}
	s.settled = true
	c.count(s, -s.held)
	c.live--
	if s.unused {
		s.unused = false
		c.server.unused.leave(c)
	}
	c.closeIfDone()
}
