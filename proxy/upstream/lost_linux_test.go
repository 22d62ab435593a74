package upstream

import (
	"errors"
	"io"
	"net"
	"net/url"
	"strings"
	"syscall"
	"testing"
)

// TestEvictResets: an engine's host never receives the bytes that it has not
// acknowledged when a call is evicted.
func TestEvictResets(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cl := New(Options{URL: &url.URL{Scheme: "http", Host: l.Addr().String()}})
	done := make(chan error, 1)
	go func() {
		req := post(strings.Repeat("x", 32<<20)) // more than the socket buffers hold
		req.Control = &fakeControl{evicts: true}
		_, err := cl.Do(t.Context(), req)
		done <- err
	}()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cl.EvictIdle("it", 0)
	if err := <-done; !errors.Is(err, ErrEvicted) {
		t.Errorf("the call ended with %v, want ErrEvicted", err)
	}
	if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the engine's connection ended with %v, want a reset", err)
	}
}
