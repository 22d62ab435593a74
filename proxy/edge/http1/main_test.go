package http1

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

func TestMain(m *testing.M) { proxytest.Main(m) }

// selfSigned makes a certificate.
func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// overTLS puts TLS on a listener and its clients.
func overTLS(t *testing.T, l net.Listener, dial func() (net.Conn, error)) (net.Listener, func() (net.Conn, error)) {
	t.Helper()
	cert := selfSigned(t)
	return &tlsAccepter{l, &tls.Config{Certificates: []tls.Certificate{cert}}}, func() (net.Conn, error) {
		c, err := dial()
		if err != nil {
			return nil, err
		}
		tc := tls.Client(c, &tls.Config{InsecureSkipVerify: true})
		return tc, tc.Handshake()
	}
}

// tlsAccepter does the handshake before it returns a connection, as the edge does.
type tlsAccepter struct {
	net.Listener
	config *tls.Config
}

func (l *tlsAccepter) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	tc := tls.Server(c, l.config)
	return tc, tc.Handshake()
}
