package edge

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// identity is a certificate with its key.
type identity struct {
	leaf      *x509.Certificate
	key       *ecdsa.PrivateKey
	cert, pem string // PEM of the certificate and of the key
}

// newIdentity makes a certificate for localhost, signed by ca or by itself.
func newIdentity(t *testing.T, name string, ca *identity) *identity {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(1000 * time.Hour),
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: ca == nil, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	id := &identity{leaf: template, key: key}
	if ca == nil {
		ca = id
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.leaf, &key.PublicKey, ca.key)
	if err != nil {
		t.Fatal(err)
	}
	if id.leaf, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	id.cert = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	id.pem = string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}))
	return id
}

func (i *identity) tls() tls.Certificate {
	return tls.Certificate{Certificate: [][]byte{i.leaf.Raw}, PrivateKey: i.key}
}

// certFiles is a directory with the files of a configuration.
type certFiles struct {
	t   *testing.T
	dir string
}

func (f certFiles) path(name string) string { return filepath.Join(f.dir, name) }

func (f certFiles) write(name, text string) {
	f.t.Helper()
	if err := os.WriteFile(f.path(name), []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f certFiles) config() config.TLS {
	return config.TLS{Cert: f.path("cert"), Key: f.path("key")}
}

// handshake makes one handshake with c. It returns the client's view of the connection.
func handshake(c *Certs, conf *tls.Config) (tls.ConnectionState, error) {
	return handshakeWith(c.Config("h2", "http/1.1"), conf)
}

// handshakeWith uses sockets. Over a pipe two sides that write at the same time would
// wait for each other.
func handshakeWith(server, conf *tls.Config) (tls.ConnectionState, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return tls.ConnectionState{}, err
	}
	defer l.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		far, err := l.Accept()
		if err != nil {
			return
		}
		defer far.Close()
		s := tls.Server(far, server)
		if s.Handshake() == nil {
			s.Write([]byte("x"))
			s.Read(make([]byte, 1)) // until the client closes the connection
		}
	})
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return tls.ConnectionState{}, err
	}
	defer near.Close()
	client := tls.Client(near, conf)
	_, err = client.Read(make([]byte, 1)) // a client that has read a byte has its ticket, and the server has accepted its certificate
	return client.ConnectionState(), err
}

func TestSelfSigned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := LoadCerts("server.tls", config.TLS{SelfSigned: true}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		leaf, err := x509.ParseCertificate(c.own[0].Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		roots.AddCert(leaf)
		for _, name := range []string{"localhost", "127.0.0.1", "::1"} {
			s, err := handshake(c, &tls.Config{ServerName: name, RootCAs: roots, NextProtos: []string{"h2"}})
			if err != nil || s.NegotiatedProtocol != "h2" || s.Version != tls.VersionTLS13 {
				t.Errorf("%s: got %v, protocol %q", name, err, s.NegotiatedProtocol)
			}
		}
		if _, err := handshake(c, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11}); err == nil {
			t.Error("TLS 1.1 is spoken")
		}
		before := c.current.Load()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c.Run(ctx)
		if err := c.Reload(); err != nil || c.current.Load() != before {
			t.Errorf("the certificate changed without a reload: %v", err)
		}
	})
}

// The proxy reads the files again when their content changes. It uses either all new
// files or none.
func TestCertsReload(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		files := certFiles{t, dir}
		a, b := newIdentity(t, "a", nil), newIdentity(t, "b", nil)
		files.write("cert", a.cert)
		files.write("key", a.pem)
		logged := new(bytes.Buffer)
		c, err := LoadCerts("server.tls", files.config(), slog.New(slog.NewTextHandler(logged, nil)))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { c.Run(ctx); close(done) }()
		tick := func() {
			time.Sleep(certCheck + time.Millisecond)
			synctest.Wait()
		}
		expect := func(when, name string) {
			t.Helper()
			s, err := handshake(c, &tls.Config{InsecureSkipVerify: true})
			if err != nil || s.PeerCertificates[0].Subject.CommonName != name {
				t.Fatalf("%s: want the certificate of %s (%v)", when, name, err)
			}
		}
		expect("at first", "a")

		same := c.current.Load()
		files.write("cert", a.cert)
		tick()
		if c.current.Load() != same {
			t.Error("the proxy loaded the same content again")
		}

		files.write("cert", b.cert[:len(b.cert)/2])
		tick()
		expect("half a certificate", "a")
		files.write("cert", b.cert)
		tick()
		expect("the proxy uses a certificate without its key", "a")
		tick()
		if n := strings.Count(logged.String(), "cannot be used"); n != 1 {
			t.Errorf("the unusable files were logged %d times:\n%s", n, logged)
		}
		if c.Reload() == nil {
			t.Error("Reload accepts a certificate without its key")
		}
		expect("after Reload", "a")
		files.write("key", b.pem)
		tick()
		expect("both", "b")
		if !strings.Contains(logged.String(), "loaded again") || strings.Contains(logged.String(), "PRIVATE") {
			t.Errorf("logged: %s", logged)
		}

		files.write("cert", a.cert)
		files.write("key", a.pem)
		if err := c.Reload(); err != nil {
			t.Fatal(err)
		}
		expect("on demand", "a")
		if err := os.Remove(files.path("key")); err != nil {
			t.Fatal(err)
		}
		tick()
		expect("key removed", "a")
		cancel()
		<-done
	})
}

func TestCertsErrors(t *testing.T) {
	a, b := newIdentity(t, "a", nil), newIdentity(t, "b", nil)
	tests := []struct {
		name  string
		files map[string]string
		ca    bool
		want  string
	}{
		{"no certificate", map[string]string{"key": a.pem}, false, "server.tls.cert: open DIR/cert: "},
		{"no key", map[string]string{"cert": a.cert}, false, "server.tls.key: open DIR/key: "},
		{"no file", nil, false, "server.tls.cert: open DIR/cert: no such file or directory; server.tls.key: open DIR/key: no such file or directory"},
		{"no PEM in the certificate", map[string]string{"cert": "garbage", "key": a.pem}, false, "server.tls.cert: no certificate (PEM) in DIR/cert"},
		{"no PEM in the key", map[string]string{"cert": a.cert, "key": "garbage"}, false, "server.tls.key: no private key (PEM) in DIR/key"},
		{"exchanged", map[string]string{"cert": a.pem, "key": a.cert}, false, "server.tls.cert: no certificate (PEM) in DIR/cert; server.tls.key: no private key (PEM) in DIR/key"},
		{"half a certificate", map[string]string{"cert": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "key": a.pem}, false, "server.tls.cert: DIR/cert: x509: "},
		{"key of another", map[string]string{"cert": a.cert, "key": b.pem}, false, "server.tls.key: DIR/key is not the private key of DIR/cert, which server.tls.cert names: tls: "},
		{"no CA file", map[string]string{"cert": a.cert, "key": a.pem}, true, "server.tls.client_ca: open DIR/ca: "},
		{"CA file without a certificate", map[string]string{"cert": a.cert, "key": a.pem, "ca": "nothing"}, true, "server.tls.client_ca: no certificate (PEM) in DIR/ca"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			files := certFiles{t, t.TempDir()}
			for name, text := range tt.files {
				files.write(name, text)
			}
			conf := files.config()
			if tt.ca {
				conf.ClientCA = files.path("ca")
			}
			_, err := LoadCerts("server.tls", conf, slog.New(slog.DiscardHandler))
			want := strings.ReplaceAll(tt.want, "DIR", files.dir)
			if err == nil || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "PRIVATE") || strings.Contains(err.Error(), "garbage") {
				t.Errorf("got error %v, want an error that begins with %q", err, want)
			}
		})
	}
}

func TestClientCA(t *testing.T) {
	files := certFiles{t, t.TempDir()}
	ca, other, server := newIdentity(t, "ca", nil), newIdentity(t, "other", nil), newIdentity(t, "server", nil)
	files.write("cert", server.cert)
	files.write("key", server.pem)
	files.write("ca", ca.cert)
	conf := files.config()
	conf.ClientCA = files.path("ca")
	c, err := LoadCerts("server.tls", conf, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	try := func(certs ...tls.Certificate) error {
		_, err := handshake(c, &tls.Config{InsecureSkipVerify: true, Certificates: certs})
		return err
	}
	if err := try(); err == nil {
		t.Error("the proxy accepts a client without a certificate")
	}
	if err := try(newIdentity(t, "client", ca).tls()); err != nil {
		t.Errorf("the proxy rejects a client of the CA: %v", err)
	}
	if err := try(newIdentity(t, "client", other).tls()); err == nil {
		t.Error("the proxy accepts a client of another CA")
	}
	files.write("ca", other.cert)
	if err := c.Reload(); err != nil {
		t.Fatal(err)
	}
	if err := try(newIdentity(t, "client", ca).tls()); err == nil {
		t.Error("the proxy accepts a client of the removed CA")
	}
}

// A client can resume its session, also after the proxy has a new certificate. A client
// of a removed CA cannot.
func TestSessions(t *testing.T) {
	files := certFiles{t, t.TempDir()}
	ca, other, server := newIdentity(t, "ca", nil), newIdentity(t, "other", nil), newIdentity(t, "server", nil)
	files.write("cert", server.cert)
	files.write("key", server.pem)
	files.write("ca", ca.cert)
	conf := files.config()
	conf.ClientCA = files.path("ca")
	c, err := LoadCerts("server.tls", conf, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	listener := c.Config("http/1.1")
	client := &tls.Config{
		ServerName: "localhost", RootCAs: x509.NewCertPool(), ClientSessionCache: tls.NewLRUClientSessionCache(4),
		Certificates: []tls.Certificate{newIdentity(t, "client", ca).tls()},
	}
	client.RootCAs.AddCert(server.leaf)
	for i, want := range []bool{false, true, true} {
		s, err := handshakeWith(listener, client)
		if err != nil || s.DidResume != want {
			t.Errorf("handshake %d: got resumed %v, want %v (%v)", i, s.DidResume, want, err)
		}
	}
	files.write("ca", other.cert)
	if err := c.Reload(); err != nil {
		t.Fatal(err)
	}
	if s, err := handshakeWith(listener, client); err == nil {
		t.Errorf("the proxy accepts a client of the removed CA, resumed %v", s.DidResume)
	}
}

func TestCertsHammer(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		files := certFiles{t, dir}
		ids := []*identity{newIdentity(t, "a", nil), newIdentity(t, "b", nil)}
		write := func(i int) {
			files.write("cert", ids[i%2].cert)
			files.write("key", ids[i%2].pem)
		}
		write(0)
		c, err := LoadCerts("server.tls", files.config(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*certCheck)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() { c.Run(ctx) })
		wg.Go(func() {
			for i := range 20 {
				write(i)
				_ = c.Reload()
				time.Sleep(certCheck)
			}
		})
		listener := c.Config("h2")
		for range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					if _, err := handshakeWith(listener, &tls.Config{InsecureSkipVerify: true}); err != nil && !errors.Is(err, io.EOF) {
						t.Errorf("handshake: %v", err)
					}
					time.Sleep(certCheck)
				}
			})
		}
		wg.Wait()
	})
}
