package world

import (
	"bytes"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
)

// overTCP are the protocols of the TCP listener.
var overTCP = []struct {
	name   string
	tls    bool
	choose func(*http.Protocols)
	proto  string
}{
	{"h1", false, func(p *http.Protocols) { p.SetHTTP1(true) }, "HTTP/1.1"},
	{"h2c", false, func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) }, "HTTP/2.0"},
	{"tls h1", true, func(p *http.Protocols) { p.SetHTTP1(true) }, "HTTP/1.1"},
	{"tls h2", true, func(p *http.Protocols) { p.SetHTTP2(true) }, "HTTP/2.0"},
}

// EachProtocol runs f in a synctest bubble for each protocol. open makes the world and
// the client of the protocol.
func EachProtocol(t *testing.T, f func(t *testing.T, proto string, open func(Setup) (*World, *http.Client))) {
	for _, p := range overTCP {
		t.Run(p.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f(t, p.proto, func(o Setup) (*World, *http.Client) {
					scheme := "http"
					if p.tls {
						scheme = "https"
						var err error
						if o.Certs, err = edge.LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler)); err != nil {
							t.Fatal(err)
						}
					}
					w := New(t, o)
					var protocols http.Protocols
					p.choose(&protocols)
					tr := w.transport(&protocols, &tls.Config{InsecureSkipVerify: true})
					if p.tls {
						tr.DialContext = w.dialBuffered
					}
					w.Client = &http.Client{Transport: withScheme{scheme, tr}}
					return w, w.Client
				})
			})
		})
	}
}

// withScheme sends every request with a scheme.
type withScheme struct {
	scheme string
	*http.Transport
}

func (s withScheme) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Scheme = s.scheme
	return s.Transport.RoundTrip(r)
}

// dialBuffered is dialPublic for TLS. Both ends of TLS write a last record at the same
// time. On a plain pipe each would wait until the other reads.
func (w *World) dialBuffered(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := w.DialPublic(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	h := &bufferedConn{Conn: c, out: make(chan []byte, 64), gone: make(chan struct{})}
	go h.run()
	return h, nil
}

// bufferedConn is the end of a pipe whose writes do not wait for a reader, like the
// writes of a socket.
type bufferedConn struct {
	net.Conn
	out  chan []byte
	gone chan struct{}
	once sync.Once
}

func (c *bufferedConn) run() {
	for {
		select {
		case b := <-c.out:
			c.Conn.Write(b)
		case <-c.gone:
			return
		}
	}
}

// Write implements net.Conn.
func (c *bufferedConn) Write(p []byte) (int, error) {
	select {
	case c.out <- bytes.Clone(p):
		return len(p), nil
	case <-c.gone:
		return 0, net.ErrClosed
	}
}

// Close implements net.Conn.
func (c *bufferedConn) Close() error {
	c.once.Do(func() { close(c.gone) })
	return c.Conn.Close()
}
