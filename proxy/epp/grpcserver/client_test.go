package grpcserver

import (
	"bytes"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// The methods of the server of the tests.
const (
	methodEcho  = "/test/Echo"  // a request; returns each message
	methodTaken = "/test/Taken" // a request; takes each message, and answers the first one at the end of the context
	methodOne   = "/test/One"   // no request; returns one message
)

// served is a server of the tests.
type served struct {
	*Server
	listener *proxytest.PipeListener
	began    chan *Stream // gets the streams of methodTaken
	writes   atomic.Int64 // of all connections
}

// counted counts the writes of a connection.
type counted struct {
	net.Conn
	writes *atomic.Int64
}

// Write implements net.Conn.
func (c counted) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}

// counting counts the writes of the connections.
type counting struct {
	net.Listener
	writes *atomic.Int64
}

// Accept implements net.Listener.
func (l counting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return counted{c, l.writes}, nil
}

// serve serves until the end of the test, and checks then that nothing is left.
func serve(t *testing.T, edit func(*Options)) *served {
	s := &served{listener: proxytest.NewPipeListener(), began: make(chan *Stream, 1000)}
	o := Options{
		Methods:    map[string]Method{methodEcho: {Serve: echo, Request: true}, methodTaken: {Serve: s.taken, Request: true}, methodOne: {Serve: one}},
		MaxMessage: 1 << 20, MaxStreams: 100, FirstMessage: 10 * time.Second, Memory: new(buffer.Budget), Log: slog.New(slog.DiscardHandler),
	}
	if edit != nil {
		edit(&o)
	}
	s.Server = New(o)
	done := make(chan error, 1)
	go func() { done <- s.Serve(counting{s.listener, &s.writes}) }()
	t.Cleanup(func() {
		s.Drain()
		s.Cut(io.EOF)
		if err := <-done; err != nil {
			t.Error(err)
		}
		if held, ending, counted := s.memory.held.Load(), s.memory.ending.Load(), o.Memory.Used(); held != 0 || ending != 0 || counted != 0 {
			t.Errorf("%d, %d and %d bytes are still counted", held, ending, counted)
		}
		if s.unused.all != 0 || s.unused.conns != 0 || s.Connected() {
			t.Errorf("%d unused streams of %d connections are still counted", s.unused.all, s.unused.conns)
		}
	})
	return s
}

// receive waits for a message; false: the context has ended.
func receive(s *Stream) (Message, bool) {
	for {
		if m, ok := s.Take(); ok {
			return m, true
		}
		select {
		case <-s.Arrived():
		case <-s.Context().Done():
			return s.Take()
		}
	}
}

func echo(s *Stream) error {
	for {
		m, ok := receive(s)
		if !ok {
			return nil
		}
		err := s.Send(false, Parts{m.Data[:len(m.Data)/2], m.Data[len(m.Data)/2:]})
		m.Release()
		if err != nil {
			return err
		}
	}
}

func (s *served) taken(st *Stream) error {
	s.began <- st
	for {
		m, ok := receive(st)
		if !ok {
			return nil
		}
		m.Release()
	}
}

func one(s *Stream) error {
	m, ok := receive(s)
	if !ok {
		return s.Context().Err()
	}
	defer m.Release()
	return s.Send(true, Parts{m.Data})
}

// client is a client whose frames the test makes.
type client struct {
	net.Conn
	t      *testing.T
	framer *http2.Framer
	block  bytes.Buffer
	encode *hpack.Encoder
	frames chan frame // that the server has sent; closed at the end of the connection
}

// frame is a frame of the server.
type frame struct {
	http2.FrameHeader
	data   []byte            // of DATA and PING
	code   http2.ErrCode     // of RST_STREAM and GOAWAY
	last   uint32            // of GOAWAY
	more   uint32            // of WINDOW_UPDATE
	fields map[string]string // of HEADERS
}

// dial opens a connection without sending a byte.
func (s *served) dial(t *testing.T) *client {
	t.Helper()
	nc, err := s.listener.Dial()
	if err != nil {
		t.Fatal(err)
	}
	return newClient(t, nc)
}

func newClient(t *testing.T, nc net.Conn) *client {
	c := &client{Conn: nc, t: t, framer: http2.NewFramer(nc, nc), frames: make(chan frame, 100_000)}
	c.framer.AllowIllegalWrites = true
	c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	c.encode = newEncoder(c)
	read := make(chan struct{})
	go func() { // ends with the connection
		defer close(read)
		c.read()
	}()
	t.Cleanup(func() { nc.Close(); <-read })
	return c
}

func newEncoder(c *client) *hpack.Encoder { return hpack.NewEncoder(&c.block) }

func (c *client) read() {
	defer close(c.frames)
	for {
		f, err := c.framer.ReadFrame()
		if err != nil {
			return
		}
		got := frame{FrameHeader: f.Header()}
		switch f := f.(type) {
		case *http2.DataFrame:
			got.data = bytes.Clone(f.Data())
		case *http2.PingFrame:
			got.data = f.Data[:]
		case *http2.RSTStreamFrame:
			got.code = f.ErrCode
		case *http2.GoAwayFrame:
			got.code, got.last = f.ErrCode, f.LastStreamID
		case *http2.WindowUpdateFrame:
			got.more = f.Increment
		case *http2.MetaHeadersFrame:
			got.fields = map[string]string{}
			for _, l := range f.Fields {
				got.fields[l.Name] = l.Value
			}
		}
		c.frames <- got
	}
}

// connect is dial with the begin of HTTP/2.
func (s *served) connect(t *testing.T, settings ...http2.Setting) *client {
	t.Helper()
	c := s.dial(t)
	c.hello(settings...)
	return c
}

func (c *client) hello(settings ...http2.Setting) {
	io.WriteString(c, http2.ClientPreface)
	c.framer.WriteSettings(settings...)
}

// open opens a stream. lines are further header lines, or other values of the usual ones.
func (c *client) open(id uint32, path string, end bool, lines ...string) {
	c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: c.head(path, lines...), EndHeaders: true, EndStream: end})
}

// head returns the encoded head of a stream. A line with the value "-" is left out.
func (c *client) head(path string, lines ...string) []byte {
	c.block.Reset()
	all := []string{":method", "POST", ":scheme", "http", ":path", path, ":authority", "x", "content-type", "application/grpc", "te", "trailers"}
	for i := 0; i+1 < len(lines); i += 2 {
		at := 0
		for at < len(all) && all[at] != lines[i] {
			at += 2
		}
		if at == len(all) {
			all = append(all, lines[i:i+2]...)
		}
		all[at+1] = lines[i+1]
	}
	for i := 0; i+1 < len(all); i += 2 {
		if all[i+1] != "-" {
			c.encode.WriteField(hpack.HeaderField{Name: all[i], Value: all[i+1]})
		}
	}
	return bytes.Clone(c.block.Bytes())
}

// framed returns a gRPC message.
func framed(text string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(text))), text...)
}

// send sends a message.
func (c *client) send(id uint32, end bool, text string) {
	rest := framed(text)
	for len(rest) > maxFrame {
		c.framer.WriteData(id, false, rest[:maxFrame])
		rest = rest[maxFrame:]
	}
	c.framer.WriteData(id, end, rest)
}

// until returns the first frame for which ok reports true, and fails if the connection ends before.
func (c *client) until(what string, ok func(frame) bool) frame {
	c.t.Helper()
	for f := range c.frames {
		if ok(f) {
			return f
		}
	}
	c.t.Fatalf("the connection ended before %s", what)
	return frame{}
}

// answer returns the messages of a stream up to its end, and the last header lines.
func (c *client) answer(id uint32) (messages []string, end map[string]string) {
	c.t.Helper()
	var data []byte
	c.until("the end of the stream", func(f frame) bool {
		if f.StreamID != id {
			return false
		}
		if f.Type == http2.FrameRSTStream {
			c.t.Fatalf("the stream was reset with %v", f.code)
		}
		data = append(data, f.data...)
		end = f.fields
		return f.Type == http2.FrameHeaders && f.Flags.Has(http2.FlagHeadersEndStream)
	})
	for len(data) >= messageHead {
		n := binary.BigEndian.Uint32(data[1:])
		messages = append(messages, string(data[messageHead:messageHead+n]))
		data = data[messageHead+n:]
	}
	return messages, end
}

// message returns the next message of a stream.
func (c *client) message(id uint32) string {
	c.t.Helper()
	var data []byte
	c.until("the message", func(f frame) bool {
		if f.StreamID == id {
			data = append(data, f.data...)
		}
		return len(data) >= messageHead && len(data)-messageHead >= int(binary.BigEndian.Uint32(data[1:]))
	})
	return string(data[messageHead:])
}

// ended waits until the server has closed the connection, and returns the code of GOAWAY, if there is
// one.
func (c *client) ended() (code http2.ErrCode, said bool) {
	for f := range c.frames {
		if f.Type == http2.FrameGoAway {
			code, said = f.code, true
		}
	}
	return code, said
}

func long(n int) string { return strings.Repeat("0123456789", n/10+1)[:n] }
