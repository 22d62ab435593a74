package proxy_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/admission"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// exchangeUnended sends a head that announces a body, and no body. It returns all bytes
// that the proxy sends until the proxy closes the connection, and the time until then.
func exchangeUnended(t *testing.T, l *proxytest.PipeListener, head string) (string, time.Duration) {
	t.Helper()
	conn, err := l.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	begin := time.Now()
	fmt.Fprintf(conn, "%s\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{", head)
	text, _ := io.ReadAll(conn) // until the proxy closes the connection
	return string(text), time.Since(begin)
}

// TestAdminUnread: a body that never arrives does not keep a connection to the admin
// address open.
func TestAdminUnread(t *testing.T) {
	const json = "\r\nContent-Type: application/json"
	for _, tt := range []struct {
		name, head string
		status     int
		within     time.Duration
	}{
		{"no token", "POST /v1/drain HTTP/1.1", 401, 2 * unreadWait},
		{"not found", "POST /nothing HTTP/1.1" + json, 404, 2 * unreadWait},
		{"wrong method", "PUT /v1/drain HTTP/1.1" + json, 405, 2 * unreadWait},
		{"foreign page", "POST /v1/drain HTTP/1.1\r\nOrigin: http://evil.test" + json, 403, 2 * unreadWait},
		{"other type", "POST /v1/drain HTTP/1.1\r\nContent-Type: text/plain", 415, 2 * unreadWait},
		{"long answer", "GET /metrics HTTP/1.1" + json, 200, 2 * unreadWait},
		{"body that is read", "POST /v1/engines HTTP/1.1" + json, 400, operatorBody + 2*unreadWait},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			w := newWorld(t, world.Setup{})
			head := tt.head
			if tt.status != 401 {
				head += "\r\nAuthorization: Bearer " + world.AdminToken
			}
			text, took := exchangeUnended(t, w.Admin, head)
			if took > tt.within || !strings.HasPrefix(text, fmt.Sprintf("HTTP/1.1 %d ", tt.status)) {
				t.Errorf("after %v: %.200q", took, text)
			}
		})
	}
}

// TestLongAnswerUnread: an answer that exceeds net/http's buffer does not wait for a body
// that no handler reads, with filters and without.
func TestLongAnswerUnread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, world.Setup{Options: func(d *proxy.Options) {
			d.Wrap = func(http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Minute))
					io.WriteString(w, strings.Repeat("a", 4096))
				})
			}
		}})
		text, took := exchangeUnended(t, w.Public, "GET /v1/models HTTP/1.1")
		if took > 2*unreadWait || !strings.HasPrefix(text, "HTTP/1.1 200 ") {
			t.Errorf("after %v: %.200q", took, text)
		}
	})
}

// TestAdminContextOutlivesBody: the limit of bodies does not end a request whose body
// has been read.
func TestAdminContextOutlivesBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := proxytest.NewPipeListener()
		srv := &http.Server{Handler: downstream.NewBodies(new(buffer.Budget), nil, admission.Proxies(nil).Client).LimitForOperators(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.ReadAll(r.Body)
			time.Sleep(2 * operatorBody)
			fmt.Fprint(w, r.Context().Err())
		}))}
		go srv.Serve(l)
		defer srv.Close()
		conn, err := l.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprint(conn, "POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
		if text, _ := io.ReadAll(conn); !strings.HasSuffix(string(text), "<nil>") {
			t.Errorf("%q", text)
		}
	})
}

// TestConnectionAfterStoppedBody: an answer to a body that came too late says that the
// connection closes. net/http has ended the contexts of all requests of the connection, so
// the proxy serves no other request there, even if the rest of the body comes.
func TestConnectionAfterStoppedBody(t *testing.T) {
	for _, tt := range []struct {
		name, head string
		admin      bool
		status     int
	}{
		{"public", "POST /v1/completions HTTP/1.1", false, 408},
		{"admin", "POST /v1/engines HTTP/1.1\r\nAuthorization: Bearer " + world.AdminToken, true, 400},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			w := newWorld(t, world.Setup{})
			l := w.Public
			if tt.admin {
				l = w.Admin
			}
			conn, err := l.Dial()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			head := tt.head + "\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
			fmt.Fprint(conn, head+"10\r\n\r\n{")
			in := bufio.NewReader(conn)
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != tt.status || !resp.Close {
				t.Errorf("answer: got %d, close %v, %v", resp.StatusCode, resp.Close, err)
			}
			go fmt.Fprint(conn, "        }"+head+"2\r\n\r\n{}") // fails when the proxy closes the connection
			if text, _ := io.ReadAll(in); len(text) > 0 {
				t.Errorf("another answer: %q", text)
			}
		})
	}
}

// TestAnswerIsReadBehindTheBodyHTTP2: an HTTP/2 client that goes on to send its body gets the
// answer and no reset. The proxy resets the stream of a client that stops in the body.
func TestAnswerIsReadBehindTheBodyHTTP2(t *testing.T) {
	for _, tt := range []struct {
		name, path, status string
		goesOn             bool
		reset              string // error code; "": the stream ends without a reset
	}{
		{"too large", world.CompletionsPath, "413", true, ""},
		{"not found", "/nothing", "404", true, ""},
		{"too large, the rest never arrives", world.CompletionsPath, "413", false, "NO_ERROR"},
		{"not found, the rest never arrives", "/nothing", "404", false, "NO_ERROR"},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			w := newWorld(t, world.Setup{Config: func(c *config.Config) { c.Server.MaxBody = 1000 }})
			c, err := w.Public.Dial()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			s := &streamFrames{frames: http2.NewFramer(c, c)}
			go s.read()
			io.WriteString(c, http2.ClientPreface)
			s.frames.WriteSettings()
			var head bytes.Buffer
			fields := hpack.NewEncoder(&head)
			for _, f := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", tt.path}, {":authority", "a"}, {"content-length", "20000"}} {
				fields.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
			}
			s.frames.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndHeaders: true})
			s.frames.WriteData(1, false, make([]byte, 10000))
			time.Sleep(unreadWait / 2)
			synctest.Wait()
			if got := s.got(); got.status != tt.status || !strings.Contains(got.body, "error") || got.reset != "" {
				t.Errorf("before the end of the body: %+v", got)
			}
			if tt.goesOn {
				s.frames.WriteData(1, true, make([]byte, 10000))
			} else {
				time.Sleep(2 * unreadWait)
			}
			synctest.Wait()
			if got := s.got(); !got.ended || got.reset != tt.reset {
				t.Errorf("got %+v, want reset %q", got, tt.reset)
			}
		})
	}
}

// streamAnswer is the answer on an HTTP/2 stream.
type streamAnswer struct {
	status, body, reset string
	ended               bool
}

// streamFrames reads the frames of stream 1 that an HTTP/2 client gets.
type streamFrames struct {
	frames *http2.Framer
	mu     sync.Mutex
	answer streamAnswer // guarded by mu
}

// got returns the answer that has arrived.
func (s *streamFrames) got() streamAnswer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.answer
}

// read collects frames until the connection ends.
func (s *streamFrames) read() {
	fields := hpack.NewDecoder(4096, func(f hpack.HeaderField) {
		if f.Name == ":status" {
			s.answer.status = f.Value
		}
	})
	for {
		f, err := s.frames.ReadFrame()
		if err != nil {
			return
		}
		s.mu.Lock()
		switch f := f.(type) {
		case *http2.HeadersFrame:
			fields.Write(f.HeaderBlockFragment())
		case *http2.DataFrame:
			s.answer.body += string(f.Data())
			s.answer.ended = s.answer.ended || f.StreamEnded()
		case *http2.RSTStreamFrame:
			s.answer.reset += f.ErrCode.String()
		}
		s.mu.Unlock()
	}
}
