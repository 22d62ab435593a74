package discovery

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// certificates are a CA and one certificate of it, which etcd and its clients use.
type certificates struct {
	ca, cert, key string // files
	client        *tls.Config
}

func newCertificates(t *testing.T) *certificates {
	t.Helper()
	dir := t.TempDir()
	c := &certificates{ca: filepath.Join(dir, "ca.pem"), cert: filepath.Join(dir, "cert.pem"), key: filepath.Join(dir, "key.pem")}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, kind string, der []byte) {
		t.Helper()
		must(os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	from, to := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: from, NotAfter: to,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	must(err)
	write(c.ca, "CERTIFICATE", caDER)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "both"}, NotBefore: from, NotAfter: to,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(nodeHost)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	must(err)
	write(c.cert, "CERTIFICATE", der)
	keyDER, err := x509.MarshalECPrivateKey(key)
	must(err)
	write(c.key, "EC PRIVATE KEY", keyDER)
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	must(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER}))
	c.client = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, RootCAs: roots}
	return c
}

func TestCertificates(t *testing.T) {
	s := startStoreWith(t, newCertificates(t))
	s.register(prefix+"b0", record("b0", "both", startEngine(t, "vllm-nixl", "both", 0)), leaseTTL)
	n := startNode(t, func(d *config.Discovery) {
		d.Etcd.Endpoints = []string{s.URL()}
		d.Etcd.CA, d.Etcd.Cert, d.Etcd.Key = s.certs.ca, s.certs.cert, s.certs.key
	})
	n.is("b0", "ready")
	stranger := startNode(t, func(d *config.Discovery) {
		d.Etcd.Endpoints, d.Etcd.CA = []string{s.URL()}, s.certs.ca
	})
	testbed.Eventually(t, "without a certificate the trouble is said", func() bool { return stranger.log.contains("discovery of engines failed") })
	if got := stranger.states(); len(got) != 0 {
		t.Errorf("engines found without a certificate: %v", got)
	}
}

func TestPassword(t *testing.T) {
	s := startStore(t)
	s.register(prefix+"b0", record("b0", "both", startEngine(t, "vllm-nixl", "both", 0)), 600)
	ctx := t.Context()
	auth := s.Client().Auth
	for _, do := range []func() error{
		func() error { _, err := auth.UserAdd(ctx, "root", "hunter2-root"); return err },
		func() error { _, err := auth.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := auth.RoleAdd(ctx, "reader"); return err },
		func() error {
			_, err := auth.RoleGrantPermission(ctx, "reader", prefix, clientv3.GetPrefixRangeEnd(prefix), clientv3.PermissionType(clientv3.PermRead))
			return err
		},
		func() error { _, err := auth.UserAdd(ctx, "pdproxy", "hunter2"); return err },
		func() error { _, err := auth.UserGrantRole(ctx, "pdproxy", "reader"); return err },
		func() error { _, err := auth.AuthEnable(ctx); return err },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	file := func(password string) string {
		path := filepath.Join(t.TempDir(), "password")
		if err := os.WriteFile(path, []byte(password+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	with := func(password string) *node {
		return startNode(t, func(d *config.Discovery) {
			d.Etcd.Endpoints, d.Etcd.Username, d.Etcd.PasswordFile = []string{s.URL()}, "pdproxy", file(password)
		})
	}
	with("hunter2").is("b0", "ready")
	wrong := with("hunter3")
	testbed.Eventually(t, "a wrong password is said", func() bool { return wrong.log.contains("authentication failed") })
	if got := wrong.states(); len(got) != 0 || wrong.log.contains("hunter") {
		t.Errorf("engines found with a wrong password: %v; log: %s", got, strings.ReplaceAll(wrong.log.text.String(), "\n", " "))
	}
}
