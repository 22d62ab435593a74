package grpcserver

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/pdproxy/pdproxy/proxy/connlimit"
	"github.com/pdproxy/pdproxy/proxy/socket"
)

const (
	handshakeTimeout = 10 * time.Second
	// beginTimeout bounds the rest of the handshake when the server drains.
	beginTimeout = time.Second
	// pingAfter is the time without frames after which a client must answer a ping within
	// pingTimeout. The streams of a client end with its connection.
	pingAfter   = 20 * time.Second
	pingTimeout = 10 * time.Second
	// writeTimeout bounds the time in which a write must make progress.
	writeTimeout = 10 * time.Second
	// goAwayTimeout bounds the time between the two frames that end a connection, in which the
	// client must answer a ping.
	goAwayTimeout = 5 * time.Second
	// inputBuffer is the size of the buffer of one connection, in bytes: a part of a body is read at
	// once.
	inputBuffer = 128 << 10
	// window is the window of one stream, and connWindow that of one connection, in bytes.
	window     = 1 << 20
	connWindow = 16 << 20
	// maxMetadata bounds the header lines of one stream, in bytes.
	maxMetadata = 16 << 10
	// tableSize is the size of the table for header lines that the client sends again, in bytes.
	tableSize = 4096
)

// conn is the connection of a client. It has a place while it is open, and is idle while no stream has
// a request.
type conn struct {
	server *Server
	nc     net.Conn // with TLS, if there is TLS
	place  *connlimit.Place
	remote string
	ctx    context.Context // of the streams
	cancel context.CancelCauseFunc
	out    output
	heard  atomic.Bool // bytes have arrived since the last look

	// Of the goroutine that reads.
	in       *bufio.Reader
	bounded  bounded // reads in, for framer
	framer   *http2.Framer
	arrivals []*Stream // have messages of which the handlers do not know
	late     uint32    // ended stream whose late parts were answered with RST_STREAM last; 0: none
	consumed int       // bytes of the window of the connection that the client does not know
	useless  rate      // frames that carry nothing
	resets   rate      // streams that the client has reset

	mu      sync.Mutex
	begun   bool               // the client has sent the preface; guarded by mu
	leaving leaving            // guarded by mu
	last    uint32             // largest id of a stream; guarded by mu
	streams map[uint32]*Stream // that neither side has ended; guarded by mu
	live    int                // streams that are open, or whose handlers run; guarded by mu
	held    int64              // memory of the messages of streams, in bytes; guarded by mu
	ending  int64              // bytes of held of streams that end; guarded by mu
	unused  int                // guarded by unused.mu of the server

	// Of look.
	silent time.Duration // time without bytes of the client
	stuck  time.Duration // time in which a write has made no progress
	wrote  uint64        // output.writes
	parted time.Duration // time since the begin of the drain
}

// leaving is the state of a drain: the open streams go on, and later ones are refused.
type leaving int

const (
	stays  leaving = iota
	warned         // the client was told to open no more streams
	left           // later streams are refused
)

// newConn returns the connection for nc.
func newConn(s *Server, nc net.Conn, place *connlimit.Place) *conn {
	c := &conn{server: s, place: place, streams: make(map[uint32]*Stream)}
	if a := nc.RemoteAddr(); a != nil {
		c.remote = a.String()
	}
	if raw, ok := nc.(syscall.Conn); ok {
		if raw, err := raw.SyscallConn(); err == nil {
			_ = socket.GiveUpAfter(raw, pingTimeout) // an error means that the client has left
		}
	}
	if c.nc = socket.Direct(nc); s.options.TLS != nil {
		c.nc = tls.Server(c.nc, s.options.TLS)
	}
	c.ctx, c.cancel = context.WithCancelCause(s.running)
	c.framer = http2.NewFramer(&c.out, &c.bounded)
	c.framer.SetReuseFrames()
	c.framer.SetMaxReadFrameSize(maxFrame)
	c.framer.ReadMetaHeaders = hpack.NewDecoder(tableSize, nil)
	c.framer.MaxHeaderListSize = maxMetadata
	c.useless.most, c.resets.most = maxUseless, s.options.MaxStreams
	c.out.nc, c.out.framer, c.out.done, c.out.window, c.out.initial = c.nc, c.framer, make(chan struct{}), initialWindow, initialWindow
	return c
}

// initialWindow is the window of each side before it says another; RFC 9113, section 6.9.2.
const initialWindow = 65535

// source reads the socket of a connection.
type source conn

// Read implements io.Reader. The handlers of all messages that have arrived run before Read waits.
func (s *source) Read(p []byte) (int, error) {
	c := (*conn)(s)
	c.tell()
	n, err := c.nc.Read(p)
	if n > 0 && !c.heard.Load() {
		c.heard.Store(true)
	}
	return n, err
}

// bounded reads the bytes of one frame, and of those that continue it.
type bounded struct {
	in   *bufio.Reader
	left int // bytes
}

// maxBlock bounds the bytes of a frame with those that continue it. The frames of header lines may
// continue without an end.
const maxBlock = 4*maxMetadata + maxFrame

// Read implements io.Reader.
func (b *bounded) Read(p []byte) (int, error) {
	if b.left -= len(p); b.left < 0 {
		return 0, http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	return b.in.Read(p)
}

// serve serves the connection until it ends.
func (c *conn) serve() {
	err := c.handshake()
	if err == nil {
		err = c.read()
	}
	if code, ok := errors.AsType[http2.ConnectionError](err); ok {
		c.mu.Lock()
		last := c.last
		c.mu.Unlock()
		c.out.mu.Lock()
		_ = c.framer.WriteGoAway(last, http2.ErrCode(code), nil)
		c.out.mu.Unlock()
		c.finish()
		c.out.close()
		_, _ = io.Copy(io.Discard, c.nc) // to the end, within closeTimeout
	} else {
		c.finish()
		c.out.fail()
	}
	c.nc.Close()
}

// finish ends all streams of a connection that reads no more.
func (c *conn) finish() {
	c.server.leave(c)
	c.cancel(context.Canceled)
	c.mu.Lock()
	var list []*Stream
	for _, s := range c.streams {
		list = append(list, s)
	}
	c.mu.Unlock()
	for _, s := range list {
		c.closed(s)
	}
}

// handshake reads the beginning of a connection, and sends that of the server.
func (c *conn) handshake() error {
	c.nc.SetReadDeadline(time.Now().Add(handshakeTimeout))
	if t, ok := c.nc.(*tls.Conn); ok {
		c.nc.SetWriteDeadline(time.Now().Add(handshakeTimeout))
		if err := t.Handshake(); err != nil {
			return err
		}
		c.nc.SetWriteDeadline(time.Time{})
		if t.ConnectionState().NegotiatedProtocol != http2.NextProtoTLS {
			return errProtocol
		}
	}
	c.in = bufio.NewReaderSize((*source)(c), inputBuffer)
	c.bounded.in = c.in
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(c.in, preface); err != nil {
		return err
	}
	if string(preface) != http2.ClientPreface {
		return errProtocol
	}
	c.out.control(func(f *http2.Framer) {
		_ = f.WriteSettings(
			http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: uint32(c.server.options.MaxStreams)},
			http2.Setting{ID: http2.SettingInitialWindowSize, Val: window},
			http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: maxMetadata})
		_ = f.WriteWindowUpdate(0, connWindow-initialWindow)
	})
	c.bounded.left = maxBlock
	first, err := c.framer.ReadFrame()
	if err != nil {
		return err
	}
	f, ok := first.(*http2.SettingsFrame)
	if !ok || f.IsAck() {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	c.mu.Lock()
	c.begun = true
	c.nc.SetReadDeadline(time.Time{}) // drain may have set one
	c.mu.Unlock()
	if c.server.draining.Load() {
		c.drain()
	}
	return c.settings(f)
}

var errProtocol = errors.New("the client does not speak HTTP/2")

// read reads frames until the connection ends.
func (c *conn) read() error {
	for {
		c.bounded.left = maxBlock
		h, err := c.framer.ReadFrameHeader()
		if err == nil && h.Type == http2.FrameData {
			err = c.data(h)
		} else if err == nil {
			var f http2.Frame
			if f, err = c.framer.ReadFrameForHeader(h); err == nil {
				err = c.frame(f)
			}
		}
		if one, ok := errors.AsType[http2.StreamError](err); ok {
			err = c.reset(one.StreamID, one.Code)
		}
		if errors.Is(err, http2.ErrFrameTooLarge) {
			return http2.ConnectionError(http2.ErrCodeFrameSize)
		}
		if err != nil {
			return err
		}
	}
}

// tell starts or wakes the handlers whose messages have arrived.
func (c *conn) tell() {
	for i, s := range c.arrivals {
		c.arrivals[i] = nil
		c.mu.Lock()
		begun := s.begun
		if !begun && s.open {
			c.begin(s, nil)
		} else if begun && s.serving {
			s.wait(false)
		}
		open := s.open
		c.mu.Unlock()
		if begun {
			s.wakeReceiver()
		} else if open {
			c.server.workers.run(s)
		}
	}
	c.arrivals = c.arrivals[:0]
}

// begin makes the context of a stream whose handler begins. cause, if not nil, ends the context. The
// caller holds c.mu.
func (c *conn) begin(s *Stream, cause error) {
	s.begun, s.serving = true, true
	c.out.busy.Add(1)
	c.server.open.Add(1)
	c.place.Begin()
	s.ctx, s.cancel = context.WithCancelCause(c.ctx)
	if s.timeout > 0 {
		s.limitTime()
	}
	if s.method.Request && s.unused {
		s.unused = false
		c.server.unused.leave(c)
	}
	if s.half && s.method.Request {
		s.cancel(context.Canceled)
	}
	if cause != nil {
		s.cancel(cause)
	}
}

// limitTime ends the context after the client's timeout. cancel also stops the timer.
func (s *Stream) limitTime() {
	end := s.cancel
	ctx, stop := context.WithDeadline(s.ctx, s.opened.Add(s.timeout))
	s.ctx, s.cancel = ctx, func(cause error) { end(cause); stop() }
}
