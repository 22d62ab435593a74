package grpcserver

import (
	"context"
	"errors"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

// Stream is one call of a client. Its method's Serve owns it.
type Stream struct {
	conn    *conn
	id      uint32
	method  Method
	opened  time.Time
	timeout time.Duration // grpc-timeout; 0: none
	arrived chan struct{} // has a value when a message has arrived since the last look

	ctx    context.Context // of the handler
	cancel context.CancelCauseFunc

	assembly assembly // of the goroutine that reads

	// conn.mu guards the next fields.
	queue   []Message // that Take has not returned
	taken   int       // messages of queue that Take has returned
	first   [3]Message
	credit  int64       // bytes that the client may send
	extra   int64       // bytes of credit beyond window, for a long message
	owed    int64       // bytes of messages that were taken, which the client does not know yet
	held    int64       // memory of messages, in bytes
	open    bool        // neither side has ended the stream
	half    bool        // the client has ended its side
	begun   bool        // the handler runs, or has returned
	serving bool        // the handler runs
	waits   bool        // the handler waits for a message
	settled bool        // the stream counts no more
	ending  bool        // the stream was told to end
	unused  bool        // the stream counts as unused
	full    func() bool // see OnFull; nil: none

	// conn.out.mu guards the next fields.
	window   int64         // bytes that the client accepts
	answered bool          // the head of the answer was sent
	closed   bool          // nothing more can be sent
	sendable chan struct{} // has a value when a sender that waits must look again; nil: none has waited
}

// Message is a message of a client. Its memory counts until Release, or until the end of the stream.
type Message struct {
	Data   []byte // valid until Release
	memory *buffer.Buffer
	stream *Stream
	cost   int64 // bytes that count
}

// Release gives the memory back. The zero value has none.
func (m *Message) Release() {
	if m.stream == nil {
		return
	}
	m.memory.Free()
	c := m.stream.conn
	c.mu.Lock()
	if !m.stream.settled {
		c.count(m.stream, -m.cost)
	}
	c.mu.Unlock()
	*m = Message{}
}

var (
	// ErrMemory is the cause of the end of a stream that has no memory for its messages.
	ErrMemory = status.Error(codes.ResourceExhausted, "the memory of the proxy for messages of gateways is used up")
	// errEnded is the error of a message for a stream that has ended.
	errEnded = errors.New("the stream has ended")
)

// Context ends when the client has left, or when the stream must end, with the cause.
func (s *Stream) Context() context.Context { return s.ctx }

// RemoteAddr returns the address of the client.
func (s *Stream) RemoteAddr() string { return s.conn.remote }

// Arrived has a value when messages have arrived since the last receive from it. Only one goroutine
// receives.
func (s *Stream) Arrived() <-chan struct{} { return s.arrived }

// Take returns the next message that has arrived. It does not wait.
func (s *Stream) Take() (Message, bool) {
	c := s.conn
	c.mu.Lock()
	if s.taken == len(s.queue) {
		s.wait(true)
		c.mu.Unlock()
		return Message{}, false
	}
	s.wait(false)
	m := s.queue[s.taken]
	s.queue[s.taken] = Message{}
	if s.taken++; s.taken == len(s.queue) {
		s.queue, s.taken = s.queue[:0], 0
	}
	s.owed += int64(messageHead + len(m.Data))
	owed := s.repay()
	c.mu.Unlock()
	if owed > 0 {
		c.out.control(func(f *http2.Framer) { _ = f.WriteWindowUpdate(s.id, uint32(owed)) })
	}
	return m, true
}

// wait records whether the handler waits for a message. The caller holds conn.mu.
func (s *Stream) wait(waits bool) {
	switch {
	case waits && !s.waits:
		s.conn.out.busy.Add(-1)
	case !waits && s.waits:
		s.conn.out.busy.Add(1)
	}
	s.waits = waits
}

// repay returns the bytes that the client gets for the messages that were taken; 0: none yet. The
// caller holds conn.mu.
func (s *Stream) repay() int64 {
	if s.owed < window/2 || !s.open || s.half {
		return 0
	}
	back := min(s.owed, s.extra)
	s.extra -= back
	owed := s.owed - back
	s.owed = 0
	s.credit += owed
	return owed
}

// Parts are the pieces of a message.
type Parts [3][]byte

// Send sends a message, its parts together, and waits until the client's window has room.
// The caller may then reuse the memory. more: the caller sends another message at once, or ends the
// stream, or calls Flush, so that both leave in one write. The error means that the stream has ended.
func (s *Stream) Send(more bool, parts Parts) error {
	o := &s.conn.out
	o.mu.Lock()
	if s.closed || o.failed {
		o.mu.Unlock()
		return errEnded
	}
	if !s.answered {
		s.answered = true
		o.header(s.id, headBlock, false)
	}
	err := o.message(s, parts[:])
	more = more && len(o.pending) < maxPending/2
	o.mu.Unlock()
	if !more {
		o.flush()
	}
	return err
}

// Flush sends the messages for which Send has waited for more.
func (s *Stream) Flush() { s.conn.out.flush() }

// End ends the stream with a status; nil is OK. Serve may go on. Only the first call counts.
func (s *Stream) End(err error) {
	c := s.conn
	if c.end(s, err) {
		c.out.flush()
	}
}

// Cancel ends the context with a cause. Messages can still be sent.
func (s *Stream) Cancel(cause error) { s.cancel(cause) }

// OnFull sets the function that is called first when the stream must end because of the memory of its
// messages. If it returns false, the context ends with ErrMemory.
func (s *Stream) OnFull(full func() bool) {
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	s.full = full
}

// serve runs the handler.
func (s *Stream) serve() {
	c := s.conn
	s.End(s.method.Serve(s))
	s.cancel(nil)
	c.mu.Lock()
	s.wait(true)
	s.serving = false
	s.queue, s.full = nil, nil
	c.settle(s)
	c.mu.Unlock()
	c.place.End()
	c.server.open.Done()
}

// wakeSender wakes the sender that waits. The caller holds conn.out.mu.
func (s *Stream) wakeSender() {
	if s.sendable == nil {
		return
	}
	select {
	case s.sendable <- struct{}{}:
	default:
	}
}

// wakeReceiver tells the handler that a message has arrived.
func (s *Stream) wakeReceiver() {
	select {
	case s.arrived <- struct{}{}:
	default:
	}
}
