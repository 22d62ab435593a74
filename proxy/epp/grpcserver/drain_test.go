package grpcserver

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
)

// goAway waits for the next GOAWAY.
func (c *client) goAway() frame {
	c.t.Helper()
	return c.until("GOAWAY", func(f frame) bool { return f.Type == http2.FrameGoAway })
}

// TestDrain: the client is told twice that it shall open no more streams. Streams that it opens before
// it can know are served, later ones are refused, and the connection ends with the last stream.
func TestDrain(t *testing.T) {
	for _, acknowledged := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			s := serve(t, nil)
			c := s.connect(t)
			c.open(1, methodEcho, false)
			c.send(1, false, "x")
			c.message(1)
			synctest.Wait()
			s.Drain()
			if f := c.goAway(); f.last != maxStream || f.code != http2.ErrCodeNo {
				t.Fatalf("got %+v", f)
			}
			ping := c.until("a ping", func(f frame) bool { return f.Type == http2.FramePing })
			c.open(3, methodEcho, false)
			c.send(3, false, "y")
			if got := c.message(3); got != "y" {
				t.Errorf("got %q", got)
			}
			began := time.Now()
			if acknowledged {
				c.framer.WritePing(true, [8]byte(ping.data))
			}
			if f := c.goAway(); f.last != 3 || f.code != http2.ErrCodeNo {
				t.Fatalf("got %+v", f)
			}
			if took := time.Since(began); took > goAwayTimeout+period || acknowledged && took != 0 {
				t.Errorf("the second GOAWAY came after %v", took)
			}
			c.open(5, methodEcho, false)
			if f := c.until("a reset", func(f frame) bool { return f.Type == http2.FrameRSTStream }); f.StreamID != 5 || f.code != http2.ErrCodeRefusedStream {
				t.Errorf("got %+v", f)
			}
			for id := uint32(1); id <= 3; id += 2 {
				c.send(id, false, "z")
				if got := c.message(id); got != "z" {
					t.Errorf("got %q", got)
				}
				c.framer.WriteData(id, true, nil)
				c.answer(id)
			}
			c.ended()
		})
	}
}

// TestDrainWithoutStreams: connections without streams end at once. A client that has just connected may
// begin and send a stream.
func TestDrainWithoutStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, nil)
		silent, late, begun := s.dial(t), s.dial(t), s.connect(t)
		synctest.Wait()
		began := time.Now()
		s.Drain()
		begun.framer.WritePing(true, drainPing)
		begun.ended()
		if time.Since(began) != 0 {
			t.Error("a connection without streams stays")
		}
		time.Sleep(beginTimeout / 2)
		late.hello()
		late.open(1, methodOne, false)
		late.send(1, true, "x")
		if messages, _ := late.answer(1); len(messages) != 1 {
			t.Errorf("got %q", messages)
		}
		silent.ended()
		if took := time.Since(began); took != beginTimeout {
			t.Errorf("a connection without a begin ended after %v", took)
		}
		time.Sleep(goAwayTimeout / 2) // longer than the limit of the handshake
		late.open(3, methodOne, false)
		late.send(3, true, "y")
		if messages, _ := late.answer(3); len(messages) != 1 {
			t.Errorf("got %q", messages)
		}
	})
}

// TestCut: all streams end, with a handler and without.
func TestCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, nil)
		c := s.connect(t)
		c.open(1, methodTaken, false)
		c.send(1, false, "x")
		<-s.began
		c.open(3, methodEcho, false)
		synctest.Wait()
		s.Cut(io.EOF)
		for range 2 {
			c.until("the end of a stream", func(f frame) bool { return f.Type == http2.FrameHeaders && ends(f) })
		}
		c.open(5, methodTaken, false)
		c.send(5, false, "x")
		if st := <-s.began; context.Cause(st.Context()) != io.EOF {
			t.Error("a later stream goes on")
		}
		c.answer(5)
	})
}

// TestSilence: a client that sends nothing is asked, and its connection ends if it does not answer.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := serve(t, nil).connect(t)
		c.until("the settings", func(f frame) bool { return f.Type == http2.FrameSettings && f.Flags.Has(http2.FlagSettingsAck) })
		began := time.Now()
		ping := func() {
			t.Helper()
			c.until("a ping", func(f frame) bool { return f.Type == http2.FramePing })
			if took := time.Since(began); took < pingAfter || took > pingAfter+period {
				t.Errorf("the ping came after %v", took)
			}
		}
		for range 3 {
			ping()
			c.framer.WritePing(true, [8]byte{})
			synctest.Wait()
			began = time.Now()
		}
		ping()
		c.ended()
		if took := time.Since(began); took < pingAfter+pingTimeout || took > pingAfter+pingTimeout+period {
			t.Errorf("the connection ended after %v", took)
		}
	})
}

// deaf opens a connection whose client sends, and reads nothing.
func deaf(t *testing.T, s *served) *client {
	nc, err := s.listener.Dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	c := &client{Conn: nc, t: t, framer: http2.NewFramer(nc, nil)}
	c.encode = newEncoder(c)
	return c
}

// TestDeafClient: a client that reads nothing, while it sends, gets no more memory than the limit, and
// its connection ends.
func TestDeafClient(t *testing.T) {
	for name, send := range map[string]func(c *client, n int) error{
		"messages": func(c *client, n int) error {
			return c.framer.WriteData(1, false, framed(long(1000)))
		},
		"pings": func(c *client, n int) error {
			time.Sleep(2 * time.Millisecond)
			return c.framer.WritePing(false, [8]byte{})
		},
		"streams that have ended": func(c *client, n int) error {
			c.open(uint32(2*n+3), methodOne, false)
			c.framer.WriteRSTStream(uint32(2*n+3), http2.ErrCodeCancel)
			time.Sleep(20 * time.Millisecond)
			return c.framer.WriteData(uint32(2*n+3), false, []byte("x"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := serve(t, nil)
				c := deaf(t, s)
				c.hello(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})
				c.framer.WriteWindowUpdate(0, 1<<30)
				c.open(1, methodEcho, false)
				began := time.Now()
				for n := 0; send(c, n) == nil; n++ {
					time.Sleep(time.Millisecond)
				}
				if took := time.Since(began); took > writeTimeout+2*period {
					t.Errorf("the connection ended after %v", took)
				}
				for s.Connected() {
					time.Sleep(time.Millisecond)
				}
			})
		})
	}
}

// TestFirstMessage: a stream ends if its first message does not arrive, whole and in time.
func TestFirstMessage(t *testing.T) {
	for name, part := range map[string][]byte{"nothing": nil, "half a head": {0, 0}, "half a message": {0, 0, 0, 0, 9, 'x'}} {
		for _, method := range []string{methodEcho, methodOne} {
			synctest.Test(t, func(t *testing.T) {
				c := serve(t, nil).connect(t)
				c.open(1, method, false)
				if part != nil {
					c.framer.WriteData(1, false, part)
				}
				began := time.Now()
				if _, end := c.answer(1); end["grpc-status"] != "4" {
					t.Errorf("%s %s: got %v", method, name, end)
				}
				if took := time.Since(began); took < 10*time.Second || took > 10*time.Second+period {
					t.Errorf("%s %s: the stream ended after %v", method, name, took)
				}
			})
		}
	}
}
