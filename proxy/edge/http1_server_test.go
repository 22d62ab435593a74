package edge

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// serveOwn is serveStream for the own server of HTTP/1.1.
func serveOwn(all string, cuts ...int) (got []handled, sent string) {
	var mu sync.Mutex
	conn := proxytest.NewScript(all, cuts...)
	cfg := config.Default()
	s := newServer(&cfg, Options{Log: slog.New(slog.DiscardHandler), Limits: func() *config.Limits { return &cfg.Limits }})
	defer s.cancel(nil)
	s.addHTTP1(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		h := handled{method: r.Method, uri: r.RequestURI, proto: r.Proto, body: string(body)}
		if err != nil {
			h.err = "broken"
		}
		mu.Lock()
		defer mu.Unlock()
		got = append(got, h)
		w.Header()["Date"] = nil
		w.Write([]byte("handled"))
	}), tcpListener{proxytest.OneConn(conn), s.places, true}, s.base, nil)
	e := s.servers[0]
	served := make(chan struct{})
	go func() {
		e.Serve(e.listener)
		close(served)
	}()
	<-conn.Closed()
	e.Close()
	<-served
	return got, conn.Sent()
}

// The own server serves the same requests as net/http below the guard, and refuses what the guard
// refuses, for every split of the reads.
func TestOwnFraming(t *testing.T) {
	for _, tt := range framingStreams {
		if tt.name == "HTTP/2" {
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, all, mark := parseFramingStream(tt.bytes)
				want, answers := serveStream(all, true)
				_, wantStatus := cutRefusal(t, answers)
				step := max(1, len(all)/50)
				for cut := 0; cut < len(all); cut += step {
					got, sent := serveOwn(all, cut)
					sent, status := cutRefusal(t, sent)
					if n := strings.Count(sent, "handled"); n != len(got) {
						t.Fatalf("cut at %d: %d answers for %+v", cut, n, got)
					}
					if strings.HasPrefix(tt.name, "preface") { // an unknown version for the own server
						if want := strings.Count(all, "GET"); len(got) != want || status != "505" {
							t.Fatalf("cut at %d: the handler got %+v, want %d; status %s", cut, got, want, status)
						}
						continue
					}
					if fmt.Sprint(got) != fmt.Sprint(want) || status != wantStatus {
						t.Fatalf("cut at %d: the handler got %+v, want %+v; status %s, want %s (%q)", cut, got, want, status, wantStatus, mark)
					}
				}
			})
		})
	}
}
