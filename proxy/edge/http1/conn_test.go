package http1

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// onSockets starts a server on a loopback socket. The end of the test shuts it down.
func onSockets(t *testing.T, h http.Handler, change func(*Server)) (s *Server, dial func() net.Conn) {
	t.Helper()
	s = newServer(h)
	if change != nil {
		change(s)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return s, serveOn(t, s, l, func() (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) })
}

func serveOn(t *testing.T, s *Server, l net.Listener, dial func() (net.Conn, error)) func() net.Conn {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
			s.Close()
		}
		if err := <-ended; err != http.ErrServerClosed {
			t.Errorf("Serve: %v", err)
		}
	})
	return func() net.Conn {
		t.Helper()
		c, err := dial()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
}

// The server closes a connection whose client is too slow with a head or the next request.
func TestLimits(t *testing.T) {
	for _, tt := range []struct {
		sent  string
		after time.Duration
	}{
		{"", 10 * time.Second}, {"G", 10 * time.Second}, {preface[:20], 10 * time.Second},
		{get, time.Minute}, {get + "GET /", 10 * time.Second}, {post + "\r\n", 10 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := proxytest.NewPipeListener()
			s := newServer(http.NotFoundHandler())
			s.HTTP2 = func(c net.Conn) { c.Close() }
			c := serveOn(t, s, p, p.Dial)()
			begin := time.Now()
			go io.WriteString(c, tt.sent)
			all, _ := io.ReadAll(c)
			if d := time.Since(begin); d < tt.after || d > tt.after+2*time.Second+500*time.Millisecond || strings.Contains(string(all), "refused") {
				t.Errorf("%q: closed after %v: %q", tt.sent, d, all)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) { // a handler has no limit
		p := proxytest.NewPipeListener()
		c := serveOn(t, newServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { time.Sleep(time.Hour) })), p, p.Dial)()
		io.WriteString(c, get)
		if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 200 {
			t.Errorf("%v, %v", resp, err)
		}
	})
}

// Shutdown closes connections without a request at once, and lets a request end. Its answer says that
// the connection closes. The end of Base ends it with a cause.
func TestShutdown(t *testing.T) {
	for _, cut := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			drained := errors.New("drained")
			base, cancel := context.WithCancelCause(context.Background())
			defer cancel(nil)
			s := newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				select {
				case <-r.Context().Done():
					fmt.Fprint(w, context.Cause(r.Context()))
				case <-time.After(time.Minute):
				}
			}))
			s.Base = base
			p := proxytest.NewPipeListener()
			served := make(chan error)
			go func() { served <- s.Serve(p) }()
			var conns []net.Conn
			for range 4 {
				c, err := p.Dial()
				if err != nil {
					t.Fatal(err)
				}
				conns = append(conns, c)
			}
			io.WriteString(conns[1], "GET")
			io.WriteString(conns[2], get)
			io.WriteString(conns[3], "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
			synctest.Wait()
			begin := time.Now()
			if cut {
				time.AfterFunc(30*time.Second, func() { cancel(drained) })
			}
			over := make(chan error)
			go func() { over <- s.Shutdown(context.Background()) }()
			for _, c := range conns[:2] {
				if n, err := c.Read(make([]byte, 1)); n > 0 || err != io.EOF || time.Since(begin) > 0 {
					t.Errorf("got %d, %v after %v", n, err, time.Since(begin))
				}
			}
			want, text := time.Minute, ""
			if cut {
				want, text = 30*time.Second, "drained"
			}
			for _, c := range conns[2:] {
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(resp.Body)
				if string(b) != text || err != nil || !resp.Close || time.Since(begin) != want {
					t.Errorf("got %q, %v, close %v after %v", b, err, resp.Close, time.Since(begin))
				}
				c.Close()
			}
			if err := <-over; err != nil {
				t.Error(err)
			}
			if err := <-served; err != http.ErrServerClosed {
				t.Error(err)
			}
			if err := s.Serve(p); err != http.ErrServerClosed {
				t.Error(err)
			}
		})
	}
}

// Shutdown returns when its context ends, and Close cuts what is left.
func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gone := make(chan struct{})
		s := newServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			close(gone)
		}))
		p := proxytest.NewPipeListener()
		go s.Serve(p)
		c, err := p.Dial()
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, get)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != context.DeadlineExceeded {
			t.Error(err)
		}
		s.Close()
		<-gone
	})
}

// After Retire an idle connection stays open, and closes behind its next answer.
func TestRetire(t *testing.T) {
	s, dial := onSockets(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), nil)
	c := dial()
	in := bufio.NewReader(c)
	for _, last := range []bool{false, true} {
		if last {
			s.Retire()
		}
		io.WriteString(c, get)
		resp, err := http.ReadResponse(in, nil)
		if err != nil || resp.Close != last {
			t.Fatalf("%v, %v", resp, err)
		}
	}
	if _, err := in.ReadByte(); err != io.EOF {
		t.Error(err)
	}
}

// A handler that takes over the connection gets the bytes that have been read.
func TestHijack(t *testing.T) {
	for _, switched := range []bool{false, true} {
		read := make(chan struct{}) // closed when the first line is read
		_, dial := onSockets(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if switched {
				w.Header().Set("Upgrade", "x")
				w.Header().Set("Connection", "Upgrade")
				w.WriteHeader(101)
			}
			rc := http.NewResponseController(w)
			rc.SetReadDeadline(time.Now().Add(time.Hour))
			c, rw, err := rc.Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			if _, _, err := rc.Hijack(); err != http.ErrHijacked {
				t.Errorf("again: %v", err)
			}
			if _, err := w.Write([]byte("x")); err != http.ErrHijacked {
				t.Errorf("Write: %v", err)
			}
			go func() { // after the handler
				defer c.Close()
				line, _ := rw.ReadString('\n')
				close(read)
				more, _ := rw.ReadString('\n')
				fmt.Fprintf(c, "got %s%s", line, more)
			}()
		}), nil)
		c := dial()
		io.WriteString(c, get+"first\n")
		<-read
		io.WriteString(c, "second\n")
		all, err := io.ReadAll(c)
		want := "got first\nsecond\n"
		if switched {
			head, rest, _ := strings.Cut(string(all), "\r\n\r\n")
			if !strings.HasPrefix(head, "HTTP/1.1 101 Switching Protocols\r\n") || !strings.Contains(head, "Connection: Upgrade") || strings.Contains(head, "Content-Length") || strings.Contains(head, "close") {
				t.Errorf("got head %q", head)
			}
			all = []byte(rest)
		}
		if string(all) != want || err != nil {
			t.Errorf("got %q, %v", all, err)
		}
	}
}

// A connection with the preface of HTTP/2 is given away with all its bytes, for every split.
func TestHandOver(t *testing.T) {
	all := preface + "frames"
	for cut := range len(all) {
		got := make(chan string, 1)
		s := newServer(http.NotFoundHandler())
		s.HTTP2 = func(c net.Conn) {
			b, _ := io.ReadAll(c)
			got <- string(b)
			c.Close()
		}
		serveScript(s, all, cut)
		if b := <-got; b != all {
			t.Fatalf("cut at %d: got %q", cut, b)
		}
	}
	for _, other := range []string{get + preface, "PRI * HTTP/2.0\r\n\r\nSX\r\n\r\n", "PRI * HTTP/2.0\r\nHost: a\r\n\r\n"} {
		s := newServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		s.HTTP2 = func(net.Conn) { t.Errorf("%q was given away", other) }
		if sent := serveScript(s, other); !strings.HasSuffix(sent, refusal(UnknownVersion)) {
			t.Errorf("%q: got %q", other, sent)
		}
	}
}

// A deadline ends the reading of a body, but has no effect on a body that has come, nor on the next request.
func TestDeadlines(t *testing.T) {
	var late http.ResponseWriter
	passed := make(chan struct{}) // a value for each deadline that ended a read
	_, dial := onSockets(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		rc.SetReadDeadline(time.Unix(1, 0))
		b, err := io.ReadAll(r.Body)
		if late != nil && http.NewResponseController(late).SetReadDeadline(time.Unix(1, 0)) == nil {
			t.Error("a deadline of an ended request was accepted")
		}
		late = w
		if errors.Is(err, os.ErrDeadlineExceeded) {
			passed <- struct{}{}
			rc.SetReadDeadline(time.Time{})
			_, err = io.ReadAll(r.Body)
			b = []byte("after the deadline")
		}
		fmt.Fprintf(w, "%s %v", b, err)
	}), nil)
	c := dial()
	in := bufio.NewReader(c)
	for _, tt := range []struct{ first, second, want string }{
		{post, "", "hello <nil>"}, {get, "", " <nil>"},
		{postHead + "Content-Length: 5\r\n\r\nhe", "llo", "after the deadline <nil>"},
		{coded + "5\r\nhe", "llo\r\n0\r\n\r\n", "after the deadline <nil>"},
		{post, "", "hello <nil>"},
	} {
		io.WriteString(c, tt.first)
		if tt.second != "" {
			<-passed
			io.WriteString(c, tt.second)
		}
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(resp.Body); string(b) != tt.want {
			t.Errorf("%q: got %q, want %q", tt.first, b, tt.want)
		}
	}
}

// 100 Continue goes out at the first read of the body, once, and not after the answer has begun. A
// connection whose client may still wait does not serve another request.
func TestContinue(t *testing.T) {
	const ask = postHead + "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"
	for _, tt := range []struct {
		name    string
		handler http.HandlerFunc
		sent    bool
		close   bool
	}{
		{"read", func(w http.ResponseWriter, r *http.Request) { io.ReadAll(r.Body) }, true, false},
		{"not read", func(w http.ResponseWriter, r *http.Request) {}, false, true},
		{"answered first", func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(200)
			http.NewResponseController(w).Flush()
			io.ReadAll(r.Body)
		}, false, true},
		{"100 by the handler", func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(100)
			io.ReadAll(r.Body)
		}, true, false},
	} {
		_, dial := onSockets(t, tt.handler, nil)
		c := dial()
		in := bufio.NewReader(c)
		io.WriteString(c, ask)
		if b, _ := in.Peek(len("HTTP/1.1 100")); strings.HasSuffix(string(b), " 100") != tt.sent {
			t.Errorf("%s: got %q", tt.name, b)
		} else if tt.sent {
			in.ReadString('\n')
			in.ReadString('\n')
		}
		io.WriteString(c, "hello")
		if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != 200 || resp.Close != tt.close {
			t.Errorf("%s: %v, %v", tt.name, resp, err)
		}
	}
}

// State counts requests: a connection is active while a handler runs, and idle between.
func TestState(t *testing.T) {
	var states []http.ConnState
	s := newServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	s.State = func(_ net.Conn, state http.ConnState) { states = append(states, state) }
	serveScript(s, get+get+"x\r\n\r\n")
	if got := fmt.Sprint(states); got != "[active idle active idle]" {
		t.Errorf("got %v", got)
	}
}

// A malformed body is no sign that the client has left: it gets an answer. The end of the connection is.
func TestContextOfBrokenBody(t *testing.T) {
	for _, tt := range []struct {
		sent  string
		close bool
	}{{coded + "x\r\n", false}, {coded + "5\r\nhe", true}, {postHead + "Content-Length: 5\r\n\r\nhe", true}} {
		left := make(chan error, 1)
		_, dial := onSockets(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := io.ReadAll(r.Body); err == nil {
				t.Error("the body is complete")
			}
			left <- r.Context().Err()
			w.WriteHeader(400)
		}), nil)
		c := dial().(*net.TCPConn)
		io.WriteString(c, tt.sent)
		if tt.close {
			c.CloseWrite()
		}
		if err := <-left; (err != nil) != tt.close {
			t.Errorf("%q: %v", tt.sent, err)
		}
		if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 400 {
			t.Errorf("%q: %v, %v", tt.sent, resp, err)
		}
	}
}

// A body that comes slowly keeps no memory of the head.
func TestMemoryOfSlowBody(t *testing.T) {
	for _, framing := range []string{"Content-Length: 5", "Transfer-Encoding: chunked"} {
		kept := make(chan int, 1)
		_, dial := onSockets(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			kept <- len(w.(*answer).conn.buf)
			b, err := io.ReadAll(r.Body)
			fmt.Fprint(w, string(b), err)
		}), nil)
		c := dial()
		fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\n%s\r\nX: %s\r\n\r\n", framing, strings.Repeat("x", 2*bufferSize))
		if n := <-kept; n != 0 {
			t.Errorf("%s: %d bytes are kept", framing, n)
		}
		body := "hello"
		if framing[0] == 'T' {
			body = "5\r\nhello\r\n0\r\n\r\n"
		}
		io.WriteString(c, body)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(resp.Body); string(b) != "hello<nil>" || err != nil {
			t.Errorf("%s: got %q, %v", framing, b, err)
		}
	}
}
