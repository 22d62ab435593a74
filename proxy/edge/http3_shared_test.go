package edge

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge/quicshare"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// port is a UDP port that servers share, one after the other or at once.
type port struct {
	t     *testing.T
	certs *Certs
	dir   *privatedir.Dir
	addr  string // of all servers but the first
}

func newPort(t *testing.T) *port {
	certs, err := LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return &port{t: t, certs: certs, dir: privatedirtest.Open(t), addr: anyPort}
}

const anyPort = "127.0.0.1:0"

// member is a server on the port, and the number of requests that it has served.
type member struct {
	*served
	requests atomic.Int64
}

const (
	parts     = 5
	wholeBody = "part part part part part "
)

// join starts a server on the port. It answers /slow in parts, with a pause before each
// part but the first.
func (p *port) join() *member {
	p.t.Helper()
	m := &member{}
	m.served = serve(p.t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.requests.Add(1)
		body, err := io.ReadAll(r.Body)
		if err != nil || string(body) != r.Header.Get("X-Body") {
			w.WriteHeader(400)
			return
		}
		for i := range parts {
			if r.URL.Path == "/slow" && i > 0 {
				time.Sleep(3 * time.Millisecond)
			}
			io.WriteString(w, "part ")
			http.NewResponseController(w).Flush()
		}
	}), func(c *config.Config, o *Options) { c.Server.HTTP3, o.Certs, o.QUICDir = p.addr, p.certs, p.dir })
	if p.addr == anyPort {
		p.addr = m.HTTP3Addr().String()
	}
	return m
}

// call sends one request and reads the whole answer. A request that was refused as
// never begun is sent again, as often as that happens (RFC 9114 4.1.1): quic-go sends
// it again once, and on a busy machine two hand-overs can pass before a request
// begins.
func (p *port) call(h3 *http3.Transport, path string) error {
	for {
		err := p.callOnce(h3, path)
		if e := new(http3.Error); !errors.As(err, &e) || e.ErrorCode != http3.ErrCodeRequestRejected {
			return err
		}
	}
}

func (p *port) callOnce(h3 *http3.Transport, path string) error {
	body := strings.Repeat("x", 3000)
	r, err := http.NewRequest("POST", "https://"+p.addr+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("X-Body", body)
	resp, err := h3.RoundTrip(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || string(got) != wholeBody {
		return fmt.Errorf("status %d, body %q, error %v", resp.StatusCode, got, err) // it has begun
	}
	return nil
}

func newClient() *http3.Transport {
	return &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
}

// load calls until ctx ends: many requests on one connection, and each on a new one.
func (p *port) load(ctx context.Context, failures *atomic.Int64) *sync.WaitGroup {
	var wg sync.WaitGroup
	calls := func(path string, fresh bool) {
		h3 := newClient()
		defer func() { h3.Close() }()
		for ctx.Err() == nil {
			if fresh {
				h3.Close()
				h3 = newClient()
			}
			if err := p.call(h3, path); err != nil {
				failures.Add(1)
				p.t.Errorf("%s, new connection %t: %v", path, fresh, err)
			}
		}
	}
	for range 2 {
		shared := newClient()
		var users sync.WaitGroup
		for _, path := range []string{"/fast", "/slow", "/slow"} {
			users.Go(func() {
				for ctx.Err() == nil {
					if err := p.call(shared, path); err != nil {
						failures.Add(1)
						p.t.Errorf("%s, shared connection: %v", path, err)
					}
					time.Sleep(time.Millisecond)
				}
			})
		}
		wg.Go(func() {
			users.Wait()
			shared.Close()
		})
	}
	wg.Go(func() { calls("/slow", true) })
	return &wg
}

// Eight times a process takes the port over from another while clients call: none
// sees a failed request.
func TestSharedPortTakeover(t *testing.T) {
	p := newPort(t)
	now := p.join()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var failures atomic.Int64
	clients := p.load(ctx, &failures)
	for i := range 8 {
		for now.requests.Load() < 20 {
			time.Sleep(time.Millisecond)
		}
		next := p.join()
		if err := now.stop(); err != nil {
			t.Fatalf("hand-over %d: %v", i, err)
		}
		if failures.Load() > 20 {
			t.Fatal("enough")
		}
		now = next
	}
	cancel()
	clients.Wait()
}

// Processes come and die, and the kernel deals the port's packets anew each time:
// connections of the others go on, and so do new ones.
func TestSharedPortOthersGoOn(t *testing.T) {
	p := newPort(t)
	members := []*member{p.join(), p.join()}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var failures atomic.Int64
	clients := p.load(ctx, &failures)
	for range 10 {
		dies, err := quicshare.Listen(p.dir, p.addr)
		if err != nil {
			t.Fatal(err)
		}
		transport, err := dies.Transport()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := transport.ListenEarly(http3.ConfigureTLSConfig(p.certs.Config(http3.NextProtoH3)), nil); err != nil {
			t.Fatal(err)
		}
		for target := members[0].requests.Load() + members[1].requests.Load() + 20; members[0].requests.Load()+members[1].requests.Load() < target; {
			time.Sleep(time.Millisecond)
		}
		transport.Close()
		dies.UDPConn.Close() // with all that the kernel had put into it
		dies.Close()
	}
	cancel()
	clients.Wait()
	came := uint64(0)
	for _, m := range members {
		_, in, _ := m.quic.shared.conn.Counts()
		came += in
	}
	if came == 0 {
		t.Error("nothing was forwarded by those that died")
	}
}

// Handshakes have their time, and no more.
func TestSharedPortWaitsForHandshakes(t *testing.T) {
	for _, tt := range []struct {
		name string
		last time.Duration // when the last one is through
		want time.Duration
	}{
		{"none", 0, handshakesLeast},
		{"one", time.Second, time.Second},
		{"one that hangs", time.Hour, handshakesMost},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, transport := new(http3Conns), new(quic.Transport)
				h.limit(transport, newConnections(func() (all, perAddress int) { return 1, 0 }))
				conn, ended := context.WithCancel(t.Context())
				ctx, err := transport.ConnContext(conn, &quic.ClientInfo{})
				if err != nil {
					t.Fatal(err)
				}
				begun := time.Now()
				time.AfterFunc(tt.last, func() { accepted(ctx) })
				waitHandshakes(t.Context(), &h.handshaking)
				if took := time.Since(begun); took < tt.want || took > tt.want+handshakesLeast {
					t.Errorf("waited %v, want %v", took, tt.want)
				}
				ended() // after its handshake, or in it
				time.Sleep(time.Hour)
				if n := h.handshaking.Load(); n != 0 {
					t.Errorf("%d handshakes run", n)
				}
			})
		})
	}
}

// If a process ends, another process of the fleet informs its clients when they next send.
func TestSharedPortMemberDies(t *testing.T) {
	p := newPort(t)
	dies, err := quicshare.Listen(p.dir, p.addr)
	if err != nil {
		t.Fatal(err)
	}
	transport, err := dies.Transport()
	if err != nil {
		t.Fatal(err)
	}
	listener, err := transport.ListenEarly(http3.ConfigureTLSConfig(p.certs.Config(http3.NextProtoH3)), nil)
	if err != nil {
		t.Fatal(err)
	}
	p.addr = dies.LocalAddr().String()
	conn, err := quic.DialAddr(t.Context(), p.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	handshaken(t, listener, conn)
	p.join()
	transport.Close() // without a message to the client, as after a kill
	dies.Close()
	s, err := conn.OpenStream()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	<-conn.Context().Done()
	var reset *quic.StatelessResetError
	if err := context.Cause(conn.Context()); !errors.As(err, &reset) {
		t.Errorf("ended by %v", err)
	}
}

// handshaken returns when both ends know that the handshake is complete. Before, a
// client repeats long headers, which no process resets (RFC 9000, 10.3).
func handshaken(t *testing.T, listener *quic.EarlyListener, client *quic.Conn) {
	t.Helper()
	server, err := listener.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	<-server.HandshakeComplete()
	out, err := server.OpenUniStream()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Write([]byte("x")); err != nil { // behind HANDSHAKE_DONE
		t.Fatal(err)
	}
	in, err := client.AcceptUniStream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(in, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}
