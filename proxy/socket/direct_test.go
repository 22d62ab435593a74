package socket

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// pair returns both ends of a TCP connection, the first one by Direct.
func pair(t *testing.T) (direct, peer net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	peer, err = net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close() })
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	direct = Direct(c)
	t.Cleanup(func() { direct.Close() })
	return direct, peer
}

// TestDirect: more bytes than the buffers of both sockets hold arrive in both directions, and the end of
// one direction.
func TestDirect(t *testing.T) {
	c, peer := pair(t)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	go func() { // ends with the connection
		io.Copy(peer, peer)
		peer.(*net.TCPConn).CloseWrite()
	}()
	go func() { // ends with the write
		if n, err := c.Write(sent); n != len(sent) || err != nil {
			t.Errorf("%d bytes written, %v", n, err)
		}
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d of %d bytes came back, %v", len(got), len(sent), err)
	}
	if n, err := c.Read(nil); n != 0 || err != nil {
		t.Errorf("an empty read: %d, %v", n, err)
	}
}

// TestDirectErrors: deadlines, closed connections and resets give the errors of package net.
func TestDirectErrors(t *testing.T) {
	c, peer := pair(t)
	c.SetDeadline(time.Now())
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a read after its deadline: %v", err)
	}
	if _, err := c.Write(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a write after its deadline: %v", err)
	}
	c.SetDeadline(time.Time{})
	peer.(*net.TCPConn).SetLinger(0)
	peer.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a read after a reset: %v", err)
	}
	if _, err := c.Write(make([]byte, 1)); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("a write after a reset: %v", err)
	}
	c.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a read of a closed connection: %v", err)
	}
}

// TestDirectWaits: a read that waits ends when the connection is closed.
func TestDirectWaits(t *testing.T) {
	c, _ := pair(t)
	read := make(chan error)
	go func() {
		_, err := c.Read(make([]byte, 1))
		read <- err
	}()
	c.Close()
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Errorf("the read that waited: %v", err)
	}
}

// TestDirectOfOthers: a connection that is no socket stays as it is.
func TestDirectOfOthers(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if Direct(a) != a {
		t.Error("a pipe has changed")
	}
}
