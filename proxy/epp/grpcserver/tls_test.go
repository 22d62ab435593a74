package grpcserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"testing"
	"testing/synctest"
	"time"
)

// certificate returns a certificate that it has signed itself.
func certificate(t *testing.T) *tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// TestTLS: a client must choose HTTP/2, and gets the certificate that is present when it connects.
func TestTLS(t *testing.T) {
	now := certificate(t)
	s := serve(t, func(o *Options) {
		o.TLS = &tls.Config{NextProtos: []string{"h2"}, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return now, nil }}
	})
	dial := func(protocols ...string) *tls.Conn {
		nc, err := s.listener.Dial()
		if err != nil {
			t.Fatal(err)
		}
		return tls.Client(nc, &tls.Config{NextProtos: protocols, InsecureSkipVerify: true})
	}
	for range 2 {
		secure := dial("h2")
		c := newClient(t, secure)
		c.hello()
		c.open(1, methodOne, false)
		c.send(1, true, long(50_000))
		if messages, end := c.answer(1); len(messages) != 1 || messages[0] != long(50_000) || end["grpc-status"] != "0" {
			t.Errorf("got %d messages, %v", len(messages), end)
		}
		if got := secure.ConnectionState().PeerCertificates[0].Raw; string(got) != string(now.Certificate[0]) {
			t.Error("the client got another certificate")
		}
		now = certificate(t)
	}
	other := dial()
	defer other.Close()
	if n, err := other.Read(make([]byte, 1)); err == nil {
		t.Errorf("a client without HTTP/2 got %d bytes", n)
	}
}

// TestHandshakeIsLimited: a client that does not go on with the handshake.
func TestHandshakeIsLimited(t *testing.T) {
	cert := certificate(t)
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, func(o *Options) {
			o.TLS = &tls.Config{NextProtos: []string{"h2"}, Certificates: []tls.Certificate{*cert}}
		})
		c := s.dial(t)
		began := time.Now()
		c.Write([]byte{22, 3, 1})
		c.ended()
		if took := time.Since(began); took != handshakeTimeout {
			t.Errorf("the connection ended after %v", took)
		}
	})
}
