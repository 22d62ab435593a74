package grpcserver

import (
	"bytes"
	"io"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
)

// TestMessages: each message comes back as it was sent, however frames divide messages.
func TestMessages(t *testing.T) {
	texts := []string{"", "a", long(100), "", long(5000), long(70_000), long(300_000), "z"}
	var all []byte
	for _, text := range texts {
		all = append(all, framed(text)...)
	}
	for _, size := range []int{1, 3, 5, 1000, 16 << 10} {
		for _, padded := range []bool{false, true} {
			if size < 100 && padded {
				continue
			}
			t.Run(strconv.Itoa(size)+" "+strconv.FormatBool(padded), func(t *testing.T) {
				c := serve(t, nil).connect(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
				c.framer.WriteWindowUpdate(0, 1<<20)
				c.open(1, methodEcho, false)
				sent := all
				if size < 100 {
					sent = all[:len(all)-370_000-3*messageHead-1] // without the long ones
				}
				for rest := sent; len(rest) > 0; {
					n := min(size, len(rest))
					if n -= n / 100; padded {
						c.framer.WriteDataPadded(1, false, rest[:n], make([]byte, n/100))
					} else {
						c.framer.WriteData(1, false, rest[:n])
					}
					rest = rest[n:]
				}
				var got []byte
				c.until("the last message", func(f frame) bool { got = append(got, f.data...); return len(got) >= len(sent) })
				if !bytes.Equal(got, sent) {
					t.Error("the messages came back with a change")
				}
				c.framer.WriteData(1, true, nil)
				if _, end := c.answer(1); end["grpc-status"] != "0" {
					t.Errorf("the stream ended with %v", end)
				}
			})
		}
	}
}

// TestPingsBesideMessages: a client that pings after each message, as grpc-go's does, stays connected.
func TestPingsBesideMessages(t *testing.T) {
	c := serve(t, nil).connect(t)
	c.open(1, methodTaken, false)
	for range 3 * maxUseless {
		c.send(1, false, "")
		c.framer.WritePing(false, [8]byte{})
	}
	last := [8]byte{'l', 'a', 's', 't'}
	c.framer.WritePing(false, last)
	c.until("the answer to the last ping", func(f frame) bool { return f.Type == http2.FramePing && string(f.data) == string(last[:]) })
}

// TestRefusals: what a client does wrong, and what it gets.
func TestRefusals(t *testing.T) {
	const (
		goAway = "GOAWAY " // the connection ends with that code
		reset  = "RST_STREAM "
	)
	echoed := func(c *client) {
		c.open(1, methodEcho, false)
		c.send(1, false, "x")
	}
	many := func(send func(c *client)) func(*client) {
		return func(c *client) {
			for range 3 * maxUseless {
				send(c)
			}
		}
	}
	for name, tt := range map[string]struct {
		do   func(c *client)
		want string // of stream 1: the status, or a code
	}{
		"part of a message of no stream": {func(c *client) { c.framer.WriteData(0, false, []byte("x")) }, goAway + "PROTOCOL_ERROR"},
		"part of an idle stream":         {func(c *client) { c.send(1, false, "x") }, goAway + "PROTOCOL_ERROR"},
		"even id":                        {func(c *client) { c.open(2, methodEcho, false) }, goAway + "PROTOCOL_ERROR"},
		"smaller id":                     {func(c *client) { c.open(3, methodEcho, false); c.open(1, methodEcho, false) }, goAway + "PROTOCOL_ERROR"},
		"reset of an idle stream":        {func(c *client) { c.framer.WriteRSTStream(1, 0) }, goAway + "PROTOCOL_ERROR"},
		"window of an idle stream":       {func(c *client) { c.framer.WriteWindowUpdate(1, 1) }, goAway + "PROTOCOL_ERROR"},
		"window of 0 bytes":              {func(c *client) { c.framer.WriteWindowUpdate(0, 0) }, goAway + "PROTOCOL_ERROR"},
		"too large window":               {func(c *client) { c.framer.WriteWindowUpdate(0, 1<<31-1) }, goAway + "FLOW_CONTROL_ERROR"},
		"too large window of a stream":   {func(c *client) { echoed(c); c.framer.WriteWindowUpdate(1, 1<<31-1) }, reset + "FLOW_CONTROL_ERROR"},
		"too large window by settings": {func(c *client) {
			echoed(c)
			c.framer.WriteWindowUpdate(1, 1<<31-1-initialWindow)
			c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})
		}, goAway + "FLOW_CONTROL_ERROR"},
		"invalid settings": {func(c *client) {
			c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 31})
		}, goAway + "FLOW_CONTROL_ERROR"},
		"settings twice": {func(c *client) {
			s := http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1}
			c.framer.WriteSettings(s, s)
		}, goAway + "PROTOCOL_ERROR"},
		"long frame": {func(c *client) { c.framer.WriteRawFrame(http2.FramePing, 0, 0, make([]byte, maxFrame+1)) }, goAway + "FRAME_SIZE_ERROR"},
		"push": {func(c *client) {
			c.framer.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, EndHeaders: true})
		}, goAway + "PROTOCOL_ERROR"},
		"continuation":      {func(c *client) { c.framer.WriteContinuation(1, true, nil) }, goAway + "PROTOCOL_ERROR"},
		"no padding length": {func(c *client) { echoed(c); c.framer.WriteRawFrame(http2.FrameData, http2.FlagDataPadded, 1, nil) }, goAway + "FRAME_SIZE_ERROR"},
		"too much padding": {func(c *client) {
			echoed(c)
			c.framer.WriteRawFrame(http2.FrameData, http2.FlagDataPadded, 1, []byte{2, 0})
		}, goAway + "PROTOCOL_ERROR"},
		"broken header block": {func(c *client) {
			c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0xff, 0xff, 0xff, 0xff, 0xff}, EndHeaders: true})
		}, goAway + "COMPRESSION_ERROR"},
		"endless header block": {endlessBlock([]byte("x")), goAway + "ENHANCE_YOUR_CALM"},
		"empty header blocks":  {endlessBlock(nil), goAway + "ENHANCE_YOUR_CALM"},
		"pings":                {many(func(c *client) { c.framer.WritePing(false, [8]byte{}) }), goAway + "ENHANCE_YOUR_CALM"},
		"settings":             {many(func(c *client) { c.framer.WriteSettings() }), goAway + "ENHANCE_YOUR_CALM"},
		"priorities":           {many(func(c *client) { c.framer.WritePriority(1, http2.PriorityParam{}) }), goAway + "ENHANCE_YOUR_CALM"},
		"unknown frames":       {many(func(c *client) { c.framer.WriteRawFrame(99, 0, 0, nil) }), goAway + "ENHANCE_YOUR_CALM"},
		"empty parts":          {func(c *client) { echoed(c); many(func(c *client) { c.framer.WriteData(1, false, nil) })(c) }, goAway + "ENHANCE_YOUR_CALM"},
		"streams that are reset": {func(c *client) {
			for id := uint32(1); id < 2000; id += 2 {
				c.open(id, methodEcho, false)
				c.framer.WriteRSTStream(id, http2.ErrCodeCancel)
			}
		}, goAway + "ENHANCE_YOUR_CALM"},
		"streams of no method": {func(c *client) {
			for id := uint32(1); id < 6*maxUseless; id += 2 {
				c.open(id, "/x", false)
			}
		}, goAway + "ENHANCE_YOUR_CALM"},
		"line of a connection": {func(c *client) { c.open(1, methodEcho, false, "connection", "close") }, reset + "PROTOCOL_ERROR"},
		"name in capitals":     {func(c *client) { c.open(1, methodEcho, false, "X-Y", "z") }, reset + "PROTOCOL_ERROR"},
		"te":                   {func(c *client) { c.open(1, methodEcho, false, "te", "gzip") }, reset + "PROTOCOL_ERROR"},
		"no path":              {func(c *client) { c.open(1, "-", false) }, reset + "PROTOCOL_ERROR"},
		"timeout":              {func(c *client) { c.open(1, methodEcho, false, "grpc-timeout", "1x") }, reset + "PROTOCOL_ERROR"},
		"another HTTP method":  {func(c *client) { c.open(1, methodEcho, false, ":method", "GET") }, "405"},
		"another content type": {func(c *client) { c.open(1, methodEcho, false, "content-type", "application/grpcx") }, "415"},
		"no such method":       {func(c *client) { c.open(1, "/x", false) }, "12"},
		"much metadata":        {func(c *client) { c.open(1, methodEcho, false, "x", long(maxMetadata-1000), "y", long(1000)) }, "8"},
		"compressed": {func(c *client) {
			c.open(1, methodEcho, false)
			c.framer.WriteData(1, false, []byte{1, 0, 0, 0, 1, 'x'})
		}, "12"},
		"long message":       {func(c *client) { c.open(1, methodEcho, false); c.framer.WriteData(1, false, []byte{0, 0, 16, 0, 1}) }, "8"},
		"long later message": {func(c *client) { echoed(c); c.framer.WriteData(1, false, []byte{0, 0, 16, 0, 1}) }, "8"},
		"no message":         {func(c *client) { c.open(1, methodEcho, true) }, "0"},
		"no message, later":  {func(c *client) { c.open(1, methodEcho, false); c.framer.WriteData(1, true, nil) }, "0"},
		"half a message":     {func(c *client) { c.open(1, methodEcho, false); c.framer.WriteData(1, true, []byte{0, 0, 0, 0, 2, 'x'}) }, "13"},
		"a second head":      {func(c *client) { echoed(c); c.open(1, methodEcho, false) }, reset + "PROTOCOL_ERROR"},
		"trailers": {func(c *client) {
			echoed(c)
			c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndStream: true, EndHeaders: true})
		}, "0"},
		"part after the end": {func(c *client) { c.open(1, methodEcho, true); c.send(1, false, "x") }, reset + "STREAM_CLOSED"},
		"part beyond the window": {func(c *client) {
			c.open(1, methodTaken, false)
			c.framer.WriteData(1, false, []byte{0, 0, 0x0f, 0xff, 0xff})
			for range 70 {
				c.framer.WriteData(1, false, make([]byte, maxFrame))
			}
		}, reset + "FLOW_CONTROL_ERROR"},
	} {
		t.Run(name, func(t *testing.T) {
			c := serve(t, nil).connect(t)
			done := make(chan struct{})
			go func() { // ends with the connection, because the server may read no more
				defer close(done)
				tt.do(c)
			}()
			defer func() { c.Close(); <-done }()
			got := ""
			c.until("the answer "+tt.want, func(f frame) bool {
				switch {
				case f.Type == http2.FrameGoAway:
					got = goAway + f.code.String()
				case f.StreamID == 1 && f.Type == http2.FrameRSTStream:
					got = reset + f.code.String()
				case f.StreamID == 1 && f.Type == http2.FrameHeaders && ends(f):
					if got = f.fields["grpc-status"]; got == "" {
						got = f.fields[":status"]
					}
				}
				return got == tt.want || f.Type == http2.FrameGoAway
			})
			if got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
			if strings.HasPrefix(tt.want, goAway) {
				for range c.frames { // the server closes the connection
				}
			}
		})
	}
}

// TestMalformedHead: the messages of a stream with a malformed head are ignored, and other streams go on.
func TestMalformedHead(t *testing.T) {
	c := serve(t, nil).connect(t)
	c.open(1, methodEcho, false, "X-Y", "z")
	c.send(1, true, "x")
	c.open(3, methodEcho, false)
	c.send(3, false, "y")
	if got := c.message(3); got != "y" {
		t.Errorf("got %q", got)
	}
}

// TestTooManyStreams: a client that opens more streams than the server accepts.
func TestTooManyStreams(t *testing.T) {
	c := serve(t, func(o *Options) { o.MaxStreams = 2 }).connect(t)
	for id := uint32(1); id <= 5; id += 2 {
		c.open(id, methodEcho, false)
	}
	if f := c.until("a reset", func(f frame) bool { return f.Type == http2.FrameRSTStream }); f.StreamID != 5 || f.code != http2.ErrCodeRefusedStream {
		t.Errorf("got %+v", f)
	}
	c.framer.WriteData(3, true, nil)
	if _, end := c.answer(3); end["grpc-status"] != "0" {
		t.Errorf("the stream ended with %v", end)
	}
	c.open(7, methodEcho, false)
	c.send(7, false, "x")
	if got := c.message(7); got != "x" {
		t.Errorf("got %q", got)
	}
}

// ends reports whether a frame ends its stream.
func ends(f frame) bool { return f.Flags.Has(http2.FlagHeadersEndStream) }

// endlessBlock sends header lines that never end, in many frames.
func endlessBlock(part []byte) func(*client) {
	return func(c *client) {
		c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.head(methodEcho)})
		for range 20_000 {
			if c.framer.WriteContinuation(1, false, part) != nil {
				return
			}
		}
	}
}

// TestBegin: what a client may send first, and when.
func TestBegin(t *testing.T) {
	for name, tt := range map[string]struct {
		first string
		code  http2.ErrCode // of GOAWAY
		said  bool
		after time.Duration
	}{
		"nothing":        {"", 0, false, handshakeTimeout},
		"a part":         {http2.ClientPreface[:10], 0, false, handshakeTimeout},
		"no settings":    {http2.ClientPreface, 0, false, handshakeTimeout},
		"HTTP/1.1":       {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 0, false, 0},
		"another frame":  {http2.ClientPreface + "\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678", http2.ErrCodeProtocol, true, 0},
		"acknowledgment": {http2.ClientPreface + "\x00\x00\x00\x04\x01\x00\x00\x00\x00", http2.ErrCodeProtocol, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := serve(t, nil).dial(t)
				began := time.Now()
				io.WriteString(c, tt.first)
				if code, said := c.ended(); code != tt.code || said != tt.said {
					t.Errorf("got %v, %t", code, said)
				}
				if took := time.Since(began); took != tt.after {
					t.Errorf("the connection ended after %v", took)
				}
			})
		})
	}
}
