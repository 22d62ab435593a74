package grpcserver

import (
	"encoding/binary"
	"io"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pdproxy/pdproxy/proxy/buffer"
)

const (
	// messageHead is the length of the head of a gRPC message, in bytes: one for the compression, and
	// four for the length.
	messageHead = 5
	// firstRoom is the memory that a message gets before its bytes have arrived, in bytes.
	firstRoom = 16 << 10
	// mostGrowth bounds the memory that a message gets more at a time, in bytes.
	mostGrowth = 4 << 20
)

// assembly is the message of a stream that arrives.
type assembly struct {
	head   [messageHead]byte
	have   int            // bytes of head that have arrived; 0: no message arrives
	want   int            // length of the message, in bytes
	memory *buffer.Buffer // has the bytes that have arrived; nil: none
	cost   int64          // bytes that count
}

// bytes returns the bytes that have arrived.
func (a *assembly) bytes() []byte {
	if a.memory == nil {
		return nil
	}
	return a.memory.B
}

// data handles a part of messages.
func (c *conn) data(h http2.FrameHeader) error {
	if h.StreamID == 0 {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	length, pad := int(h.Length), 0
	if h.Flags.Has(http2.FlagDataPadded) {
		if length == 0 {
			return http2.ConnectionError(http2.ErrCodeFrameSize)
		}
		b, err := c.in.ReadByte()
		if err != nil {
			return err
		}
		if pad, length = int(b), length-1; pad > length {
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		length -= pad
	}
	c.consume(int(h.Length))
	s, needed, failed := c.receiver(h, length)
	if needed {
		rest, err := c.assemble(s, length)
		if err != nil {
			return err
		}
		length = rest
	}
	if _, err := c.in.Discard(length + pad); err != nil {
		return err
	}
	switch ended := h.Flags.Has(http2.FlagDataEndStream); {
	case failed != nil:
		return failed
	case s != nil && ended:
		return c.endHalf(s)
	case h.Length == 0:
		return c.waste()
	}
	return nil
}

// consume gives n bytes of the connection's window back, sooner or later. The memory of messages has
// its own limit, which is not the same for all streams.
func (c *conn) consume(n int) {
	if c.consumed += n; c.consumed < connWindow/4 {
		return
	}
	n, c.consumed = c.consumed, 0
	c.out.control(func(f *http2.Framer) { _ = f.WriteWindowUpdate(0, uint32(n)) })
}

// receiver returns the stream of a part with that many bytes beside the padding; nil: the stream has
// ended. needed reports whether somebody needs the bytes. The error belongs after the part.
func (c *conn) receiver(h http2.FrameHeader, length int) (s *Stream, needed bool, failed error) {
	s, idle := c.find(h.StreamID)
	switch {
	case idle:
		return nil, false, http2.ConnectionError(http2.ErrCodeProtocol)
	case s == nil && c.late == h.StreamID:
		return nil, false, nil // the client does not know yet
	case s == nil:
		c.late = h.StreamID
		c.out.control(func(f *http2.Framer) { _ = f.WriteRSTStream(h.StreamID, http2.ErrCodeStreamClosed) })
		return nil, false, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s.credit -= int64(h.Length)
	s.owed += int64(h.Length) - int64(length)
	switch {
	case s.half:
		return nil, false, http2.StreamError{StreamID: s.id, Code: http2.ErrCodeStreamClosed}
	case s.credit < 0:
		return nil, false, http2.StreamError{StreamID: s.id, Code: http2.ErrCodeFlowControl}
	}
	return s, s.open && !s.ending, nil
}

// assemble reads n bytes of messages. It returns the number of bytes that it has not read, because the
// stream has ended.
func (c *conn) assemble(s *Stream, n int) (rest int, err error) {
	a := &s.assembly
	for n > 0 {
		if a.have < messageHead {
			k := min(n, messageHead-a.have)
			if _, err := io.ReadFull(c.in, a.head[a.have:a.have+k]); err != nil {
				return 0, err
			}
			n -= k
			if a.have += k; a.have == messageHead && !c.beginMessage(s, n) {
				return n, nil
			}
			continue
		}
		have := len(a.bytes())
		k := min(n, a.want-have)
		if !c.grow(s, have+k) {
			return n, nil
		}
		a.memory.B = a.memory.B[:have+k]
		if _, err := io.ReadFull(c.in, a.memory.B[have:]); err != nil {
			return 0, err
		}
		n -= k
		if have+k == a.want {
			c.deliver(s)
		}
	}
	return 0, nil
}

// beginMessage looks at the head of a message. n bytes of the frame follow. It returns false if the
// stream has ended.
func (c *conn) beginMessage(s *Stream, n int) bool {
	a := &s.assembly
	length := int64(binary.BigEndian.Uint32(a.head[1:]))
	switch {
	case a.head[0] != 0:
		c.fail(s, errCompressed)
		return false
	case length > int64(c.server.options.MaxMessage):
		c.fail(s, status.Errorf(codes.ResourceExhausted, "a message has %d bytes, more than %d", length, c.server.options.MaxMessage))
		return false
	}
	a.want, a.cost = int(length), messageCost
	if !c.reserve(s, messageCost) {
		return false
	}
	c.mu.Lock()
	more := length - int64(n) - s.credit
	if more > 0 { // the client could not send the message to its end
		s.credit += more
		s.extra += more
	}
	c.mu.Unlock()
	if more > 0 {
		c.out.control(func(f *http2.Framer) { _ = f.WriteWindowUpdate(s.id, uint32(more)) })
	}
	if length == 0 {
		c.deliver(s)
	}
	return true
}

// errCompressed refuses compressed messages: a short message could become a very long one.
var errCompressed = status.Error(codes.Unimplemented, "compressed messages are not supported")

// grow gives the message that arrives memory for need bytes. It returns false if the stream must end.
func (c *conn) grow(s *Stream, need int) bool {
	a := &s.assembly
	have := cap(a.bytes())
	if need <= have {
		return true
	}
	room := min(a.want, max(need, firstRoom, have+min(have, mostGrowth)))
	cost := int64(buffer.Room(room))
	if !c.reserve(s, cost) {
		return false
	}
	next := buffer.Get(room)
	next.B = append(next.B, a.bytes()...)
	a.memory.Free()
	a.memory = next
	c.mu.Lock()
	if !s.settled {
		c.count(s, -int64(have))
	}
	c.mu.Unlock()
	a.cost = messageCost + int64(cap(next.B))
	return true
}

// deliver gives the message that has arrived to the handler.
func (c *conn) deliver(s *Stream) {
	a := &s.assembly
	m := Message{Data: a.bytes(), memory: a.memory, stream: s, cost: a.cost}
	*a = assembly{}
	c.useless.forget(uselessPerMessage)
	c.mu.Lock()
	if s.taken > 0 && len(s.queue) == cap(s.queue) {
		n := copy(s.queue, s.queue[s.taken:])
		clear(s.queue[n:])
		s.queue, s.taken = s.queue[:n], 0
	}
	s.queue = append(s.queue, m)
	c.mu.Unlock()
	if n := len(c.arrivals); n == 0 || c.arrivals[n-1] != s {
		c.arrivals = append(c.arrivals, s)
	}
}
