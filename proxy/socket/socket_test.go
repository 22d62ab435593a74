package socket

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// pairs calls test with the two ends of a TCP connection and of a Unix connection. A
// Listener has accepted the first end.
func pairs(t *testing.T, test func(t *testing.T, ours, peer net.Conn)) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			address := "127.0.0.1:0"
			if network == "unix" {
				address = filepath.Join(t.TempDir(), "s")
			}
			l, err := net.Listen(network, address)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			peer, err := net.Dial(network, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			ours, err := Listener(l).Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer ours.Close()
			test(t, ours, peer)
		})
	}
}

// pattern returns n bytes whose values depend on their positions.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7 / 5)
	}
	return b
}

// TestReadsAndWrites: written bytes arrive, also if the socket accepts only a part at
// once, from many goroutines, and until the end of the connection.
func TestReadsAndWrites(t *testing.T) {
	pairs(t, func(t *testing.T, ours, peer net.Conn) {
		want := pattern(8 << 20)
		var both sync.WaitGroup
		both.Go(func() { io.Copy(peer, peer) })
		both.Go(func() {
			for rest := want; len(rest) > 0; {
				n := min(len(rest), 1+len(rest)/3)
				if k, err := ours.Write(rest[:n]); k != n || err != nil {
					t.Errorf("wrote %d of %d: %v", k, n, err)
				}
				rest = rest[n:]
			}
			ours.(interface{ CloseWrite() error }).CloseWrite()
		})
		got := make([]byte, len(want))
		if _, err := io.ReadFull(ours, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("the read bytes differ from the written bytes, error %v", err)
		}
		if n, err := ours.Read(nil); n != 0 || err != nil {
			t.Errorf("reading nothing: %d, %v", n, err)
		}
		both.Wait()
		peer.Close()
		if n, err := ours.Read(got); n != 0 || err != io.EOF {
			t.Errorf("at the end: %d, %v", n, err)
		}
	})
}

// TestWriteTo: many buffers are sent in order, to a socket and to another writer. Some
// buffers are empty, and there are more than one system call accepts.
func TestWriteTo(t *testing.T) {
	pairs(t, func(t *testing.T, ours, peer net.Conn) {
		for name, c := range map[string]net.Conn{"socket": ours, "other": struct{ net.Conn }{ours}} {
			for _, sizes := range [][]int{{}, {0}, {5}, {0, 3, 0}, {100, 2000}, {1 << 20, 0, 3 << 20, 1}, make([]int, 3000)} {
				var bufs net.Buffers
				var want []byte
				for i, size := range sizes {
					if len(sizes) == 3000 {
						size = i % 3
					}
					bufs = append(bufs, pattern(size))
					want = append(want, pattern(size)...)
				}
				got := make([]byte, len(want))
				var reading sync.WaitGroup
				reading.Go(func() { io.ReadFull(peer, got) })
				n, err := WriteTo(c, &bufs)
				reading.Wait()
				if n != int64(len(want)) || err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s, %d buffers: %d of %d bytes, %v", name, len(sizes), n, len(want), err)
				}
			}
		}
	})
}

// TestFails: the errors are those of package net.
func TestFails(t *testing.T) {
	read := func(c net.Conn) error { _, err := c.Read(make([]byte, 1)); return err }
	write := func(c net.Conn) error {
		for {
			if _, err := c.Write(make([]byte, 1<<20)); err != nil {
				return err
			}
		}
	}
	past := time.Unix(1, 0)
	for _, tt := range []struct {
		name   string
		before func(c, peer net.Conn)
		do     func(net.Conn) error
		op     string
		is     error
	}{
		{"read too late", func(c, _ net.Conn) { c.SetReadDeadline(past) }, read, "read", os.ErrDeadlineExceeded},
		{"write too late", func(c, _ net.Conn) { c.SetWriteDeadline(past) }, write, "write", os.ErrDeadlineExceeded},
		{"waited too long to read", func(c, _ net.Conn) { time.AfterFunc(20*time.Millisecond, func() { c.SetDeadline(past) }) }, read, "read", os.ErrDeadlineExceeded},
		{"waited too long to write", func(c, _ net.Conn) { time.AfterFunc(20*time.Millisecond, func() { c.SetDeadline(past) }) }, write, "write", os.ErrDeadlineExceeded},
		{"read of a closed socket", func(c, _ net.Conn) { c.Close() }, read, "read", net.ErrClosed},
		{"write to a closed socket", func(c, _ net.Conn) { c.Close() }, write, "write", net.ErrClosed},
		{"closed under a read", func(c, _ net.Conn) { time.AfterFunc(20*time.Millisecond, func() { c.Close() }) }, read, "read", net.ErrClosed},
		{"closed under a write", func(c, _ net.Conn) { time.AfterFunc(20*time.Millisecond, func() { c.Close() }) }, write, "write", net.ErrClosed},
		{"the peer has gone", func(_, peer net.Conn) { peer.Close() }, write, "write", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pairs(t, func(t *testing.T, c, peer net.Conn) {
				tt.before(c, peer)
				err := tt.do(c)
				var of *net.OpError
				if !errors.As(err, &of) || of.Op != tt.op || of.Net != c.LocalAddr().Network() || tt.is != nil && !errors.Is(err, tt.is) {
					t.Errorf("%#v", err)
				}
				if late := tt.is == os.ErrDeadlineExceeded; of != nil && of.Timeout() != late {
					t.Errorf("%v: Timeout() = %v", err, !late)
				}
				if tt.is == nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("%v", err)
				}
			})
		})
	}
}

// TestOfOthers: Of returns connections that are not directly sockets unchanged.
func TestOfOthers(t *testing.T) {
	pairs(t, func(t *testing.T, ours, peer net.Conn) {
		a, b := net.Pipe()
		defer a.Close()
		defer b.Close()
		for _, c := range []net.Conn{a, tls.Client(ours, &tls.Config{}), struct{ net.Conn }{ours}} {
			if Of(c) != c {
				t.Errorf("%T is another", c)
			}
		}
		if _, err := Of(peer).(syscall.Conn).SyscallConn(); err != nil {
			t.Error(err)
		}
	})
}

func TestNothingAllocates(t *testing.T) {
	pairs(t, func(t *testing.T, ours, peer net.Conn) {
		peer = Of(peer)
		p, q := pattern(100), make([]byte, 1000)
		store := make(net.Buffers, 2)
		var bufs net.Buffers
		if n := testing.AllocsPerRun(100, func() {
			ours.Write(p)
			io.ReadFull(peer, q[:100])
			store[0], store[1] = p, p
			bufs = store
			WriteTo(ours, &bufs)
			io.ReadFull(peer, q[:200])
		}); n > 0 {
			t.Errorf("got %v allocations", n)
		}
	})
}
