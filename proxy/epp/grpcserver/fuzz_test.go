package grpcserver

import (
	"bytes"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// FuzzConnection: whatever a client sends after the begin of HTTP/2, the server goes on serving another
// client, and nothing is left at the end.
func FuzzConnection(f *testing.F) {
	record := func(do func(c *client)) {
		var b bytes.Buffer
		c := &client{framer: http2.NewFramer(&b, nil)}
		c.framer.AllowIllegalWrites = true
		c.encode = newEncoder(c)
		do(c)
		f.Add(b.Bytes())
	}
	record(func(c *client) { c.open(1, methodEcho, false); c.send(1, false, "x"); c.send(1, true, "y") })
	record(func(c *client) {
		c.open(1, methodOne, false)
		c.framer.WriteDataPadded(1, true, framed("x"), []byte{0})
	})
	record(func(c *client) { c.open(1, methodEcho, false); c.framer.WriteRSTStream(1, 8); c.send(1, true, "x") })
	record(func(c *client) {
		c.framer.WriteSettings(http2.Setting{ID: 4, Val: 1})
		c.framer.WritePing(false, [8]byte{})
	})
	record(func(c *client) { c.framer.WriteWindowUpdate(0, 1); c.open(1, "/x", true, "grpc-timeout", "1n") })
	record(func(c *client) {
		head := c.head(methodEcho)
		c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head[:9]})
		c.framer.WriteContinuation(1, true, head[9:])
		c.framer.WritePriority(1, http2.PriorityParam{StreamDep: 1})
		c.framer.WriteGoAway(0, 0, nil)
	})
	f.Fuzz(func(t *testing.T, raw []byte) {
		s := serve(t, func(o *Options) { o.Memory.SetLimit(1 << 20) })
		c := s.connect(t)
		go func() { // ends with the connection
			c.Write(raw)
			c.Close()
		}()
		c.ended()
		other := s.connect(t)
		other.open(1, methodOne, false)
		other.send(1, true, "x")
		if messages, _ := other.answer(1); len(messages) != 1 {
			t.Errorf("got %q", messages)
		}
	})
}

// FuzzAssembly: messages arrive as they were sent, however the frames divide them.
func FuzzAssembly(f *testing.F) {
	f.Add([]byte("first"), []byte(""), []byte("\x01\x05\xff"))
	f.Add(bytes.Repeat([]byte("x"), 20_000), []byte("second"), []byte{200, 1, 1, 1})
	f.Fuzz(func(t *testing.T, first, second, cuts []byte) {
		c := serve(t, nil).connect(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 24})
		c.framer.WriteWindowUpdate(0, 1<<24)
		c.open(1, methodEcho, false)
		all := append(framed(string(first)), framed(string(second))...)
		if len(first)+len(second) > 1<<19 {
			return
		}
		for rest := all; len(rest) > 0; {
			n := len(rest)
			if len(cuts) > 0 {
				n, cuts = min(n, 1+int(cuts[0])), cuts[1:]
			}
			n = min(n, maxFrame)
			c.framer.WriteData(1, false, rest[:n])
			rest = rest[n:]
		}
		var got []byte
		c.until("the last message", func(f frame) bool { got = append(got, f.data...); return len(got) >= len(all) })
		if !bytes.Equal(got, all) {
			t.Error("the messages came back with a change")
		}
	})
}

// FuzzTimeout: a timeout is positive, or refused.
func FuzzTimeout(f *testing.F) {
	for _, text := range []string{"1H", "99999999H", "0S", "1m", "12u", "7n", "", "S", "-1S", "123456789S"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if d := timeoutOf(text); d < 0 {
			t.Errorf("%q is %v", text, d)
		}
	})
}

// TestTimeouts: the units of grpc-timeout.
func TestTimeouts(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"1H": time.Hour, "2M": 2 * time.Minute, "3S": 3 * time.Second, "4m": 4 * time.Millisecond, "5u": 5 * time.Microsecond, "6n": 6,
		"0S": 1, "99999999H": 1<<63 - 1, "": 0, "S": 0, "1": 0, "1x": 0, "-1S": 0, "+1S": 0, "123456789S": 0,
	} {
		if got := timeoutOf(text); got != want {
			t.Errorf("%q is %v, want %v", text, got, want)
		}
	}
}
