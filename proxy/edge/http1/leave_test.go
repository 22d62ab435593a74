package http1

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// The context of a request ends when its client leaves, on each kind of connection.
func TestLeaving(t *testing.T) {
	for _, kind := range []string{"socket", "tls", "pipe"} {
		for _, request := range []string{get, post, coded + "2\r\nhi\r\n0\r\n\r\n"} {
			for _, reads := range []bool{true, false} {
				if !reads && request != get {
					continue // the body is not read
				}
				t.Run(fmt.Sprint(kind, request[:5], reads), func(t *testing.T) {
					started, cause := make(chan struct{}), make(chan error)
					var ran atomic.Int32
					h := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
						if reads {
							io.Copy(io.Discard, r.Body)
						}
						type key struct{}
						ctx, cancel := context.WithCancel(context.WithValue(r.Context(), key{}, 1))
						defer cancel()
						done := make(chan struct{})
						context.AfterFunc(r.Context(), func() { ran.Add(1); close(done) })
						stop := context.AfterFunc(ctx, func() { ran.Add(10) })
						if !stop() {
							t.Error("stopped too late")
						}
						close(started)
						<-ctx.Done()
						<-done
						cause <- errors.Join(r.Context().Err(), context.Cause(ctx))
					})
					s := newServer(h)
					var l net.Listener
					var dial func() (net.Conn, error)
					if kind == "pipe" {
						p := proxytest.NewPipeListener()
						l, dial = p, p.Dial
					} else {
						tl, err := net.Listen("tcp", "127.0.0.1:0")
						if err != nil {
							t.Fatal(err)
						}
						l, dial = tl, func() (net.Conn, error) { return net.Dial("tcp", tl.Addr().String()) }
					}
					if kind == "tls" {
						l, dial = overTLS(t, l, dial)
					}
					c := serveOn(t, s, l, dial)()
					io.WriteString(c, request)
					<-started
					c.Close()
					if err := <-cause; err.Error() != "context canceled\ncontext canceled" {
						t.Errorf("got %v", err)
					}
					if n := ran.Load(); n != 1 {
						t.Errorf("%d functions ran", n)
					}
				})
			}
		}
	}
}

// A client that has closed its side gets the answer of a handler that does not read the body.
func TestHalfClosedEarlyAnswer(t *testing.T) {
	_, dial := onSockets(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(20 * time.Millisecond) // time in which a wrong server would end the request
		if err := r.Context().Err(); err != nil {
			t.Error(err)
		}
		w.WriteHeader(415)
	}), nil)
	c := dial().(*net.TCPConn)
	io.WriteString(c, post)
	c.CloseWrite()
	if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 415 {
		t.Errorf("%v, %v", resp, err)
	}
}

// A client with a further request in the socket has not left, as with net/http. The further request
// gets an answer, too.
func TestHalfClosed(t *testing.T) {
	next := make(chan struct{})
	first := true
	_, dial := onSockets(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if first {
			first = false
			<-next
			time.Sleep(20 * time.Millisecond) // time in which a wrong server would end the request
			if err := r.Context().Err(); err != nil {
				t.Errorf("the first request ended: %v", err)
			}
		} else {
			<-r.Context().Done()
		}
		io.WriteString(w, "served")
	}), nil)
	c := dial().(*net.TCPConn)
	// The first request fills the read, so that the second one stays in the socket.
	body := strings.Repeat("x", 100<<10)
	io.WriteString(c, postHead+fmt.Sprintf("Content-Length: %d\r\n\r\n", len(body))+body+get)
	c.CloseWrite()
	close(next)
	all, err := io.ReadAll(c)
	if err != nil || strings.Count(string(all), "served") != 2 {
		t.Errorf("got %q, %v", all, err)
	}
}

// A pipelined byte that the watching of a pipe has read belongs to the next request.
func TestPipelinedWhileServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := proxytest.NewPipeListener()
		dial := serveOn(t, newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(time.Second)
			b, _ := io.ReadAll(r.Body)
			fmt.Fprint(w, r.Method, string(b))
		})), p, p.Dial)
		c := dial()
		in := bufio.NewReader(c)
		go io.WriteString(c, post+post+get)
		for _, want := range []string{"POSThello", "POSThello", "GET"} {
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(resp.Body); string(b) != want || err != nil {
				t.Errorf("got %q, %v", b, err)
			}
		}
		c.Close()
	})
}

// told is closed by the first call of ContextEnded. A second call panics.
type told chan struct{}

func (t told) ContextEnded() { close(t) }

// TestRegister: the context of a request calls ContextEnded of each registered value once, unless the
// value was unregistered. A value that is registered after the end is called at once.
func TestRegister(t *testing.T) {
	x := &requestContext{conn: &conn{values: t.Context()}}
	var all [5]told
	for i := range all {
		all[i] = make(told)
		x.Register(all[i])
	}
	other := make(told)
	if !x.Unregister(all[1]) || x.Unregister(all[1]) || x.Unregister(other) {
		t.Error("unregistered what was not registered, or the reverse")
	}
	x.Register(other)
	x.cancel(context.Canceled)
	x.cancel(context.Canceled) // has no effect
	for i, e := range all {
		if i != 1 {
			<-e
		}
	}
	<-other
	if x.Unregister(all[0]) {
		t.Error("unregistered after the end")
	}
	x.Register(all[1])
	<-all[1]
}

// TestRegisterAllocs: the first two registered values allocate nothing.
func TestRegisterAllocs(t *testing.T) {
	x := &requestContext{conn: &conn{values: t.Context()}}
	a, b := make(told), make(told)
	if n := testing.AllocsPerRun(100, func() {
		x.Register(a)
		x.Register(b)
		x.Unregister(a)
		x.Unregister(b)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// A handler panics while another goroutine reads the body of a connection that the kernel does not
// watch. The connection ends after the reader, because both use its buffer.
func TestPanicWhileBodyIsRead(t *testing.T) {
	p := proxytest.NewPipeListener()
	dial := serveOn(t, newServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		begun := make(chan bool)
		go func() {
			close(begun)
			_, _ = io.Copy(io.Discard, r.Body)
		}()
		<-begun
		panic(http.ErrAbortHandler)
	})), p, p.Dial)
	for range 500 {
		c := dial()
		_, _ = io.WriteString(c, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n")
		_, _ = io.Copy(io.Discard, c)
		c.Close()
	}
}
