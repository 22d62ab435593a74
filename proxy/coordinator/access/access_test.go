package access

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
)

// echo sends one byte to a peer that the gate admits.
func echo(_ context.Context, v *Visitor) {
	if !v.Admit() {
		return
	}
	defer v.Conn.Close()
	b := make([]byte, 1)
	if _, err := io.ReadFull(v.Conn, b); err == nil {
		v.Conn.Write(b)
	}
}

// try dials as a worker does. It returns nil if the gate has admitted the connection.
func try(t *testing.T, c *Credentials, address string) error {
	t.Helper()
	nc, err := c.Dial(t.Context(), address)
	if err != nil {
		return err
	}
	defer nc.Close()
	if _, err := nc.Write([]byte("x")); err != nil {
		return err
	}
	_, err = io.ReadFull(nc, make([]byte, 1)) // the first sign that the server accepts the client's certificate
	return err
}

// TestCertificates: both sides require a certificate of their CA, for the dialled
// address and with the right key usage.
func TestCertificates(t *testing.T) {
	ours, others := newAuthority(t), newAuthority(t)
	of := func(a *authority, change func(*x509.Certificate)) Files { return a.files(t, t.TempDir(), change) }
	good := of(ours, nil)
	expired := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Hour) }
	mixed := of(others, nil)
	mixed.CA = good.CA // presents a certificate of another CA, and trusts ours
	for _, tt := range []struct {
		name                string
		coordinator, worker Files
		want                string // in the worker's error; "" for none
	}{
		{"of one CA", good, of(ours, nil), ""},
		{"the worker's of another CA", good, mixed, "tls: "},
		{"the worker's expired", good, of(ours, expired), "tls: "},
		{"the worker's not for clients", good, of(ours, func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[:1] }), "tls: "},
		{"the worker has none", good, Files{}, "tls: "},
		{"the coordinator's of another CA", of(others, nil), of(ours, nil), "unknown authority"},
		{"the coordinator's expired", of(ours, expired), of(ours, nil), "expired"},
		{"the coordinator's for another host", of(ours, func(c *x509.Certificate) { c.IPAddresses[0] = net.IPv4(127, 0, 0, 2) }), of(ours, nil), "127.0.0.2"},
		{"the coordinator's not for servers", of(ours, func(c *x509.Certificate) { c.ExtKeyUsage = c.ExtKeyUsage[1:] }), of(ours, nil), "key usage"},
		{"the coordinator has none", Files{}, good, "certificate"},
		{"nobody has one", Files{}, Files{}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDoor(t, credentials(t, Options{Files: tt.coordinator}), echo)
			err := try(t, credentials(t, Options{Files: tt.worker}), d.address)
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if err != nil {
				eventually(t, "it is counted", func() bool { return d.count(ReasonTLS) == 1 })
			}
		})
	}
}

// TestCertificatesChange: a handshake uses the content that the files have when it
// begins. While a file cannot be used, handshakes use the former content.
func TestCertificatesChange(t *testing.T) {
	old, next := newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	c := credentials(t, Options{Files: old.files(t, dir, nil)})
	d := newDoor(t, c, echo)
	aged := func() { // as if the files had been read long ago
		c.mu.Lock()
		defer c.mu.Unlock()
		c.looked = time.Time{}
	}
	before := credentials(t, Options{Files: old.files(t, t.TempDir(), nil)})
	after := credentials(t, Options{Files: next.files(t, t.TempDir(), nil)})
	check := func(what string, want *Credentials) {
		t.Helper()
		aged()
		for _, w := range []*Credentials{before, after} {
			if err := try(t, w, d.address); (err == nil) != (w == want) {
				t.Errorf("%s: try(w, d.address) = %v", what, err)
			}
		}
	}
	check("at first", before)
	if err := os.WriteFile(c.files.Key, []byte("half of"), 0o600); err != nil {
		t.Fatal(err)
	}
	check("with half a key", before)
	next.files(t, dir, nil)
	check("with other files", after)
	for _, f := range []Files{{"none", "none", "none"}, {c.files.Cert, c.files.Key, c.files.Key}, {c.files.Cert, c.files.Cert, c.files.CA}} {
		if _, err := NewCredentials(Options{Files: f}); err == nil {
			t.Errorf("%v can be used", f)
		}
	}
}

// TestOldTLS: both sides refuse earlier versions of TLS. There is no resumption.
func TestOldTLS(t *testing.T) {
	c := credentials(t, Options{})
	d := newDoor(t, c, echo)
	old := &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12, NextProtos: []string{Protocol}}
	if nc, err := tls.Dial("tcp", d.address, old); err == nil {
		nc.Close()
		t.Error("the gate accepts TLS 1.2")
	}
	eventually(t, "it is counted", func() bool { return d.count(ReasonTLS) == 1 })

	cache := tls.NewLRUClientSessionCache(4)
	again := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{Protocol}, ClientSessionCache: cache, ServerName: "x"}
	for range 2 {
		nc, err := tls.Dial("tcp", d.address, again)
		if err != nil {
			t.Fatal(err)
		}
		nc.Write([]byte("x"))
		io.ReadFull(nc, make([]byte, 1))
		if nc.ConnectionState().DidResume {
			t.Error("a session is resumed")
		}
		nc.Close()
	}

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	m := c.current()
	for name, conf := range map[string]*tls.Config{
		"version":           {Certificates: []tls.Certificate{m.cert}, MaxVersion: tls.VersionTLS12, NextProtos: []string{Protocol}},
		"negotiate ALPN":    {Certificates: []tls.Certificate{m.cert}},
		"no coordinator":    {Certificates: []tls.Certificate{m.cert}, NextProtos: []string{"http/1.1"}},
		"does not use TLS":  nil,
		"of an earlier ver": nil,
	} {
		var serving sync.WaitGroup
		serving.Go(func() {
			nc, err := l.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			defer nc.Close()
			if conf == nil { // as a coordinator of version 2 does
				io.WriteString(nc, "HTTP/1.1 400 Bad Request\r\n\r\n")
				io.Copy(io.Discard, nc)
				return
			}
			s := tls.Server(nc, conf)
			s.Handshake()
			io.Copy(io.Discard, s)
		})
		if _, err := c.Dial(t.Context(), l.Addr().String()); err == nil {
			t.Errorf("%s: a worker accepts the server as a coordinator", name)
		} else if conf == nil && !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want %q", err, name)
		}
		serving.Wait()
	}
}

// TestUnprovenAreBounded: the number of unauthenticated connections is bounded in all
// and for each address. So one host cannot lock out the others.
func TestUnprovenAreBounded(t *testing.T) {
	g := NewGate(GateOptions{})
	address := func(nc net.IP) *net.TCPAddr { return &net.TCPAddr{IP: nc, Port: 1} }
	var entered int
	for range maxUnprovenOfOne + 5 {
		if g.enter(addressOf(from{nil, address(net.IPv4(10, 0, 0, 1))})) {
			entered++
		}
	}
	if entered != maxUnprovenOfOne {
		t.Errorf("the gate admits %d connections of one address", entered)
	}
	for n := range 1000 { // one host with many addresses of its own
		if g.enter(addressOf(from{nil, address(net.IP{0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, byte(n >> 8), byte(n)})})) {
			entered++
		}
	}
	if entered != 2*maxUnprovenOfOne {
		t.Errorf("the gate admits %d connections of two hosts", entered)
	}
	for n := range 1000 {
		if g.enter(addressOf(from{nil, address(net.IPv4(10, 1, byte(n>>8), byte(n)))})) {
			entered++
		}
	}
	if entered != maxUnproven {
		t.Errorf("the gate admits %d connections", entered)
	}
	if !g.enter(addressOf(from{nil, &net.UnixAddr{Name: "s"}})) {
		t.Error("connections of other hosts keep out a worker of this host")
	}
}

// from is a connection with a given remote address.
type from struct {
	net.Conn
	address net.Addr
}

func (f from) RemoteAddr() net.Addr { return f.address }

// TestSilentStrangers: the gate cuts silent connections at the time limit and does not
// log them.
func TestSilentStrangers(t *testing.T) {
	d := newDoor(t, credentials(t, Options{}), echo)
	said := map[string][]byte{"nothing": nil, "a byte": {handshake}, "a head": {handshake, 3, 1, 0x3f, 0xff, 1, 0, 0x3f}}
	var cut sync.WaitGroup
	for name, b := range said {
		cut.Go(func() {
			nc, err := net.Dial("tcp", d.address)
			if err != nil {
				t.Error(err)
				return
			}
			defer nc.Close()
			nc.Write(b)
			began := time.Now()
			if _, err := io.Copy(io.Discard, nc); err != nil {
				t.Errorf("%s: io.Copy(io.Discard, nc) = %v, want nil", name, err)
			}
			if took := time.Since(began); took < GreetingLimit/2 {
				t.Errorf("%s: cut after %v", name, took)
			}
		})
	}
	cut.Wait()
	eventually(t, "all are counted", func() bool { return d.count(ReasonSilent) == 1 && d.count(ReasonTLS) == 2 })
	if n := strings.Count(d.log.String(), "refused"); n != 1 {
		t.Errorf("%d lines: %s", n, d.log)
	}
}

// TestHTTPS: with certificates, HTTP callers reach the queue over TLS. A caller needs a
// certificate if no token authenticates the caller.
func TestHTTPS(t *testing.T) {
	ours := newAuthority(t)
	files := ours.files(t, t.TempDir(), nil)
	for _, tt := range []struct {
		name        string
		o           Options
		shows, gets bool
	}{
		{"bearer", Options{Files: files, Bearer: true}, false, true},
		{"no proof", Options{Files: files}, false, false},
		{"certificate", Options{Files: files}, true, true},
		{"no certificates here", Options{Bearer: true}, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			q := NewQueue()
			d := newDoor(t, credentials(t, tt.o), func(ctx context.Context, v *Visitor) {
				if !v.HTTP {
					t.Error("Visitor.HTTP = false")
				}
				q.Offer(ctx, v)
			})
			l := q.Listener(&net.TCPAddr{})
			server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "hello") })}
			var serving sync.WaitGroup
			serving.Go(func() { server.Serve(l) })
			defer serving.Wait()
			defer server.Close()
			conf := &tls.Config{RootCAs: x509.NewCertPool()}
			conf.RootCAs.AddCert(ours.cert)
			if tt.shows {
				pair, err := tls.LoadX509KeyPair(files.Cert, files.Key)
				if err != nil {
					t.Fatal(err)
				}
				conf.Certificates = []tls.Certificate{pair}
			}
			transport := &http.Transport{TLSClientConfig: conf}
			defer transport.CloseIdleConnections()
			client := &http.Client{Transport: transport}
			resp, err := client.Get("https://" + d.address)
			if (err == nil) != tt.gets {
				t.Fatalf("over TLS: %v", err)
			}
			if err == nil {
				resp.Body.Close()
			}
			plain, err := client.Get("http://" + d.address)
			if err != nil {
				t.Fatal(err)
			}
			plain.Body.Close()
		})
	}
}

// TestExposed: Exposed reports unencrypted connections between two hosts.
func TestExposed(t *testing.T) {
	here, there := net.IPv4(10, 0, 0, 1), net.IPv4(10, 0, 0, 2)
	for _, tt := range []struct {
		conn net.Conn
		want bool
	}{
		{ends{remote: &net.TCPAddr{IP: there}, local: &net.TCPAddr{IP: here}}, true},
		{ends{remote: &net.TCPAddr{IP: here}, local: &net.TCPAddr{IP: here}}, false},
		{ends{remote: &net.TCPAddr{IP: net.IPv6loopback}, local: &net.TCPAddr{IP: here}}, false},
		{ends{remote: &net.UnixAddr{}, local: &net.UnixAddr{}}, false},
		{link.Client(ends{remote: &net.TCPAddr{IP: there}, local: &net.TCPAddr{IP: here}}, &tls.Config{ServerName: "x"}), false},
	} {
		if c := (&httpConn{Conn: tt.conn}); c.Exposed() != tt.want {
			t.Errorf("%v: %v", tt.conn.RemoteAddr(), c.Exposed())
		}
	}
}

type ends struct {
	net.Conn
	remote, local net.Addr
}

func (e ends) RemoteAddr() net.Addr { return e.remote }
func (e ends) LocalAddr() net.Addr  { return e.local }

// TestQueueIsBounded: the queue closes a connection that the server does not accept.
func TestQueueIsBounded(t *testing.T) {
	q := NewQueue()
	d := newDoor(t, nil, func(ctx context.Context, v *Visitor) { q.Offer(ctx, v) })
	nc, err := net.Dial("tcp", d.address)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	io.WriteString(nc, "G")
	if n, err := nc.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}
