package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"slices"
)

// The flags of a frame; all other bits are zero. Source: RFC 23, section Framing.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

const (
	// maxCommand limits the body of a command in bytes. The longest is READY with
	// its metadata: libzmq's has 50 bytes.
	maxCommand = 4 << 10
	// maxPing is the longest body of a PING: its name, a time to live of two bytes,
	// and a context of at most 16. Source: RFC 37, section Heartbeating.
	maxPing = 5 + 2 + 16
	// firstStep is how much memory a frame gets before any of it has arrived.
	firstStep = 64 << 10
	// keptMemory is the largest message buffer that is kept for the next message.
	keptMemory = 1 << 20
)

var errFlags = errors.New("read frame: flags that ZMTP 3 does not have")

// appendFrame appends a frame to b.
func appendFrame(b []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		b = binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(len(body)))
	} else {
		b = append(b, flags, byte(len(body)))
	}
	return append(b, body...)
}

// frame reads one frame: a part of the message, or a command, which it answers.
// It reports whether the frame was the message's last. A command may come between
// two frames of a message: libzmq sends its PINGs by a timer. Source: libzmq
// stream_engine_base.cpp, timer_event.
func (c *Conn) frame() (last bool, err error) {
	flags, size, err := c.header()
	if err != nil {
		return false, err
	}
	if flags&flagCommand != 0 {
		body, err := c.readCommand(size)
		if err != nil {
			return false, err
		}
		return false, c.answer(body)
	}
	m := &c.message
	if len(m.ends) >= c.o.MaxFrames || size > uint64(c.o.MaxMessage-len(m.bytes)) {
		return false, ErrLimit
	}
	if err := c.need(int(size)); err != nil {
		return false, err
	}
	return flags&flagMore == 0, m.read(c.r, int(size))
}

// header reads the flags and the size of the next frame.
func (c *Conn) header() (flags byte, size uint64, err error) {
	if err := c.need(2); err != nil {
		return 0, 0, err
	}
	head, err := c.r.Peek(2)
	if err != nil {
		return 0, 0, truncated(head, err)
	}
	flags, size = head[0], uint64(head[1])
	if flags&^(flagMore|flagLong|flagCommand) != 0 || flags&flagCommand != 0 && flags&flagMore != 0 {
		return 0, 0, errFlags
	}
	length := 2
	if flags&flagLong != 0 {
		length = 9
		if err := c.need(length); err != nil {
			return 0, 0, err
		}
		if head, err = c.r.Peek(length); err != nil {
			return 0, 0, truncated(head, err)
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	_, err = c.r.Discard(length)
	return flags, size, err
}

// truncated returns the error of a connection that ended inside a header. The error is
// io.EOF only if the connection ended before the header.
func truncated(head []byte, err error) error {
	if err == io.EOF && len(head) > 0 {
		return io.ErrUnexpectedEOF
	}
	return err
}

// readCommand reads the body of a command. It is valid until the next one is
// read.
func (c *Conn) readCommand(size uint64) ([]byte, error) {
	if size > maxCommand {
		return nil, ErrLimit
	}
	if err := c.need(int(size)); err != nil {
		return nil, err
	}
	c.command = slices.Grow(c.command[:0], int(size))[:size]
	_, err := io.ReadFull(c.r, c.command)
	return c.command, err
}

// answer answers a PING with the context of the PING. It ignores every other command, as
// RFC 37 requires for unknown commands.
func (c *Conn) answer(body []byte) error {
	rest, isPing := bytes.CutPrefix(body, []byte("\x04PING"))
	if !isPing || len(rest) < 2 || len(body) > maxPing {
		return nil
	}
	return c.sendCommand("PONG", rest[2:])
}

// sendCommand sends a command. Source: RFC 23, section Commands.
func (c *Conn) sendCommand(name string, data []byte) error {
	body := append(append([]byte{byte(len(name))}, name...), data...)
	c.out = appendFrame(c.out[:0], flagCommand, body)
	return c.flush()
}

// message holds the frames of a message, one after the other.
type message struct {
	bytes  []byte
	ends   []int // of each frame in bytes
	frames [][]byte
}

// reset makes room for the next message.
func (m *message) reset() {
	if cap(m.bytes) > keptMemory {
		m.bytes = nil
	}
	m.bytes, m.ends = m.bytes[:0], m.ends[:0]
}

func (m *message) empty() bool { return len(m.ends) == 0 }

// read reads a frame of n bytes. The buffer grows as the bytes arrive, so that a
// peer cannot occupy memory by announcing a size.
func (m *message) read(r *bufio.Reader, n int) error {
	for n > 0 {
		step := min(n, max(cap(m.bytes)-len(m.bytes), len(m.bytes), firstStep))
		have := len(m.bytes)
		m.bytes = slices.Grow(m.bytes, step)[:have+step]
		if _, err := io.ReadFull(r, m.bytes[have:]); err != nil {
			return err
		}
		n -= step
	}
	m.ends = append(m.ends, len(m.bytes))
	return nil
}

// list returns the frames.
func (m *message) list() [][]byte {
	m.frames = m.frames[:0]
	begin := 0
	for _, end := range m.ends {
		m.frames = append(m.frames, m.bytes[begin:end:end])
		begin = end
	}
	return m.frames
}
