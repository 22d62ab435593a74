package connlimit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"testing"
	"time"
)

// limited is an HTTP server with 6 places, 4 for one address. GET /busy answers when release is
// closed.
type limited struct {
	t       *testing.T
	limit   *Limit
	address string
	begun   chan struct{} // gets a value for each call of /busy
	release chan struct{}
}

func newLimited(t *testing.T) *limited {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &limited{t: t, limit: New(), address: l.Addr().String(), begun: make(chan struct{}, 10), release: make(chan struct{})}
	s.limit.most, s.limit.maxOfOne = 6, 4
	states := make(chan http.ConnState, 1000)
	server := &http.Server{
		ConnState:   func(_ net.Conn, state http.ConnState) { states <- state },
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context { return context.WithValue(ctx, s, "kept") },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Context().Value(s) != "kept" {
				t.Error("the server's own ConnContext was not called")
			}
			if r.URL.Path == "/busy" {
				s.begun <- struct{}{}
				<-s.release
			}
			w.WriteHeader(204)
		}),
	}
	s.limit.http(server)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l) // returns after Close
	}()
	t.Cleanup(func() {
		server.Close()
		<-done
		for deadline := time.Now().Add(10 * time.Second); s.limit.Len() > 0 || len(s.limit.of) > 0; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("remaining connections: %d of %d addresses", s.limit.Len(), len(s.limit.of))
			}
		}
		if len(states) == 0 {
			t.Error("the server's own ConnState was not called")
		}
	})
	return s
}

// open connects from an address and sends text.
func (s *limited) open(from, text string) net.Conn {
	s.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp", s.address)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	fmt.Fprint(c, text)
	return c
}

// served reports whether the server answers on c.
func served(c net.Conn) bool {
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	return err == nil && resp.StatusCode == 204
}

const (
	get  = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"
	busy = "GET /busy HTTP/1.1\r\nHost: x\r\n\r\n"
	half = "GET / HTTP/1.1\r\nHos"
)

// idle opens a connection whose request was answered.
func (s *limited) idle(from string) net.Conn {
	s.t.Helper()
	c := s.open(from, get)
	if !served(c) {
		s.t.Fatalf("a connection from %s was not served", from)
	}
	return c
}

// wantClosed fails unless the server closes c.
func wantClosed(t *testing.T, what string, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s is still open: the read gave %v", what, err)
	}
}

// wantOpen fails unless the server answers one more request on c.
func wantOpen(t *testing.T, what string, c net.Conn) {
	t.Helper()
	fmt.Fprint(c, get)
	if !served(c) {
		t.Errorf("%s was closed", what)
	}
}

// TestIdleConnectionsMakeRoom: at the limit of an address, the longest idle connection of this
// address is closed, also one that has sent a half head or nothing.
func TestIdleConnectionsMakeRoom(t *testing.T) {
	for name, first := range map[string]func(s *limited) net.Conn{
		"an answered request": func(s *limited) net.Conn { return s.idle("127.0.0.2") },
		"a half head":         func(s *limited) net.Conn { return s.open("127.0.0.2", half) },
		"no byte":             func(s *limited) net.Conn { return s.open("127.0.0.2", "") },
	} {
		t.Run(name, func(t *testing.T) {
			s := newLimited(t)
			oldest := first(s)
			for s.limit.Len() < 1 {
				time.Sleep(time.Millisecond)
			}
			later := []net.Conn{s.idle("127.0.0.2"), s.idle("127.0.0.2"), s.idle("127.0.0.2")}
			later = append(later, s.idle("127.0.0.2")) // the fifth of the address
			wantClosed(t, "the longest idle connection", oldest)
			for i, c := range later {
				wantOpen(t, fmt.Sprint("later connection ", i), c)
			}
			s.idle("127.0.0.3") // has places of its own
		})
	}
}

// TestFloodClosesNoOtherAddress: at the limit of all, the address with the most idle
// connections loses one.
func TestFloodClosesNoOtherAddress(t *testing.T) {
	s := newLimited(t)
	honest := s.idle("127.0.0.3")
	flood := []net.Conn{s.idle("127.0.0.2"), s.idle("127.0.0.2"), s.idle("127.0.0.2")}
	s.idle("127.0.0.4")
	s.idle("127.0.0.4")
	newest := s.idle("127.0.0.5")
	wantClosed(t, "the longest idle connection of the flood", flood[0])
	wantOpen(t, "the honest connection", honest)
	wantOpen(t, "the newest connection", newest)
}

// TestBusyConnectionsStay: a connection with a running request is never closed. If all are
// busy, the new one is refused until one has become idle.
func TestBusyConnectionsStay(t *testing.T) {
	s := newLimited(t)
	var running []net.Conn
	for range 4 {
		running = append(running, s.open("127.0.0.2", busy))
		<-s.begun
	}
	wantClosed(t, "the fifth connection of the address", s.open("127.0.0.2", get))
	for range 2 {
		running = append(running, s.open("127.0.0.3", busy))
		<-s.begun
	}
	wantClosed(t, "the seventh connection", s.open("127.0.0.4", get))
	close(s.release)
	for i, c := range running {
		if !served(c) {
			t.Errorf("running request %d got no answer", i)
		}
	}
	for deadline := time.Now().Add(10 * time.Second); !served(s.open("127.0.0.4", get)); { // the handlers may not have returned yet
		if time.Now().After(deadline) {
			t.Fatal("a connection that became idle made no room")
		}
	}
}
