package proxy

import (
	"bytes"
	"crypto/tls"
	"io"
	"log/slog"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// A client over HTTP/1.1 that asks and never reads is cut after write_timeout,
// whatever it asks for, on either address.
func TestUnreadAnswers(t *testing.T) {
	const limit = 10 * time.Second
	for _, tt := range []struct {
		name, request string
		admin, tls    bool
	}{
		{"models", "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", false, false},
		{"models over TLS", "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", false, true},
		{"health", "GET /health HTTP/1.1\r\nHost: a\r\n\r\n", false, false},
		{"not found", "GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n", false, false},
		{"wrong method", "GET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n", false, false},
		{"bad request", "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 2\r\n\r\n", false, false},
		{"refused body", "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{]", false, false},
		{"operators", "GET /v1/engines HTTP/1.1\r\nHost: a\r\n\r\n", true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := setup{config: func(c *config.Config) { c.Server.WriteTimeout = config.Duration(limit) }}
				if tt.tls {
					var err error
					if o.certs, err = LoadCerts(config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler)); err != nil {
						t.Fatal(err)
					}
				}
				w := newWorld(t, o)
				dial, places := w.public.dial, w.front.places
				if tt.admin {
					dial, places = w.admin.dial, w.front.operators
				}
				c, err := dial()
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if tt.tls {
					c = tls.Client(c, &tls.Config{InsecureSkipVerify: true})
				}
				io.WriteString(c, tt.request)
				time.Sleep(limit)
				synctest.Wait()
				if n := openPlaces(places); n != 1 {
					t.Errorf("before the limit %d connections are open", n)
				}
				time.Sleep(2 * tickMost)
				synctest.Wait()
				if n := openPlaces(places); n != 0 {
					t.Errorf("after the limit %d connections are open", n)
				}
			})
		})
	}
}

func openPlaces(c *connections) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count()
}

// A client over HTTP/2 that never opens its window has its streams reset, and keeps
// its connection.
func TestUnreadStreams(t *testing.T) {
	for _, path := range []string{"/v1/models", "/health", "/nothing", "/v1/completions"} {
		t.Run(path, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const limit = 10 * time.Second
				w := newWorld(t, setup{config: func(c *config.Config) { c.Server.WriteTimeout = config.Duration(limit) }})
				c, err := w.public.dial()
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				frames := http2.NewFramer(c, c)
				reset := make(chan time.Duration, 1)
				begun := time.Now()
				go func() {
					for {
						f, err := frames.ReadFrame()
						if err != nil {
							return
						}
						if f.Header().Type == http2.FrameRSTStream {
							reset <- time.Since(begun)
						}
					}
				}()
				io.WriteString(c, http2Preface)
				frames.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
				var head bytes.Buffer
				fields := hpack.NewEncoder(&head)
				for _, f := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":path", path}, {":authority", "a"}} {
					fields.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
				}
				frames.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndHeaders: true, EndStream: true})
				if d := <-reset; d < limit || d > limit+time.Second {
					t.Errorf("reset after %v", d)
				}
			})
		})
	}
}

// An answer that was slow to be read leaves no deadline to the next one on its
// connection.
func TestWriteLimitIsOfOneAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.stream(eventA, done) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}})
		w.post(completionsPath, completions(true))
		time.Sleep(100 * time.Second) // longer than any limit of a write, shorter than idle_timeout
		if a := w.get("/version"); a.status != 200 || a.err != nil {
			t.Errorf("got %+v", a)
		}
		if n := openPlaces(w.front.places); n != 1 {
			t.Errorf("%d connections are open: the second request was not on the first one's", n)
		}
	})
}

// What is inside is known at each byte, in whatever pieces frames come.
func TestHeadWatchAtEverySplit(t *testing.T) {
	var stream bytes.Buffer
	var inside []bool // after each byte
	frames := http2.NewFramer(&stream, nil)
	wrote := func(data, block bool) {
		for i := len(inside) + 1; i <= stream.Len(); i++ {
			begun := i-len(inside) > 0 && i < stream.Len()
			inside = append(inside, begun && !data || block)
		}
	}
	frames.WriteSettings()
	wrote(false, false)
	for i := range inside[:len(inside)-1] {
		inside[i] = true
	}
	frames.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte("abc"), EndHeaders: true})
	wrote(false, false)
	frames.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: []byte("abc")})
	wrote(false, true)
	frames.WriteContinuation(3, false, []byte("d"))
	wrote(false, true)
	frames.WriteContinuation(3, true, nil)
	n := len(inside)
	wrote(false, false)
	for i := n; i < len(inside)-1; i++ {
		inside[i] = true
	}
	frames.WritePing(false, [8]byte{})
	wrote(false, false)
	frames.WriteData(1, false, []byte("body"))
	n = len(inside)
	wrote(true, false)
	for i := n; i < n+frameHead-1; i++ { // its type is not known yet
		inside[i] = true
	}
	var w headWatch
	for i, b := range stream.Bytes() {
		if w.follow([]byte{b}); w.inside() != inside[i] {
			t.Errorf("after byte %d: inside %t", i, w.inside())
		}
	}
	for range 1000 {
		var pieces headWatch
		for rest, at := stream.Bytes(), 0; len(rest) > 0; {
			step := 1 + rand.IntN(len(rest))
			pieces.follow(rest[:step])
			rest = rest[step:]
			if at += step; pieces.inside() != inside[at-1] {
				t.Fatalf("after byte %d, in pieces: inside %t", at-1, pieces.inside())
			}
		}
		if pieces != w {
			t.Fatalf("in pieces %+v, byte by byte %+v", pieces, w)
		}
	}
}

func FuzzHeadWatch(f *testing.F) {
	f.Add([]byte(http2Begin[len(http2Preface):]), 3)
	f.Add([]byte("\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82\x00\x00\x00\x09\x04\x00\x00\x00\x01"), 5)
	f.Fuzz(func(t *testing.T, stream []byte, at int) {
		var whole, pieces headWatch
		whole.follow(stream)
		at = min(max(at, 0), len(stream))
		pieces.follow(stream[:at])
		pieces.follow(stream[at:])
		if whole != pieces {
			t.Errorf("whole %+v, in pieces %+v", whole, pieces)
		}
		if whole.n >= frameHead || whole.left > 1<<24 {
			t.Errorf("%+v", whole)
		}
	})
}
