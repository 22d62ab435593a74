package discovery

import (
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// The points of a request where a gate can hold it: before the engine gets it,
// before its answer's body, after a part of the body.
const (
	open = iota
	atRequest
	atAnswer
	inAnswer
)

// gate is a proxy in front of an engine's API. It holds requests until the test
// releases them. Probes pass.
type gate struct {
	name, role string
	engine     *enginesim.Engine
	server     *httptest.Server
	via        *http.Transport // of its own: other tests' servers close idle connections of the default one

	mu    sync.Mutex
	cond  *sync.Cond
	point int // where requests are held
	held  int
	posts int // number of requests so far
}

// startGate starts an engine behind a gate.
func startGate(t *testing.T, name, connector, role string) *gate {
	t.Helper()
	g := &gate{name: name, role: role, engine: startEngine(t, connector, role, 0), via: http.DefaultTransport.(*http.Transport).Clone()}
	g.cond = sync.NewCond(&g.mu)
	to, err := url.Parse(g.engine.URL())
	if err != nil {
		t.Fatal(err)
	}
	g.server = httptest.NewServer(&httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(to); r.Out.Host = r.In.Host },
		FlushInterval: -1, Transport: g, ErrorLog: log.New(io.Discard, "", 0),
	})
	t.Cleanup(func() {
		g.hold(open)
		g.server.CloseClientConnections()
		g.server.Close()
		g.via.CloseIdleConnections()
	})
	return g
}

// addr is the engine's address, host:port.
func (g *gate) addr() string { return g.server.Listener.Addr().String() }

// hold makes requests wait at a point from now on. Requests that wait at other
// points continue.
func (g *gate) hold(point int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.point = point
	g.cond.Broadcast()
}

// holds returns the number of waiting requests.
func (g *gate) holds() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.held
}

// asked returns the number of received requests.
func (g *gate) asked() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.posts
}

// die makes the engine's API unreachable, as when its machine fails.
func (g *gate) die() {
	g.server.CloseClientConnections()
	g.server.Close()
}

// pass waits while requests are held at a point.
func (g *gate) pass(point int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held++
	for g.point == point {
		g.cond.Wait()
	}
	g.held--
}

// RoundTrip calls the engine.
func (g *gate) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method != http.MethodPost {
		return g.via.RoundTrip(r)
	}
	g.mu.Lock()
	g.posts++
	g.mu.Unlock()
	// The server closes the request's body when the answer begins. A transport that has not seen the
	// end of the body by then closes the connection to the engine.
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	g.pass(atRequest)
	resp, err := g.via.RoundTrip(r)
	if err == nil {
		g.pass(atAnswer)
		resp.Body = &gatedBody{ReadCloser: resp.Body, g: g}
	}
	return resp, err
}

// gatedBody is held after some events.
type gatedBody struct {
	io.ReadCloser
	g    *gate
	read int // bytes
}

func (b *gatedBody) Read(p []byte) (int, error) {
	if b.read > 2<<10 {
		b.g.pass(inAnswer)
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), 256)])
	b.read += n
	return n, err
}
