package world

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Engine is an engine whose answers are bytes of the test. Each write waits until the
// proxy has read it, so each write is one read.
type Engine struct {
	Name      string        // "": "e"
	At        string        // host and port; "": NAME.test:80
	Role      string        // "": both
	Connector string        // "": none
	Key       string        // Authorization that the proxy should send
	Models    string        // models of GET /v1/models; "": m
	Cards     string        // further members of the first model of GET /v1/models
	Release   string        // version of GET /version; "": there is no such route
	Ranks     int           // 0: 1
	Refuse    bool          // the engine accepts no connection
	Remote    bool          // a [[remote]] of the configuration has the address of the engine
	Dialing   error         // error of a dial for a leg; nil: the dial succeeds
	Blocks    int           // tokens of a KV block in its events; 0: it has no events
	Priority  string        // order of priorities in the engine; "": none
	KVHosts   string        // other hosts of the engine; "": the proxy trusts the host in its answers
	KVLease   time.Duration // kv_lease_duration
	Labels    config.Labels // "": none

	Bidirectional bool
	Serve         func(c *Conn, nth int) // answers the nth request, counted from 1; nil: the engine reads requests and answers none

	t     *testing.T
	mu    sync.Mutex
	wg    sync.WaitGroup // of the connections
	legs  []Leg          // guarded by mu
	still chan struct{}  // guarded by mu; closed when the engine resumes; nil: the engine is not stopped
	ended bool           // guarded by mu; the process has ended
}

// Host returns host and port of the engine.
func (e *Engine) Host() string { return or(e.At, or(e.Name, "e")+".test:80") }

// Spec returns the configuration of the engine.
func (e *Engine) Spec() config.Engine {
	s := config.DefaultEngine()
	s.Name, s.Role, s.Connector, s.APIKeyFile = or(e.Name, "e"), or(e.Role, "both"), or(e.Connector, "none"), e.Key
	s.URL, s.Ranks, s.Bidirectional = "http://"+e.Host(), max(e.Ranks, 1), e.Bidirectional
	s.Priority, s.Labels = e.Priority, e.Labels
	s.KVHosts, s.KVLeaseDuration = e.KVHosts, config.Duration(e.KVLease)
	if s.MoRIIO() {
		s.KVAddress = "host:10.0.0.5,handshake:6301,notify:61005"
	}
	if s.Pushes() {
		s.EngineID, s.SideChannel = "push", "10.0.0.5:5600"
	}
	if s.BlockTokens = e.Blocks; e.Blocks > 0 {
		s.KVEvents = "tcp://" + e.Host()
	}
	return s
}

func or(s, instead string) string {
	if s == "" {
		return instead
	}
	return s
}

// Seen returns the received requests.
func (e *Engine) Seen() []Leg {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]Leg(nil), e.legs...)
}

// Wait waits until no connection to the engine is open.
func (e *Engine) Wait() { e.wg.Wait() }

// End makes the host of the engine refuse connections.
func (e *Engine) End() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = true
}

// Begin makes the engine serve again after End.
func (e *Engine) Begin() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = false
}

// Stop makes the engine answer nothing, until the caller calls the returned function.
func (e *Engine) Stop() (proceed func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	still := make(chan struct{})
	e.still = still
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.still = nil
		close(still)
	}
}

// Stopped returns a channel that is closed while the engine is not stopped.
func (e *Engine) Stopped() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.still != nil {
		return e.still
	}
	runs := make(chan struct{})
	close(runs)
	return runs
}

func (e *Engine) dial(context.Context, string, string) (net.Conn, error) {
	e.mu.Lock()
	ended := e.ended
	e.mu.Unlock()
	switch {
	case ended:
		return nil, syscall.ECONNREFUSED
	case e.Refuse:
		return nil, errors.New("connection refused")
	}
	if e.Dialing != nil {
		return nil, e.Dialing
	}
	client, server := net.Pipe()
	e.wg.Go(func() {
		defer server.Close()
		c := &Conn{Conn: server, br: bufio.NewReader(server), E: e}
		for c.next() && e.Serve != nil {
			e.mu.Lock()
			nth := len(e.legs)
			e.mu.Unlock()
			if e.Serve(c, nth); c.Over {
				return
			}
		}
	})
	return client, nil
}

// Leg is one request that an engine received.
type Leg struct {
	Method string
	Path   string
	Query  string
	Header http.Header
	Body   string
}

// Conn is the engine's end of one connection.
type Conn struct {
	net.Conn
	br   *bufio.Reader
	E    *Engine
	Leg  Leg
	Over bool // the engine closes the connection
}

// next reads one whole request. It returns false if the proxy has closed the connection.
func (c *Conn) next() bool {
	r, err := http.ReadRequest(c.br)
	if err != nil {
		return false
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return false
	}
	c.Leg = Leg{r.Method, r.URL.Path, r.URL.RawQuery, r.Header, string(body)}
	c.E.mu.Lock()
	c.E.legs = append(c.E.legs, c.Leg)
	c.E.mu.Unlock()
	return true
}

// Send writes pieces. Each piece is one read of the proxy.
func (c *Conn) Send(pieces ...string) {
	for _, p := range pieces {
		if p != "" { // a write of 0 bytes to a pipe would wait for a reader
			io.WriteString(c, p)
		}
	}
}

// Chunks writes each piece as one chunk and one read.
func (c *Conn) Chunks(pieces ...string) {
	for _, p := range pieces {
		c.Send(fmt.Sprintf("%x\r\n%s\r\n", len(p), p))
	}
}

// Stream sends a whole stream.
func (c *Conn) Stream(pieces ...string) {
	c.Send(StreamHead)
	c.Chunks(pieces...)
	c.Send("0\r\n\r\n")
}

// JSON sends a JSON answer.
func (c *Conn) JSON(status int, body string) {
	c.Send(fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, http.StatusText(status), len(body), body))
}

// HangUp closes the connection.
func (c *Conn) HangUp() { c.Over = true }

// Hold sends nothing until the proxy closes the connection.
func (c *Conn) Hold() {
	io.Copy(io.Discard, c)
	c.Over = true
}

// Probes answers the probes of all engines.
type Probes map[string]*Engine

// RoundTrip implements http.RoundTripper.
func (p Probes) RoundTrip(r *http.Request) (*http.Response, error) {
	e := p[r.URL.Hostname()+":80"] // for any port: a bootstrap server belongs to the same engine
	if e == nil {
		return nil, errors.New("connection refused")
	}
	e.mu.Lock()
	ended := e.ended
	e.mu.Unlock()
	if ended {
		return nil, syscall.ECONNREFUSED
	}
	select {
	case <-e.Stopped():
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	resp := &http.Response{StatusCode: 404, Header: http.Header{}, Body: http.NoBody, Request: r}
	switch r.URL.Path {
	case "/health":
		resp.StatusCode = 200
	case "/v1/models":
		resp.StatusCode = 200
		var list []string
		for m := range strings.SplitSeq(or(e.Models, "m"), ",") {
			list = append(list, fmt.Sprintf(`{"id":%q}`, m))
		}
		if e.Cards != "" {
			list[0] = strings.Replace(list[0], "}", ","+e.Cards+"}", 1)
		}
		resp.Body = io.NopCloser(strings.NewReader(`{"data":[` + strings.Join(list, ",") + `]}`))
	case "/version":
		if e.Release != "" {
			resp.StatusCode = 200
			resp.Body = io.NopCloser(strings.NewReader(fmt.Sprintf(`{"version":%q}`, e.Release)))
		}
	}
	return resp, nil
}
