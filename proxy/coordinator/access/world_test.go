package access

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// authority is a CA of a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the fleet's CA"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.cert, a.key = a.sign(t, template)
	return a
}

// sign makes a key and a certificate for it. The first certificate is the authority's.
func (a *authority) sign(t *testing.T, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	parent, by := a.cert, a.key
	if parent == nil {
		parent, by = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// files writes a certificate for 127.0.0.1, its key and its CA. change adapts the
// certificate.
func (a *authority) files(t *testing.T, dir string, change func(*x509.Certificate)) Files {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "a host"},
		NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	cert, key := a.sign(t, template)
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	f := Files{filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), filepath.Join(dir, "ca.pem")}
	for path, block := range map[string]*pem.Block{
		f.Cert: {Type: "CERTIFICATE", Bytes: cert.Raw}, f.Key: {Type: "PRIVATE KEY", Bytes: raw}, f.CA: {Type: "CERTIFICATE", Bytes: a.cert.Raw},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func credentials(t *testing.T, o Options) *Credentials {
	t.Helper()
	c, err := NewCredentials(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// door is a gate behind a listener, with a count of the refusals.
type door struct {
	gate    *Gate
	address string
	log     *testbed.Log

	mu      sync.Mutex
	refused map[string]int // by reason; guarded by mu
}

// newDoor opens a door on loopback. It calls handle for each admitted connection.
func newDoor(t *testing.T, c *Credentials, handle func(ctx context.Context, v *Visitor)) *door {
	t.Helper()
	d := &door{log: &testbed.Log{}, refused: map[string]int{}}
	log := slog.New(slog.NewTextHandler(d.log, nil))
	d.gate = NewGate(GateOptions{Credentials: c, Log: log, OnRefused: func(reason string) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.refused[reason]++
	}})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d.address = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := Accept(ctx, l, log, func(nc net.Conn) {
			if v := d.gate.Receive(ctx, nc); v != nil {
				handle(ctx, v)
			}
		}); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		serving.Wait()
		d.gate.mu.Lock()
		defer d.gate.mu.Unlock()
		if d.gate.all != 0 || len(d.gate.unproven) != 0 {
			t.Errorf("%d connections are still counted, of %v", d.gate.all, d.gate.unproven)
		}
	})
	return d
}

func (d *door) count(reason string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.refused[reason]
}

// eventually waits for a condition. Its time limit is no claim about speed.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}
