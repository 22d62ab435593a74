package grpcserver

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestWindows: a message goes out as the client's windows allow, whichever window has no room.
func TestWindows(t *testing.T) {
	for name, tt := range map[string]struct {
		initial uint32
		length  int
		first   int // bytes that arrive at once
		grant   func(c *client, n uint32)
	}{
		"stream":     {5, 60_000, 5, func(c *client, n uint32) { c.framer.WriteWindowUpdate(1, n) }},
		"connection": {1 << 20, 600_000, initialWindow, func(c *client, n uint32) { c.framer.WriteWindowUpdate(0, n) }},
		"settings": {0, 60_000, 0, func(c *client, n uint32) {
			c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: n})
		}},
		"smaller settings": {10_000, 60_000, 10_000, func(c *client, n uint32) {
			c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			c.framer.WriteWindowUpdate(1, n)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := serve(t, nil).connect(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: tt.initial})
				c.open(1, methodEcho, false)
				text := framed(long(tt.length))
				for rest := text; len(rest) > 0; rest = rest[min(maxFrame, len(rest)):] {
					c.framer.WriteData(1, false, rest[:min(maxFrame, len(rest))])
				}
				first := c.arrived()
				if len(first) != tt.first {
					t.Errorf("%d bytes arrived first", len(first))
				}
				tt.grant(c, uint32(len(text)))
				if got := append(first, c.arrived()...); !bytes.Equal(got, text) {
					t.Errorf("%d bytes arrived of %d, or they have changed", len(got), len(text))
				}
			})
		})
	}
}

// arrived returns the bytes of messages that have arrived, in simulated time.
func (c *client) arrived() (data []byte) {
	for {
		synctest.Wait()
		select {
		case f, open := <-c.frames:
			if !open {
				return data
			}
			data = append(data, f.data...)
		default:
			return data
		}
	}
}

// TestLongMessages: a client that obeys its windows can send a message that is longer than a window, and
// later ones.
func TestLongMessages(t *testing.T) {
	const length = 3*window + 5
	c := serve(t, func(o *Options) { o.MaxMessage = length }).connect(t)
	c.open(1, methodTaken, false)
	room := int64(0)
	more := func() {
		for room <= 0 {
			f := c.until("a larger window", func(f frame) bool { return f.StreamID == 1 && f.Type == http2.FrameWindowUpdate })
			room += int64(f.more)
		}
	}
	room = window
	for range 5 {
		for rest := framed(long(length)); len(rest) > 0; {
			more()
			n := min(maxFrame, len(rest), int(room))
			c.framer.WriteData(1, false, rest[:n])
			room -= int64(n)
			rest = rest[n:]
		}
	}
	if room > 2*window {
		t.Errorf("the client may send %d bytes", room)
	}
}

// TestEndsOfContext: what ends the context of a request, and its cause.
func TestEndsOfContext(t *testing.T) {
	cut := errors.New("cut")
	for name, tt := range map[string]struct {
		lines []string
		end   func(s *served, c *client)
		want  error
	}{
		"the client ends its side":    {nil, func(_ *served, c *client) { c.framer.WriteData(1, true, nil) }, context.Canceled},
		"the client resets":           {nil, func(_ *served, c *client) { c.framer.WriteRSTStream(1, http2.ErrCodeCancel) }, context.Canceled},
		"the connection ends":         {nil, func(_ *served, c *client) { c.Close() }, context.Canceled},
		"the client sends garbage":    {nil, func(_ *served, c *client) { c.Write(make([]byte, 100)) }, context.Canceled},
		"the client falls silent":     {nil, func(*served, *client) {}, context.Canceled},
		"the client's time is over":   {[]string{"grpc-timeout", "5S"}, func(*served, *client) {}, context.DeadlineExceeded},
		"the server cuts":             {nil, func(s *served, _ *client) { s.Cut(cut) }, cut},
		"a message is too long":       {nil, func(_ *served, c *client) { c.framer.WriteData(1, false, []byte{0, 0xff, 0, 0, 0}) }, context.Canceled},
		"half a message, then silent": {nil, func(_ *served, c *client) { c.framer.WriteData(1, false, []byte{0, 0, 0, 0, 9, 'x'}) }, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := serve(t, nil)
				c := s.connect(t)
				c.open(1, methodTaken, false, tt.lines...)
				c.send(1, false, "x")
				st := <-s.began
				synctest.Wait()
				if err := st.Context().Err(); err != nil {
					t.Fatal(err)
				}
				go tt.end(s, c) // the server may read no more
				<-st.Context().Done()
				if err := context.Cause(st.Context()); err != tt.want {
					t.Errorf("the cause is %v, want %v", err, tt.want)
				}
			})
		})
	}
}

// TestEarlyEnd: the client has sent its message and has ended its side at once. The method without
// requests answers, and the request has the message and an ended context.
func TestEarlyEnd(t *testing.T) {
	s := serve(t, nil)
	c := s.connect(t)
	c.open(1, methodOne, false)
	c.send(1, true, "x")
	if messages, end := c.answer(1); len(messages) != 1 || messages[0] != "x" || end["grpc-status"] != "0" {
		t.Errorf("got %q, %v", messages, end)
	}
	c.open(3, methodEcho, false)
	c.send(3, true, "x")
	if messages, end := c.answer(3); len(messages) != 1 || end["grpc-status"] != "0" {
		t.Errorf("got %q, %v", messages, end)
	}
}

// TestOneWrite: messages with more, and the end of a stream, leave in one write.
func TestOneWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, func(o *Options) {
			o.Methods[methodEcho] = Method{Request: true, Serve: func(s *Stream) error {
				for range 3 {
					if err := s.Send(true, Parts{[]byte("x")}); err != nil {
						return err
					}
				}
				return status.Error(codes.NotFound, "50 % ü\n"+strings.Repeat("x", maxText))
			}}
		})
		c := s.connect(t)
		synctest.Wait()
		before := s.writes.Load()
		c.open(1, methodEcho, false)
		c.send(1, false, "x")
		messages, end := c.answer(1)
		synctest.Wait()
		if n := s.writes.Load() - before; n != 1 {
			t.Errorf("%d writes", n)
		}
		if len(messages) != 3 || end["grpc-status"] != "5" || !strings.HasPrefix(end["grpc-message"], "50 %25 %C3%BC%0Axxx") {
			t.Errorf("got %q, %v", messages, end)
		}
	})
}
