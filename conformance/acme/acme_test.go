package acme

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// leaf makes a handshake and returns the proxy's certificate, checked against roots unless they
// are nil.
func leaf(p *proxy, name string, roots *x509.CertPool, protocols ...string) (*x509.Certificate, error) {
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", p.addr, &tls.Config{ServerName: name, RootCAs: roots, InsecureSkipVerify: roots == nil, NextProtos: protocols})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.ConnectionState().PeerCertificates[0], nil
}

// awaitLeaf waits until 20 handshakes in succession get the certificate of a name: each worker
// reads the files of another one after at most two seconds.
func awaitLeaf(t *testing.T, p *proxy, name string, roots *x509.CertPool) *x509.Certificate {
	t.Helper()
	var found *x509.Certificate
	testbed.Eventually(t, "a certificate for "+name, func() bool {
		for range 20 {
			var err error
			if found, err = leaf(p, name, roots); err != nil {
				return false
			}
		}
		return true
	})
	return found
}

// TestIssued: each kind of process and each challenge gets one certificate for each name, with
// one order, and HTTP/3 serves the same ones. Names of clients start no order.
func TestIssued(t *testing.T) {
	for name, tt := range map[string]struct {
		challenge string
		workers   int
	}{
		"TLS-ALPN-01":          {"tls-alpn-01", 0},
		"HTTP-01":              {"http-01", 0},
		"TLS-ALPN-01, workers": {"tls-alpn-01", 3},
		"HTTP-01, workers":     {"http-01", 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, lasting)
			w.serve()
			s := setup{workers: tt.workers}
			if tt.challenge == "http-01" {
				s.acme = fmt.Sprintf("http_port = %d", w.httpPort)
				s.port = testbed.Ports(t, 1) // nothing answers TLS-ALPN-01
			}
			p := w.proxy(s)
			roots := w.roots()
			for _, name := range []string{first, second} {
				cert := awaitLeaf(t, p, name, roots)
				client := http.Client{Transport: &http3.Transport{TLSClientConfig: &tls.Config{ServerName: name, RootCAs: roots}}, Timeout: 10 * time.Second}
				resp, err := client.Get("https://" + p.addr + "/v1/models")
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				if got := resp.TLS.PeerCertificates[0]; got.SerialNumber.Cmp(cert.SerialNumber) != 0 {
					t.Errorf("%s: HTTP/3 has another certificate", name)
				}
			}
			orders := w.orders()
			if tt.challenge == "tls-alpn-01" && orders != 2 { // HTTP-01 may follow a failed TLS-ALPN-01
				t.Errorf("%d orders for 2 names", orders)
			}
			checkModes(t, w.path("storage"))
			checkStrangers(t, w, p)
		})
	}
}

// checkModes checks that other users can read nothing.
func checkModes(t *testing.T, dir string) {
	t.Helper()
	keys := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if strings.HasSuffix(path, ".key") {
			keys++
		}
		if strings.Contains(path, "/locks") { // the time of a lock, no secret
			return nil
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %o", path, info.Mode().Perm())
		}
		return nil
	})
	if err != nil || keys != 3 {
		t.Errorf("%d keys, want those of the account and of two certificates: %v", keys, err)
	}
}

// checkStrangers makes handshakes of names that are not configured. All get the first
// certificate, or none if they look like checks of the ACME server. There are no orders.
func checkStrangers(t *testing.T, w *world, p *proxy) {
	t.Helper()
	before := w.orders()
	for i := range 20 {
		name := fmt.Sprintf("n%d.attacker.example", i)
		if cert, err := leaf(p, name, nil); err != nil || cert.DNSNames[0] != first {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := leaf(p, name, nil, "acme-tls/1"); err == nil {
			t.Errorf("%s: a challenge was answered", name)
		}
	}
	if cert, err := leaf(p, "", nil); err != nil || cert.DNSNames[0] != first {
		t.Errorf("without a name: %v", err)
	}
	if _, err := leaf(p, first, nil, "acme-tls/1"); err == nil {
		t.Error("a challenge that does not run was answered")
	}
	if after := w.orders(); after != before {
		t.Errorf("%d orders for foreign names", after-before)
	}
	if log := p.log(); strings.Contains(log, "attacker") {
		t.Errorf("clients write to the log:\n%s", log)
	}
}

// TestServerFails: without a certificate the proxy names the reason, and serves operators.
func TestServerFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t, lasting)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	good := w.directory
	check := func(name, directory, keys, want string) {
		t.Run(name, func(t *testing.T) {
			w.t = t
			w.directory = directory
			p := w.proxy(setup{keys: keys})
			testbed.Eventually(t, "the log has the reason", func() bool { return strings.Contains(p.log(), want) })
			if _, err := leaf(p, first, nil); err == nil {
				t.Error("a handshake succeeded")
			}
			if resp, err := http.Get("http://" + p.admin + "/metrics"); err != nil || resp.StatusCode != http.StatusOK {
				t.Errorf("metrics: %v", err)
			} else {
				resp.Body.Close()
			}
		})
	}
	check("is down", good, "", "connection refused")
	check("is silent", "https://"+silent.Addr().String()+"/dir", "", "there is no certificate yet: TLS handshakes fail until the ACME server has issued one")
	w.t = t
	w.directory = good
	w.serve()
	check("has an unknown CA", good, "email = ''", "certificate signed by unknown authority")
	check("demands an account", good, fmt.Sprintf("directory_ca = %q", w.path("ca.pem")), "externalAccountRequired")
	w.t = t
	w.directory = good
	p := w.proxy(setup{domains: fmt.Sprintf("[%q, %q]", blocked, first)})
	awaitLeaf(t, p, first, w.roots()) // a refused name does not keep the others from theirs
	testbed.Eventually(t, "the log has the refusal", func() bool { return strings.Contains(p.log(), "rejectedIdentifier") })
}

// TestRenewed: a second proxy with the same directory renews a certificate that is due. The
// server checks the name at the first proxy, which serves the new certificate too. While the
// server is down, both keep the old one.
func TestRenewed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 15*time.Second)
	w.serve()
	domains := fmt.Sprintf("[%q]", first)
	a := w.proxy(setup{domains: domains})
	roots := w.roots()
	old := awaitLeaf(t, a, first, roots)
	time.Sleep(time.Until(old.NotAfter.Add(-4500 * time.Millisecond))) // two thirds of the life
	orders := w.orders()
	b := w.proxy(setup{domains: domains, port: testbed.Ports(t, 1)})
	for _, p := range []*proxy{a, b} {
		testbed.Eventually(t, "the renewed certificate", func() bool {
			cert, err := leaf(p, first, roots)
			return err == nil && cert.SerialNumber.Cmp(old.SerialNumber) != 0
		})
	}
	if n := w.orders() - orders; n != 1 {
		t.Errorf("%d orders for one renewal", n)
	}
	w.server.stop()
	current, err := leaf(a, first, nil)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Until(current.NotAfter.Add(-4500 * time.Millisecond)))
	c := w.proxy(setup{domains: domains, port: testbed.Ports(t, 1)})
	testbed.Eventually(t, "the log says that the old certificate stays", func() bool {
		return strings.Contains(c.log(), "the old one stays")
	})
	for _, p := range []*proxy{a, b, c} {
		if cert, err := leaf(p, first, nil); err != nil || cert.SerialNumber.Cmp(current.SerialNumber) != 0 {
			t.Errorf("not the old certificate: %v", err)
		}
	}
}

// TestTakeover: a successor serves the certificates without an order, and no handshake fails.
func TestTakeover(t *testing.T) {
	t.Parallel()
	w := newWorld(t, lasting)
	w.serve()
	p := w.proxy(setup{})
	roots := w.roots()
	cert := awaitLeaf(t, p, first, roots)
	awaitLeaf(t, p, second, roots)
	orders := w.orders()
	w.start(pdproxy, "run", "--takeover", w.path(fmt.Sprintf("config-%d.toml", w.port)))
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if got, err := leaf(p, first, roots); err != nil || got.SerialNumber.Cmp(cert.SerialNumber) != 0 {
			t.Fatalf("a handshake failed: %v", err)
		}
	}
	testbed.Eventually(t, "the old process ends", func() bool { return syscall.Kill(p.group, 0) != nil })
	if got, err := leaf(p, second, roots); err != nil || got.DNSNames[0] != second {
		t.Errorf("the successor: %v", err)
	}
	if n := w.orders() - orders; n != 0 {
		t.Errorf("%d orders of the successor", n)
	}
}
