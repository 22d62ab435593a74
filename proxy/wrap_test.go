package proxy_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// A wrapper gets every public request before routing. It gets no health check and no
// admin request.
func TestWrap(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
		w, _ := start(world.Wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Wrapped", r.URL.Path)
			if r.URL.Path == "/nowhere" {
				r.URL.Path = world.CompletionsPath
			}
			h.ServeHTTP(w, r)
		}))
		if a := w.Post("/nowhere", world.Completions(true)); a.Body != world.EventA+world.Done || a.Header.Get("X-Wrapped") != "/nowhere" {
			t.Errorf("%+v", a)
		}
		for _, path := range []string{"/health", "/health/"} {
			if a := w.Get(path); a.Status != 200 || a.Header.Get("X-Wrapped") != "" {
				t.Errorf("health check %s: %+v", path, a)
			}
		}
		for _, path := range []string{"/v1/models", "/unknown"} {
			if a := w.Get(path); a.Header.Get("X-Wrapped") != path {
				t.Errorf("%s: %+v", path, a)
			}
		}
		if a := w.Operate("GET", "/healthz", ""); a.Status != 200 || a.Header.Get("X-Wrapped") != "" {
			t.Errorf("admin: %+v", a)
		}
	})
}

// While there are no filters, requests do not pass the wrapper.
func TestWrapWithoutFilters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var filters atomic.Bool
		s := world.Wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Wrapped", "yes")
			h.ServeHTTP(w, r)
		})
		wrap := s.Options
		s.Options = func(d *proxy.Options) {
			wrap(d)
			d.Filters = &filters
		}
		w := newWorld(t, s)
		for _, there := range []bool{false, true, false} {
			filters.Store(there)
			if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Body != world.EventA+world.Done || (a.Header.Get("X-Wrapped") != "") != there {
				t.Errorf("filters %t: %+v", there, a)
			}
		}
	})
}

// If a wrapper aborts, the proxy aborts the stream. If a wrapper panics, the proxy also
// logs the panic.
func TestWrapPanics(t *testing.T) {
	for _, v := range []any{http.ErrAbortHandler, "a filter's fault"} {
		eachProtocol(t, func(t *testing.T, _ string, start func(world.Setup) (*world.World, *http.Client)) {
			w, _ := start(world.Wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
				h.ServeHTTP(w, r)
				http.NewResponseController(w).Flush()
				panic(v)
			}))
			if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Err == nil || a.Status != 200 || a.Body != world.EventA+world.Done {
				t.Errorf("%+v", a)
			}
			if a := w.Get("/version"); a.Err == nil {
				t.Errorf("%+v", a)
			}
			synctest.Wait()
			log := w.Logged.String()
			if got := strings.Contains(log, `level=ERROR msg="panic in a handler" method=POST panic="a filter's fault"`); got != (v != http.ErrAbortHandler) {
				t.Error(log)
			}
			if strings.Contains(log, "panic serving") {
				t.Error("told twice")
			}
		})
	}
}

// The same handler answers over HTTP/3. Answers over TCP announce HTTP/3, also the
// answers of a wrapper.
func TestWrapHTTP3(t *testing.T) {
	certs, err := edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	o := world.Wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/mine":
			io.WriteString(w, r.Proto)
			return
		case "/cut", "/fault":
			io.WriteString(w, "half")
			http.NewResponseController(w).Flush()
			if r.URL.Path == "/fault" {
				panic(errors.New("a filter's fault"))
			}
			panic(http.ErrAbortHandler)
		}
		h.ServeHTTP(w, r)
	})
	o.Sockets, o.Certs = true, certs
	o.Config = func(c *config.Config) { c.Server.HTTP3 = "127.0.0.1:0" }
	w := newWorld(t, o)
	insecure := &tls.Config{InsecureSkipVerify: true}

	h3 := &http3.Transport{TLSClientConfig: insecure, Dial: func(ctx context.Context, addr string, tc *tls.Config, qc *quic.Config) (*quic.Conn, error) {
		c, err := quic.DialAddrEarly(ctx, addr, tc, qc)
		if err == nil { // the transport drops a connection after a reset stream
			t.Cleanup(func() { c.CloseWithError(0, "") })
		}
		return c, err
	}}
	defer h3.Close()
	c := &http.Client{Transport: h3}
	base := "https://" + w.Front.HTTP3Addr().String()
	if a := world.Ask(t.Context(), c, "GET", base+"/mine", ""); a.Body != "HTTP/3.0" || a.Header.Get("Alt-Svc") != "" {
		t.Errorf("%+v", a)
	}
	if a := world.Ask(t.Context(), c, "POST", base+world.CompletionsPath, world.Completions(true)); a.Body != world.EventA+world.Done {
		t.Errorf("%+v", a)
	}
	for _, path := range []string{"/cut", "/fault"} {
		if a := world.Ask(t.Context(), c, "GET", base+path, ""); a.Err == nil {
			t.Errorf("%s: %+v", path, a)
		}
	}
	if n := strings.Count(w.Logged.String(), `level=ERROR msg="panic in a handler"`); n != 1 {
		t.Errorf("got %d logged panics: %s", n, w.Logged)
	}

	tcp := &http.Client{Transport: &http.Transport{TLSClientConfig: insecure}}
	defer tcp.CloseIdleConnections()
	for _, path := range []string{"/mine", "/version"} {
		if a := world.Ask(t.Context(), tcp, "GET", "https://"+w.Front.Addr().String()+path, ""); !strings.HasPrefix(a.Header.Get("Alt-Svc"), `h3=":`) {
			t.Errorf("%s: %+v", path, a)
		}
	}
}
