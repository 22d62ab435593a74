package security

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"
	"golang.org/x/net/http2"
)

// shortTimes are limits that make slow clients fail within seconds. The limit of idle
// connections stays long: a client that is in the middle of a head is not idle.
const shortTimes = "read_header_timeout = \"1s\"\nread_timeout = \"2s\"\n"

// tolerated is how long a slow client may last where the limits are short. Without their
// own limits the attacks of this file last for minutes.
const tolerated = 25 * time.Second

// slowAttack is one client that is slow. run returns when the proxy has ended the
// request or the connection, or after the time d with false.
type slowAttack struct {
	name   string
	secure bool // of the proxies with TLS; else of those without
	run    func(a attacker, d time.Duration) (ended bool, err error)
}

// ends reads until the connection ends.
func ends(c net.Conn, d time.Duration) bool {
	c.SetReadDeadline(time.Now().Add(d))
	_, err := io.Copy(io.Discard, c)
	return !isTimeout(err)
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

// drip writes a byte every period until a write fails or the time d has passed. It
// returns false in the latter case.
func drip(w io.Writer, piece []byte, period, d time.Duration) bool {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(period) {
		if _, err := w.Write(piece); err != nil {
			return true
		}
	}
	return false
}

// slowHead1 sends a head and then piece repeatedly.
func slowHead1(head string, piece []byte) func(attacker, time.Duration) (bool, error) {
	return func(a attacker, d time.Duration) (bool, error) {
		c, err := a.dial("http/1.1")
		if err != nil {
			return false, err
		}
		defer c.Close()
		io.WriteString(c, head)
		over := make(chan bool, 2)
		go func() { over <- ends(c, d) }()
		if piece != nil {
			go func() { over <- drip(c, piece, 200*time.Millisecond, d) }()
		}
		return <-over, nil
	}
}

// slow2 opens an HTTP/2 connection, does something, and waits until the stream or the
// connection ends. During the wait it sends piece again and again.
func slow2(begin func(*rawHTTP2), again func(*rawHTTP2) error) func(attacker, time.Duration) (bool, error) {
	return func(a attacker, d time.Duration) (bool, error) {
		c, err := a.http2()
		if err != nil {
			return false, err
		}
		defer c.Close()
		begin(c)
		stop := make(chan struct{})
		defer close(stop)
		go func() {
			for again != nil {
				select {
				case <-stop:
					return
				case <-time.After(200 * time.Millisecond):
				}
				if again(c) != nil {
					return
				}
			}
		}()
		c.SetReadDeadline(time.Now().Add(d))
		for {
			f, err := c.framer.ReadFrame()
			if err != nil {
				return !isTimeout(err), nil
			}
			if f.Header().StreamID != 0 && (f.Header().Type == http2.FrameHeaders || f.Header().Type == http2.FrameRSTStream) {
				return true, nil // an answer, which is an error, or a reset
			}
		}
	}
}

// slow3 is the same with one HTTP/3 stream.
func slow3(begin []byte, piece []byte) func(attacker, time.Duration) (bool, error) {
	return func(a attacker, d time.Duration) (bool, error) {
		c, err := a.http3()
		if err != nil {
			return false, err
		}
		defer c.CloseWithError(0, "")
		s, err := stream3(c, 5*time.Second)
		if err != nil {
			return false, err
		}
		s.Write(begin)
		s.SetReadDeadline(time.Now().Add(d))
		if piece != nil {
			go drip(s, piece, 200*time.Millisecond, d)
		}
		_, err = s.Read(make([]byte, 1))
		return !isTimeout(err), nil
	}
}

// slowAttacks are clients that never complete a request.
func slowAttacks() []slowAttack {
	never := quicvarint.Append(quicvarint.Append(nil, headersFrame), 60000) // the head of a frame
	var attacks []slowAttack
	add := func(name string, secure bool, run func(attacker, time.Duration) (bool, error)) {
		attacks = append(attacks, slowAttack{name, secure, run})
	}
	for _, secure := range []bool{false, true} {
		add("H1 silent", secure, slowHead1("", nil))
		add("H1 half a head", secure, slowHead1(postLine, nil))
		add("H1 head byte by byte", secure, slowHead1(postLine+"X: ", []byte("a")))
		add("H1 body that stops", secure, slowHead1(postLine+"Content-Length: 1000\r\n\r\n{", nil))
		add("H1 body byte by byte", secure, slowHead1(postLine+"Content-Length: 100000\r\n\r\n{", []byte(" ")))
		add("H1 chunks byte by byte", secure, slowHead1(postLine+chunked+"\r\n", []byte("1\r\n \r\n")))
		add("H1 trailer byte by byte", secure, slowHead1(postLine+chunked+"\r\n1\r\n{\r\n0\r\nX: ", []byte("a")))
		add("H2 head without an end", secure, slow2(func(c *rawHTTP2) {
			c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.fields(post2()...)})
		}, nil))
		add("H2 head in small CONTINUATION frames", secure, slow2(func(c *rawHTTP2) {
			c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: c.fields(post2()...)})
		}, func(c *rawHTTP2) error { return c.framer.WriteContinuation(1, false, c.fields("x", "y")) }))
		add("H2 half a HEADERS frame", secure, slow2(func(c *rawHTTP2) { c.Write([]byte{0, 0, 50, 1, 4, 0, 0, 0, 1, 0x82}) }, nil))
		add("H2 body that stops", secure, slow2(func(c *rawHTTP2) { c.open(false, post2("content-length", "1000")...) }, nil))
		add("H2 body byte by byte", secure, slow2(func(c *rawHTTP2) { c.open(false, post2()...) },
			func(c *rawHTTP2) error { return c.framer.WriteData(1, false, []byte(" ")) }))
	}
	add("H3 half a HEADERS frame", true, slow3(append(bytes.Clone(never), 0), nil))
	add("H3 HEADERS frame byte by byte", true, slow3(bytes.Clone(never), []byte{0}))
	add("H3 half a frame type", true, slow3([]byte{0x40}, nil))
	add("H3 unknown frames before the head", true, slow3(nil, frame3(0x21, []byte{0})))
	add("H3 body that stops", true, slow3(head3(post2("content-length", "1000")...), nil))
	add("H3 body byte by byte", true, slow3(head3(post2()...), frame3(dataFrame, []byte(" "))))
	return attacks
}

// TestSlowRequests runs every slow client at once, three times each.
func TestSlowRequests(t *testing.T) {
	t.Parallel()
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprint("TLS ", secure), func(t *testing.T) {
			t.Parallel()
			e := newFakeEngine(t)
			p := startProxy(t, setup{secure: secure, server: shortTimes, sections: e.section("both", "none")})
			var wg sync.WaitGroup
			for _, attack := range slowAttacks() {
				if attack.secure != secure {
					continue
				}
				for range 3 {
					wg.Go(func() {
						ended, err := attack.run(p.attacker(), tolerated)
						if !ended {
							t.Errorf("%s: the proxy still waits after %s, %v", attack.name, tolerated, err)
						}
					})
				}
			}
			p.serves("beside slow clients")
			wg.Wait()
			if n := len(e.with("")); n > 2*len(p.majors()) {
				t.Errorf("the engine received %d requests, more than those of the honest clients", n)
			}
			p.serves("after slow clients")
			p.nothingLeft()
		})
	}
}

// TestHTTP3Heads opens many streams whose heads do not come: the proxy must end them and
// free their resources, although the connection is kept alive.
func TestHTTP3Heads(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{secure: true, server: shortTimes, sections: e.section("both", "none")})
	c, err := p.attacker().http3()
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseWithError(0, "")
	never := append(quicvarint.Append(quicvarint.Append(nil, headersFrame), 60000), 0)
	var open []*quic.Stream
	for range times(1000, 10000) {
		s, err := stream3(c, 300*time.Millisecond)
		if err != nil {
			break // no more streams are allowed
		}
		s.Write(never)
		open = append(open, s)
	}
	p.serves("beside the streams")
	deadline := time.Now().Add(tolerated)
	waiting := 0
	for _, s := range open {
		s.SetReadDeadline(deadline)
		if _, err := s.Read(make([]byte, 1)); isTimeout(err) {
			waiting++
		}
	}
	if waiting > 0 {
		t.Errorf("%d of %d streams without a head are open after %s", waiting, len(open), tolerated)
	}
	p.nothingLeft() // while the connection is open
}

// TestBodyRate: a body that comes at one byte in each second is ended long before
// server.read_timeout, whose default is kept.
func TestBodyRate(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	p := startProxy(t, setup{secure: true, sections: e.section("both", "none")})
	var wg sync.WaitGroup
	for name, run := range map[string]func(attacker, time.Duration) (bool, error){
		"H1": slowHead1(postLine+"Content-Length: 100000\r\n\r\n{", []byte(" ")),
		"H2": slow2(func(c *rawHTTP2) { c.open(false, post2()...) },
			func(c *rawHTTP2) error { return c.framer.WriteData(1, false, []byte(" ")) }),
		"H3": slow3(head3(post2()...), frame3(dataFrame, []byte(" "))),
	} {
		wg.Go(func() {
			if ended, err := run(p.attacker(), tolerated); !ended {
				t.Errorf("%s: the proxy still reads the body after %s, %v", name, tolerated, err)
			}
		})
	}
	wg.Wait()
	p.nothingLeft()
}

// TestSlowReaders: clients that send requests and never read hold nothing for
// longer than server.write_timeout.
func TestSlowReaders(t *testing.T) {
	t.Parallel()
	e := newFakeEngine(t)
	large := jsonHead(8<<20) + goodAnswer + string(bytes.Repeat([]byte(" "), 8<<20-len(goodAnswer)))
	e.act = func(c net.Conn, r received) bool {
		if bytes.Contains([]byte(r.body), []byte("large answer")) {
			io.WriteString(c, large)
		} else {
			answerWell(c, r)
		}
		return false
	}
	for _, secure := range []bool{false, true} {
		p := startProxy(t, setup{secure: secure, server: "write_timeout = \"1s\"\nidle_timeout = \"2s\"\n", sections: e.section("both", "none")})
		var held holder
		for range 20 {
			pipeline(&held, p.attacker())
			closedWindow(&held, p.attacker())
			unread(&held, p.attacker())
		}
		p.serves("during connections of clients that do not read")
		p.nothingLeft() // while the clients are connected
		held.release()
	}
}

// pipeline requests the list of models repeatedly and reads no answer.
func pipeline(held *holder, a attacker) {
	c, err := a.dial("http/1.1")
	if err != nil {
		return
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		tcp.SetReadBuffer(4096)
	}
	held.add(func() { c.Close() })
	go func() {
		many := bytes.Repeat([]byte("GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"), 2000)
		for {
			if _, err := c.Write(many); err != nil {
				return
			}
		}
	}()
}

// closedWindow requests the list of models over HTTP/2 and opens no window.
func closedWindow(held *holder, a attacker) {
	c, err := a.http2(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	if err != nil {
		return
	}
	held.add(func() { c.Close() })
	for range 20 {
		c.open(true, ":method", "GET", ":scheme", "http", ":path", "/v1/models", ":authority", "x")
	}
}

// unread requests an answer that fits into no buffer, and does not read it.
func unread(held *holder, a attacker) {
	c, err := a.dial("http/1.1")
	if err != nil {
		return
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		tcp.SetReadBuffer(4096)
	}
	held.add(func() { c.Close() })
	body := chat("large answer", false)
	fmt.Fprintf(c, "%sContent-Length: %d\r\n\r\n%s", postLine, len(body), body)
}
