package proxy_test

import (
	"bytes"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

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
