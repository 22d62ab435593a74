package grpcserver

import (
	"encoding/binary"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
)

const (
	// maxFrame is the longest frame that each peer accepts, and the longest one that this server accepts.
	maxFrame = 16 << 10
	// maxPending bounds the frames with messages that wait to be written, in bytes. A sender waits
	// above it.
	maxPending = 128 << 10
	// mostPending bounds all frames that wait to be written, in bytes. Only a client that does not read
	// reaches it, and its connection ends.
	mostPending = 1 << 20
	// outputRoom is the room of a buffer for frames, in bytes: usually none is longer than maxPending
	// by more than one frame.
	outputRoom = maxPending + 2*maxFrame
	// ownWrites bounds the writes of one call of flush.
	ownWrites = 8
	// smallWrite is the size below which a write waits for the messages of handlers that are ready to
	// run, in bytes.
	smallWrite = 16 << 10
	// closeTimeout bounds the last write of a connection, and then the wait for the peer's end.
	closeTimeout = time.Second
)

// output is the side of a connection that writes. Safe for concurrent use.
type output struct {
	nc   net.Conn
	busy atomic.Int32 // handlers that run, or are ready to run

	mu      sync.Mutex    // guards the rest
	framer  *http2.Framer // appends to pending
	pending []byte        // frames; nil: none, and no memory
	writing bool          // a goroutine writes
	writes  uint64        // number of writes that have ended
	failed  bool          // nothing can be written
	closing bool          // the connection ends when pending is written
	ended   bool          // the last write has ended
	done    chan struct{} // closed after ended

	window  int64     // bytes that the peer accepts on the connection
	initial int64     // window of a new stream
	blocked []*Stream // streams whose senders wait
}

// Write implements io.Writer for framer. The caller holds o.mu.
func (o *output) Write(p []byte) (int, error) {
	if !o.failed {
		o.allocate()
		o.pending = append(o.pending, p...)
	}
	return len(p), nil
}

// outputs has the memory of frames that were written, of *[]byte. A connection has memory only while
// frames wait.
var outputs sync.Pool

// allocate gives pending memory. The caller holds o.mu.
func (o *output) allocate() {
	if o.pending != nil {
		return
	}
	if b, ok := outputs.Get().(*[]byte); ok {
		o.pending = (*b)[:0]
	} else {
		o.pending = make([]byte, 0, outputRoom)
	}
}

// control appends frames that add writes, and lets another goroutine write them: the goroutine that
// reads must never wait for a peer that does not read.
func (o *output) control(add func(*http2.Framer)) {
	o.mu.Lock()
	add(o.framer)
	writing := o.writing
	if len(o.pending) > mostPending && !o.failed {
		o.failed = true
		go o.nc.Close() // the end of TLS may wait for a client that does not read
	}
	o.mu.Unlock()
	if !writing {
		go o.flush() // ends with the write, which ends with the connection at the latest
	}
}

// flush writes what is pending. If another goroutine writes, it writes that too. After ownWrites
// writes, another goroutine goes on: the caller has a request of its own.
func (o *output) flush() {
	o.mu.Lock()
	if o.writing {
		o.mu.Unlock()
		return
	}
	o.writing = true
	if o.busy.Load() > 1 && len(o.pending) < smallWrite {
		o.mu.Unlock()
		runtime.Gosched() // other handlers may add messages
		o.mu.Lock()
	}
	for n := 0; len(o.pending) > 0 && !o.failed; n++ {
		if n == ownWrites {
			o.writing = false
			o.mu.Unlock()
			go o.flush() // ends with the writes, which end with the connection at the latest
			return
		}
		b := o.pending
		o.pending = nil
		o.mu.Unlock()
		_, err := o.nc.Write(b)
		if cap(b) == outputRoom {
			outputs.Put(&b)
		}
		o.mu.Lock()
		o.writes++
		o.failed = o.failed || err != nil
		o.wake()
	}
	o.writing = false
	failed, last := o.failed, (o.failed || o.closing) && !o.ended
	if last {
		o.failed, o.ended = true, true
	}
	o.mu.Unlock()
	if !last {
		return
	}
	if failed {
		o.nc.Close()
	} else {
		o.closeWrite()
	}
	close(o.done)
}

// close ends the connection when everything is written. It returns when done is closed, within
// closeTimeout.
func (o *output) close() {
	o.nc.SetWriteDeadline(time.Now().Add(closeTimeout)) // of the running write too
	o.mu.Lock()
	o.closing = true
	o.mu.Unlock()
	o.flush()
	<-o.done
}

// closeWrite ends the written side of the connection. The peer gets the last frames also if it is
// still sending: a close with unread bytes would discard them.
func (o *output) closeWrite() {
	half, ok := o.nc.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		o.nc.Close()
		return
	}
	o.nc.SetReadDeadline(time.Now().Add(closeTimeout))
}

// fail ends all writes.
func (o *output) fail() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.failed = true
	o.wake()
}

// wake wakes the senders that wait. The caller holds o.mu.
func (o *output) wake() {
	for _, s := range o.blocked {
		s.wakeSender()
	}
	clear(o.blocked)
	o.blocked = o.blocked[:0]
}

// room returns the number of bytes of a message that may be appended now for s. The caller holds o.mu.
func (o *output) room(s *Stream) int {
	if len(o.pending) >= maxPending {
		return 0
	}
	return int(min(maxFrame, s.window, o.window))
}

// appendData appends the head of a frame with n bytes of a message. The caller holds o.mu.
func (o *output) appendData(id uint32, n int) {
	o.allocate()
	o.pending = append(o.pending, byte(n>>16), byte(n>>8), byte(n), byte(http2.FrameData), 0)
	o.pending = binary.BigEndian.AppendUint32(o.pending, id)
}

// message appends a message of s, and waits for the peer's window. The caller holds o.mu.
func (o *output) message(s *Stream, parts [][]byte) error {
	size := 0
	for _, p := range parts {
		size += len(p)
	}
	var head [messageHead]byte
	binary.BigEndian.PutUint32(head[1:], uint32(size))
	part := head[:]
	for left := messageHead + size; left > 0; {
		if s.closed || o.failed {
			return errEnded
		}
		n := min(o.room(s), left)
		if n <= 0 {
			if err := o.wait(s); err != nil {
				return err
			}
			continue
		}
		o.appendData(s.id, n)
		s.window -= int64(n)
		o.window -= int64(n)
		left -= n
		for n > 0 {
			for len(part) == 0 {
				part, parts = parts[0], parts[1:]
			}
			k := min(n, len(part))
			o.pending = append(o.pending, part[:k]...)
			part = part[k:]
			n -= k
		}
	}
	return nil
}

// wait waits until s may send, or must end. The caller holds o.mu.
func (o *output) wait(s *Stream) error {
	if s.sendable == nil {
		s.sendable = make(chan struct{}, 1)
	}
	o.blocked = append(o.blocked, s)
	o.mu.Unlock()
	defer o.mu.Lock()
	o.flush()
	select {
	case <-s.sendable:
		return nil
	case <-s.ctx.Done():
		return errEnded
	}
}

// grant adds n bytes to the window of the connection, or to the window of s. It returns false if the
// window gets too large.
func (o *output) grant(s *Stream, n int64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	window := &o.window
	if s != nil {
		window = &s.window
	}
	*window += n
	if s == nil {
		o.wake()
	} else {
		s.wakeSender()
	}
	return *window <= maxWindow
}

// maxWindow is the largest window; RFC 9113, section 6.9.1.
const maxWindow = 1<<31 - 1
