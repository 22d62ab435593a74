package security

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/net/http2"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// holder keeps an attacker's connections open until the attack is over. It is
// safe for concurrent use.
type holder struct {
	mu   sync.Mutex
	ends []func()
}

func (h *holder) add(end func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ends = append(h.ends, end)
}

func (h *holder) len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.ends)
}

func (h *holder) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, end := range h.ends {
		end()
	}
	h.ends = nil
}

// announce opens n requests over one protocol that announce a body of size bytes and
// send one byte of it. The proxy may refuse some.
func (h *holder) announce(a attacker, major, n, size int) {
	length := fmt.Sprint(size)
	switch major {
	case 1:
		testbed.Parallel(n, 16, func(int) {
			c, err := a.dial("http/1.1")
			if err != nil {
				return
			}
			h.add(func() { c.Close() })
			c.SetWriteDeadline(time.Now().Add(5 * time.Second))
			io.WriteString(c, postLine+"Content-Length: "+length+"\r\n\r\n{")
		})
	case 2:
		for ; n > 0; n -= 100 {
			c, err := a.http2()
			if err != nil {
				return
			}
			h.add(func() { c.Close() })
			go c.drain()
			c.SetWriteDeadline(time.Now().Add(5 * time.Second))
			for range min(n, 100) {
				c.mu.Lock()
				if id, err := c.open(false, post2("content-length", length)...); err == nil {
					c.framer.WriteData(id, false, []byte("{"))
				}
				c.mu.Unlock()
			}
		}
	case 3:
		c, err := a.http3()
		if err != nil {
			return
		}
		h.add(func() { c.CloseWithError(0, "") })
		begun := append(head3(post2("content-length", length)...), frame3(dataFrame, []byte("{"))...)
		for range n {
			s, err := stream3(c, 300*time.Millisecond)
			if err != nil {
				return // no more streams are allowed
			}
			s.Write(begun)
		}
	}
}

// TestAnnouncedBodies: memory grows with received bytes, not with announced
// ones. The control announces two bytes: it measures the memory of its
// connections and handshakes. With GOGC=50 their garbage stays below the limit; with the
// default it varies by more than 20 MiB between two collections.
func TestAnnouncedBodies(t *testing.T) {
	t.Parallel()
	for _, secure := range []bool{false, true} {
		e := newFakeEngine(t)
		p := startProxy(t, setup{secure: secure, sections: e.section("both", "none"), env: []string{"GOGC=50"}})
		announce := func(major, size int) {
			var held holder
			defer held.release()
			held.announce(p.attacker(), major, 200, size)
			time.Sleep(300 * time.Millisecond) // for the proxy to read the heads; no metric counts them
		}
		p.serves("before the announcements")
		for _, major := range p.majors() {
			what := fmt.Sprintf("200 announced bodies over HTTP/%d, TLS %t", major, secure)
			for range times(2, 8) {
				announce(major, 2)
			}
			p.wantGrowth(what, 20, func() {
				for range times(2, 8) {
					announce(major, 16<<20)
				}
			})
		}
		p.serves("after the announcements")
		p.nothingLeft()
	}
}

// TestLargeBodies is the control: bodies of the announced size are served.
func TestLargeBodies(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{secure: true, sections: e.section("both", "none")})
	for _, major := range p.majors() {
		c := p.client(major, "127.0.0.1")
		if err := c.ask(strings.Repeat("large ", 2<<20), false); err != nil { // 12 MiB
			t.Errorf("HTTP/%d: %.300v", major, err)
		}
		c.close()
	}
	p.nothingLeft()
}

// TestBodiesThatDoNotCome: requests whose bodies do not arrive take no place
// from others, for any number of streams or connections of one client.
func TestBodiesThatDoNotCome(t *testing.T) {
	t.Parallel()
	for _, secure := range []bool{false, true} {
		e := newFakeEngine(t)
		p := startProxy(t, setup{secure: secure, sections: e.section("both", "none") + "[limits]\nmax_exchanges = 50\nqueue = 10\nqueue_timeout = \"1s\"\n"})
		for _, major := range p.majors() {
			var held holder
			held.announce(p.attacker(), major, 250, 100)
			p.serves(fmt.Sprintf("during 250 incomplete bodies over HTTP/%d", major))
			held.release()
		}
		p.nothingLeft()
	}
}

// TestStreamsOfOneConnection opens as many HTTP/3 streams as the proxy allows, up to
// as many as there are places for exchanges.
func TestStreamsOfOneConnection(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{secure: true, sections: e.section("both", "none") + "[limits]\nqueue_timeout = \"1s\"\n"})
	var held holder
	p.wantGrowth("10,000 streams of one connection", 100, func() {
		held.announce(p.attacker(), 3, 10000, 100)
		time.Sleep(time.Second) // for the proxy to read the heads; no metric counts them
		p.serves("during 10,000 streams of one connection")
	})
	held.release()
	p.nothingLeft()
}

// TestResets opens requests and resets them at once.
func TestResets(t *testing.T) {
	t.Parallel()
	n := times(3000, 20000)
	for _, secure := range []bool{false, true} {
		e := newFakeEngine(t)
		p := startProxy(t, setup{secure: secure, sections: e.section("both", "none")})
		p.serves("before the resets")
		p.wantGrowth("resets over HTTP/2", 96, func() { mustReset(t, reset2, p.attacker(), n) })
		if secure {
			p.wantGrowth("resets over HTTP/3", 96, func() { mustReset(t, reset3, p.attacker(), n) })
		}
		p.serves("after the resets")
		p.nothingLeft()
	}
}

func mustReset(t *testing.T, reset func(a attacker, n int) error, a attacker, n int) {
	t.Helper()
	if err := reset(a, n); err != nil {
		t.Errorf("the attacker has no connection: %v", err)
	}
}

// reset2 resets n requests of one connection. The error is that of opening the connection:
// the proxy may refuse it, or close it before a slow attacker has sent its first bytes.
func reset2(a attacker, n int) error {
	c, err := a.http2()
	if err != nil {
		return err
	}
	defer c.Close()
	go c.drain()
	c.SetWriteDeadline(time.Now().Add(20 * time.Second))
	for range n {
		c.mu.Lock()
		id, err := c.open(false, post2()...)
		if err == nil {
			c.framer.WriteData(id, true, []byte(chat("reset", false)))
			err = c.framer.WriteRSTStream(id, http2.ErrCodeCancel)
		}
		c.mu.Unlock()
		if err != nil {
			break // the proxy has closed the connection
		}
	}
	return nil
}

// reset3 is reset2 over HTTP/3.
func reset3(a attacker, n int) error {
	c, err := a.http3()
	if err != nil {
		return err
	}
	defer c.CloseWithError(0, "")
	request := append(head3(post2()...), frame3(dataFrame, []byte(chat("reset", false)))...)
	var open []*quic.Stream
	for range n {
		s, err := stream3(c, 2*time.Second)
		if err != nil {
			break
		}
		s.Write(request)
		if open = append(open, s); len(open) == 50 {
			for _, s := range open {
				s.CancelWrite(0x10c)
				s.CancelRead(0x10c)
			}
			open = open[:0]
		}
	}
	return nil
}

// frameFloods write one frame of a flood each.
var frameFloods = []struct {
	name  string
	write func(c *rawHTTP2, n int) error
}{
	{"ping", func(c *rawHTTP2, _ int) error { return c.framer.WritePing(false, [8]byte{1}) }},
	{"settings", func(c *rawHTTP2, n int) error {
		return c.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(n % 65535)})
	}},
	{"empty data", func(c *rawHTTP2, n int) error {
		if n == 0 {
			_, err := c.open(false, post2()...)
			return err
		}
		return c.framer.WriteData(1, false, nil)
	}},
	{"priority", func(c *rawHTTP2, n int) error {
		return c.framer.WritePriority(uint32(n*2+1), http2.PriorityParam{StreamDep: uint32(n * 2), Weight: 3})
	}},
	{"window", func(c *rawHTTP2, _ int) error { return c.framer.WriteWindowUpdate(0, 1) }},
	{"unknown frame", func(c *rawHTTP2, _ int) error { return c.framer.WriteRawFrame(0x77, 0, 0, make([]byte, 100)) }},
}

// TestFrameFloods sends frames that cost the client little.
func TestFrameFloods(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "none")})
	p.serves("before the floods")
	for _, flood := range frameFloods {
		p.wantGrowth(flood.name, 64, func() {
			c, err := p.attacker().http2()
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			go c.drain()
			c.SetWriteDeadline(time.Now().Add(10 * time.Second))
			for n := range times(5000, 50000) {
				c.mu.Lock()
				err := flood.write(c, n)
				c.mu.Unlock()
				if err != nil {
					break // the proxy ended the connection
				}
			}
		})
	}
	t.Run("CONTINUATION", func(t *testing.T) { continuationFlood(t, p) })
	p.serves("after the floods")
	p.nothingLeft()
}

// continuationFlood sends a head without an end: the proxy must end the connection.
func continuationFlood(t *testing.T, p *proxyProcess) {
	c, err := p.attacker().http2()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go c.drain()
	c.SetWriteDeadline(time.Now().Add(20 * time.Second))
	c.mu.Lock() // no other frame may come between
	defer c.mu.Unlock()
	c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.fields(post2()...)})
	fragment := c.fields("x-junk", strings.Repeat("z", 8000))
	for n := range 20000 { // 120 MB
		if err := c.framer.WriteContinuation(1, false, fragment); err != nil {
			if n > 5000 {
				t.Errorf("the proxy accepted %d CONTINUATION frames", n)
			}
			return
		}
	}
	t.Error("the proxy accepted every CONTINUATION frame")
}

// TestUnknownHTTP3Frames sends frames of unknown types on a request stream.
func TestUnknownHTTP3Frames(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{secure: true, sections: e.section("both", "none")})
	p.serves("before the frames")
	p.wantGrowth("unknown frames", 64, func() {
		c, err := p.attacker().http3()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.CloseWithError(0, "")
		s, err := stream3(c, 5*time.Second)
		if err != nil {
			t.Error(err)
			return
		}
		s.SetWriteDeadline(time.Now().Add(20 * time.Second))
		junk := frame3(0x21, make([]byte, 1000))
		for range times(10, 100) << 10 {
			if _, err := s.Write(junk); err != nil {
				return
			}
		}
	})
	p.serves("after the frames")
	p.nothingLeft()
}
