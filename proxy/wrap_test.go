package proxy

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

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
)

// wrapped returns a setup whose handler is inside wrap.
func wrapped(wrap func(http.Handler, http.ResponseWriter, *http.Request)) setup {
	return setup{
		engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.stream(eventA, done) }}},
		options: func(d *Options) {
			d.Wrap = func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { wrap(h, w, r) })
			}
		},
	}
}

// A wrapper gets every public request before routing. It gets no health check and no
// admin request.
func TestWrap(t *testing.T) {
	eachProtocol(t, func(t *testing.T, _ string, start func(setup) (*world, *http.Client)) {
		w, _ := start(wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Wrapped", r.URL.Path)
			if r.URL.Path == "/nowhere" {
				r.URL.Path = completionsPath
			}
			h.ServeHTTP(w, r)
		}))
		if a := w.post("/nowhere", completions(true)); a.body != eventA+done || a.header.Get("X-Wrapped") != "/nowhere" {
			t.Errorf("%+v", a)
		}
		for _, path := range []string{"/health", "/health/"} {
			if a := w.get(path); a.status != 200 || a.header.Get("X-Wrapped") != "" {
				t.Errorf("health check %s: %+v", path, a)
			}
		}
		for _, path := range []string{"/v1/models", "/unknown"} {
			if a := w.get(path); a.header.Get("X-Wrapped") != path {
				t.Errorf("%s: %+v", path, a)
			}
		}
		if a := w.operate("GET", "/healthz", ""); a.status != 200 || a.header.Get("X-Wrapped") != "" {
			t.Errorf("admin: %+v", a)
		}
	})
}

// While there are no filters, requests do not pass the wrapper.
func TestWrapWithoutFilters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var filters atomic.Bool
		s := wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Wrapped", "yes")
			h.ServeHTTP(w, r)
		})
		wrap := s.options
		s.options = func(d *Options) {
			wrap(d)
			d.Filters = &filters
		}
		w := newWorld(t, s)
		for _, there := range []bool{false, true, false} {
			filters.Store(there)
			if a := w.post(completionsPath, completions(true)); a.body != eventA+done || (a.header.Get("X-Wrapped") != "") != there {
				t.Errorf("filters %t: %+v", there, a)
			}
		}
	})
}

// If a wrapper aborts, the proxy aborts the stream. If a wrapper panics, the proxy also
// logs the panic.
func TestWrapPanics(t *testing.T) {
	for _, v := range []any{http.ErrAbortHandler, "a filter's fault"} {
		eachProtocol(t, func(t *testing.T, _ string, start func(setup) (*world, *http.Client)) {
			w, _ := start(wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
				h.ServeHTTP(w, r)
				http.NewResponseController(w).Flush()
				panic(v)
			}))
			if a := w.post(completionsPath, completions(true)); a.err == nil || a.status != 200 || a.body != eventA+done {
				t.Errorf("%+v", a)
			}
			if a := w.get("/version"); a.err == nil {
				t.Errorf("%+v", a)
			}
			synctest.Wait()
			log := w.logged.String()
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
	o := wrapped(func(h http.Handler, w http.ResponseWriter, r *http.Request) {
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
	o.sockets, o.certs = true, certs
	o.config = func(c *config.Config) { c.Server.HTTP3 = "127.0.0.1:0" }
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
	base := "https://" + w.front.HTTP3Addr().String()
	if a := ask(t.Context(), c, "GET", base+"/mine", ""); a.body != "HTTP/3.0" || a.header.Get("Alt-Svc") != "" {
		t.Errorf("%+v", a)
	}
	if a := ask(t.Context(), c, "POST", base+completionsPath, completions(true)); a.body != eventA+done {
		t.Errorf("%+v", a)
	}
	for _, path := range []string{"/cut", "/fault"} {
		if a := ask(t.Context(), c, "GET", base+path, ""); a.err == nil {
			t.Errorf("%s: %+v", path, a)
		}
	}
	if n := strings.Count(w.logged.String(), `level=ERROR msg="panic in a handler"`); n != 1 {
		t.Errorf("got %d logged panics: %s", n, w.logged)
	}

	tcp := &http.Client{Transport: &http.Transport{TLSClientConfig: insecure}}
	defer tcp.CloseIdleConnections()
	for _, path := range []string{"/mine", "/version"} {
		if a := ask(t.Context(), tcp, "GET", "https://"+w.front.Addr().String()+path, ""); !strings.HasPrefix(a.header.Get("Alt-Svc"), `h3=":`) {
			t.Errorf("%s: %+v", path, a)
		}
	}
}
