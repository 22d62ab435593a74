package upstream

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// listen serves each connection of a real socket in its own goroutine. The end of the
// test closes the open connections and waits.
func listen(t testing.TB, serve func(c *net.TCPConn, br *bufio.Reader, nth int)) Options {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	wg.Go(func() {
		for nth := 1; ; nth++ {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
			wg.Go(func() {
				defer c.Close()
				serve(c.(*net.TCPConn), bufio.NewReader(c), nth)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, c := range conns {
			c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return Options{URL: mustURL("http://" + ln.Addr().String())}
}

// readRequest reads one complete request.
func readRequest(br *bufio.Reader) bool {
	r, err := http.ReadRequest(br)
	if err != nil {
		return false
	}
	_, err = io.Copy(io.Discard, r.Body)
	return err == nil
}

func TestLargeBodies(t *testing.T) {
	echo := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.URL.Path == "/length" {
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		}
		for piece := range slices.Chunk(body, 50000) {
			w.Write(piece)
		}
	})
	plain := httptest.NewServer(echo)
	defer plain.Close()
	secure := httptest.NewTLSServer(echo)
	defer secure.Close()
	both2 := httptest.NewUnstartedServer(echo)
	both2.EnableHTTP2 = true
	both2.StartTLS()
	defer both2.Close()
	body := make([]byte, 3<<20)
	for i := range body {
		body[i] = byte(i * i >> 8)
	}
	for name, srv := range map[string]*httptest.Server{"plain": plain, "tls": secure, "h2 offered": both2} {
		cl := New(Options{URL: mustURL(srv.URL), TLS: clientTLS(srv)})
		defer cl.CloseIdle()
		for _, path := range []string{"/length", "/chunked"} {
			for _, size := range []int{1, 100, 9000, 70000, len(body)} {
				resp, err := cl.Do(t.Context(), &Request{Method: "POST", Path: path, Body: [][]byte{body[:size/3], body[size/3 : size]}})
				if err != nil {
					t.Fatalf("%s, %s, %d: cl.Do = %v, want nil", name, path, size, err)
				}
				got, err := io.ReadAll(resp)
				if err != nil || !bytes.Equal(got, body[:size]) {
					t.Errorf("%s %s: %d of %d bytes, %v", name, path, len(got), size, err)
				}
				resp.Close()
			}
		}
		if s := cl.Stats(); s.Dials != 1 {
			t.Errorf("%s: %+v, want one connection", name, s)
		}
	}
}

func clientTLS(srv *httptest.Server) *tls.Config {
	if srv.TLS == nil {
		return nil
	}
	return srv.Client().Transport.(*http.Transport).TLSClientConfig
}

func TestReset(t *testing.T) {
	for _, answer := range []string{"HTTP/1.1 200 OK\r\n\r\nx", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx"} {
		read := make(chan bool)
		o := listen(t, func(c *net.TCPConn, br *bufio.Reader, _ int) {
			readRequest(br)
			io.WriteString(c, answer)
			<-read // data before a reset may be lost
			c.SetLinger(0)
		})
		cl := New(o)
		resp, err := cl.Do(t.Context(), get())
		if err != nil {
			t.Fatal(err)
		}
		p := make([]byte, 10)
		if n, err := resp.Read(p); n != 1 || err != nil {
			t.Errorf("Read = %d, %v", n, err)
		}
		close(read)
		_, err = resp.Read(p)
		if f := fault(t, err, OpBody); !errors.Is(err, io.ErrUnexpectedEOF) || f.Timeout || !f.Sent {
			t.Errorf("fault(err, OpBody) = %+v", f)
		}
		resp.Close()
	}
}

// A FIN that comes with the last byte is not part of the answer. The next call finds
// the connection closed in the pool.
func TestFINWithData(t *testing.T) {
	closed := make(chan bool, 100)
	o := listen(t, func(c *net.TCPConn, br *bufio.Reader, _ int) {
		if readRequest(br) {
			io.WriteString(c, okAnswer)
			c.Close()
			closed <- true
		}
	})
	cl := New(o)
	defer cl.CloseIdle()
	for range 20 {
		if _, body := ask(t, cl, post("{}")); body != "ok" {
			t.Fatalf("got body %q", body)
		}
		<-closed
	}
}

// After an engine's restart all idle connections are dead: the client notices each
// before it uses it.
func TestDeadIdleConnectionsAreNoticed(t *testing.T) {
	const calls = 3
	restart := make(chan bool)
	var together, closed sync.WaitGroup
	together.Add(calls)
	closed.Add(calls)
	o := listen(t, func(c *net.TCPConn, br *bufio.Reader, nth int) {
		readRequest(br)
		if nth <= calls {
			together.Done()
			together.Wait()
			io.WriteString(c, okAnswer)
			<-restart
			c.Close()
			closed.Done()
			return
		}
		io.WriteString(c, okAnswer)
		readRequest(br)
	})
	cl := New(o)
	defer cl.CloseIdle()
	var wg sync.WaitGroup
	for range calls {
		wg.Go(func() { ask(t, cl, get()) })
	}
	wg.Wait()
	close(restart)
	closed.Wait()
	ask(t, cl, get())
	if s := cl.Stats(); s != (Stats{Open: 1, Idle: 1, Dials: calls + 1}) {
		t.Errorf("cl.Stats() = %+v", s)
	}
}

// Data that an engine sends without a request must never become the answer to the next
// request.
func TestUnaskedData(t *testing.T) {
	for _, secure := range []bool{false, true} {
		t.Run(fmt.Sprint("tls ", secure), func(t *testing.T) {
			cert := httptest.NewUnstartedServer(nil)
			cert.StartTLS()
			defer cert.Close()
			more, sent := make(chan bool), make(chan bool)
			o := listen(t, func(tcp *net.TCPConn, br *bufio.Reader, nth int) {
				var c net.Conn = tcp
				if secure {
					c = tls.Server(tcp, cert.TLS)
					br = bufio.NewReader(c)
				}
				readRequest(br)
				io.WriteString(c, okAnswer)
				if nth == 1 {
					<-more
					io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
					sent <- true
				}
				readRequest(br)
			})
			if secure {
				o.URL.Scheme, o.TLS = "https", clientTLS(cert)
			}
			cl := New(o)
			defer cl.CloseIdle()
			ask(t, cl, get())
			more <- true
			<-sent
			if _, body := ask(t, cl, get()); body != "ok" {
				t.Errorf("second answer %q", body)
			}
			if s := cl.Stats(); s.Dials != 2 {
				t.Errorf("cl.Stats() = %+v", s)
			}
		})
	}
}

// TLS may have read a further record together with the last one of the answer. The
// socket then shows no data.
func TestUnaskedDataReadAhead(t *testing.T) {
	cert := httptest.NewUnstartedServer(nil)
	cert.StartTLS()
	defer cert.Close()
	o := listen(t, func(tcp *net.TCPConn, _ *bufio.Reader, nth int) {
		held := &holdWrites{Conn: tcp}
		c := tls.Server(held, cert.TLS)
		br := bufio.NewReader(c)
		readRequest(br)
		held.hold = nth == 1
		io.WriteString(c, okAnswer)
		if nth == 1 {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
			tcp.Write(held.held)
		}
		readRequest(br)
	})
	o.URL.Scheme, o.TLS = "https", clientTLS(cert)
	cl := New(o)
	defer cl.CloseIdle()
	for range 2 {
		if _, body := ask(t, cl, get()); body != "ok" {
			t.Errorf("answer %q", body)
		}
	}
	if s := cl.Stats(); s.Dials != 2 || s.Retries != 0 {
		t.Errorf("cl.Stats() = %+v", s)
	}
}

// holdWrites collects writes while hold is set.
type holdWrites struct {
	net.Conn
	hold bool
	held []byte
}

func (h *holdWrites) Write(p []byte) (int, error) {
	if h.hold {
		h.held = append(h.held, p...)
		return len(p), nil
	}
	return h.Conn.Write(p)
}

func TestTLSServerName(t *testing.T) {
	name := make(chan string, 1)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { name <- r.TLS.ServerName }))
	srv.Config.ErrorLog = nil
	srv.StartTLS()
	defer srv.Close()
	dial := func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, srv.Listener.Addr().String())
	}
	cl := New(Options{URL: mustURL("https://example.com"), TLS: clientTLS(srv), Dial: dial})
	ask(t, cl, get())
	if got := <-name; got != "example.com" {
		t.Errorf("server name %q", got)
	}
	cl.CloseIdle()
}

func TestTLSCertificateRefused(t *testing.T) {
	cert := httptest.NewUnstartedServer(nil)
	cert.StartTLS()
	defer cert.Close()
	o := listen(t, func(c *net.TCPConn, _ *bufio.Reader, _ int) { tls.Server(c, cert.TLS).Handshake() })
	o.URL.Scheme = "https"
	cl := New(o)
	_, err := cl.Do(t.Context(), get())
	var verify *tls.CertificateVerificationError
	if f := fault(t, err, OpDial); f.Sent || !errors.As(err, &verify) {
		t.Errorf("%v", err)
	}
	if s := cl.Stats(); s.Open != 0 {
		t.Errorf("cl.Stats() = %+v", s)
	}
}

func TestRefusedDial(t *testing.T) {
	const addr = "127.0.0.1:1" // no program listens there
	_, err := New(Options{URL: mustURL("http://" + addr)}).Do(t.Context(), post("secret"))
	if f := fault(t, err, OpDial); f.Sent || f.Timeout || strings.Contains(err.Error(), "secret") {
		t.Errorf("fault(err, OpDial) = %+v", f)
	}
}

// Closing the connection must end the context of a Go server's handler. A lingering
// call must not end it while an answer may come.
func TestServerNoticesHangUp(t *testing.T) {
	for _, secure := range []bool{false, true} {
		for _, answer := range []bool{false, true} {
			t.Run(fmt.Sprintf("tls %v answer %v", secure, answer), func(t *testing.T) {
				hangUp(t, secure, answer)
			})
		}
	}
}

func hangUp(t *testing.T, secure, answer bool) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	left := make(chan bool, 1)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		time.AfterFunc(50*time.Millisecond, cancel) // by then both transports know that the request is sent
		if answer {
			<-ctx.Done()
			select {
			case <-r.Context().Done():
			case <-time.After(50 * time.Millisecond): // a closed connection would be noticed by now
			}
			left <- r.Context().Err() != nil
			io.WriteString(w, "late")
			return
		}
		<-r.Context().Done()
		left <- true
		panic(http.ErrAbortHandler)
	}))
	if secure {
		srv.StartTLS()
	} else {
		srv.Start()
	}
	defer srv.Close()
	cl := New(Options{URL: mustURL(srv.URL), TLS: clientTLS(srv)})
	defer cl.CloseIdle()
	req := post("{}")
	if answer {
		req.Linger = lingerFor * 10
	}
	resp, err := cl.Do(ctx, req)
	if gone := <-left; gone == answer {
		t.Errorf("the handler's context has ended: %v", gone)
	}
	if !answer {
		if fault(t, err, OpHead); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Close()
	if body, err := io.ReadAll(resp); string(body) != "late" || err != nil {
		t.Errorf(`io.ReadAll(resp) = %q, %v, want "late", nil`, body, err)
	}
}
