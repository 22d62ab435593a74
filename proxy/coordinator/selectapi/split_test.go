package selectapi

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// TestSplitter: requests of HTTP and links meet on one port, of TCP or a Unix
// socket; each gets what was sent from the first byte on, in a connection that is
// still the listener's own.
func TestSplitter(t *testing.T) {
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
			s := NewSplitter(l)
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := s.Run(ctx); err != nil {
					t.Error(err)
				}
			})
			server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.URL.Path) })}
			wg.Go(func() {
				if err := server.Serve(s.HTTP()); !errors.Is(err, net.ErrClosed) {
					t.Error(err)
				}
			})
			wg.Go(func() {
				for {
					c, err := s.Link().Accept()
					if err != nil {
						return
					}
					_, isTCP := c.(*net.TCPConn)
					_, isUnix := c.(*net.UnixConn)
					if isTCP != (network == "tcp") || isUnix != (network == "unix") {
						t.Errorf("a %T", c)
					}
					wg.Go(func() { defer c.Close(); io.Copy(c, c) })
				}
			})
			dial := func() net.Conn {
				c, err := net.Dial(network, l.Addr().String())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { c.Close() })
				return c
			}
			silent := dial() // says nothing until the end
			for _, hello := range []string{"\x00link", "\x7f", "\xffpd", "\x16\x03\x01"} {
				c := dial()
				io.WriteString(c, hello)
				echo := make([]byte, len(hello))
				if _, err := io.ReadFull(c, echo); err != nil || string(echo) != hello {
					t.Errorf("%q came back as %q, %v", hello, echo, err)
				}
				c.Close()
			}
			for _, hello := range []string{"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "\r\nGET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"} {
				c := dial()
				io.WriteString(c, hello)
				answer, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					t.Fatalf("%q: %v", hello, err)
				}
				if body, _ := io.ReadAll(answer.Body); answer.StatusCode == 200 && string(body) != "/a" {
					t.Errorf("%q: %s", hello, body)
				}
			}
			start := time.Now()
			cancel()
			wg.Wait()
			if _, err := silent.Read(make([]byte, 1)); err == nil {
				t.Error("the silent connection is open")
			}
			if waited := time.Since(start); waited >= firstByteTimeout {
				t.Errorf("the silent connection held the end up for %v", waited)
			}
		})
	}
}
