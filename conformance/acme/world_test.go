package acme

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// Names of the certificates. Pebble refuses the last one.
const first, second, blocked = "llm.example.org", "chat.example.org", "blocked.example.org"

// The external account that Pebble demands.
const eabID, eabKey = "kid-1", "zWNDZM6eQGHWpSRTPal5eIUYFTu7EajVIoguysqZ9wG44nMEtx3MUAsUDkMTQ12W"

// world is an ACME server with its DNS server, and the addresses of the proxy.
type world struct {
	t         *testing.T
	dir       string
	port      int    // of the proxy's TLS, and of TLS-ALPN-01
	httpPort  int    // of HTTP-01
	directory string // URL
	server    *process
	manage    string // Pebble's address for its roots
	config    string // file of Pebble
	dns       string // address
}

// lasting is a validity with which no certificate is renewed in a test: Pebble proposes a renewal
// after two thirds of the validity, a day earlier or later.
const lasting = 90 * 24 * time.Hour

// newWorld starts the DNS server. validity is the life of a certificate.
func newWorld(t *testing.T, validity time.Duration) *world {
	t.Helper()
	p := testbed.Ports(t, 6)
	addr := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", p+i) }
	w := &world{t: t, dir: t.TempDir(), port: p, httpPort: p + 1, directory: "https://" + addr(2) + "/dir", manage: addr(3), dns: addr(4)}
	w.authority()
	w.write("eab", eabKey+"\n")
	text, err := json.Marshal(map[string]any{"pebble": map[string]any{
		"listenAddress": addr(2), "managementListenAddress": addr(3), "certificate": w.path("ca.pem"), "privateKey": w.path("ca.key"),
		"httpPort": w.httpPort, "tlsPort": w.port, "keyAlgorithm": "ecdsa", "retryAfter": map[string]int{"authz": 1, "order": 1},
		"externalAccountBindingRequired": true, "externalAccountMACKeys": map[string]string{eabID: eabKey},
		"domainBlocklist": []string{blocked},
		"profiles":        map[string]any{"default": map[string]any{"description": "d", "validityPeriod": int(validity.Seconds())}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	w.config = w.write("pebble.json", string(text))
	w.start(dnsServer, "-defaultIPv6", "", "-dnsserver", w.dns, "-doh", "", "-http01", "", "-https01", "", "-tlsalpn01", "", "-management", addr(5))
	testbed.Eventually(t, "the DNS server answers", func() bool { return listens(addr(5)) })
	return w
}

// serve starts Pebble.
func (w *world) serve() {
	w.t.Helper()
	w.server = w.start(pebble, "-config", w.config, "-dnsserver", w.dns)
	testbed.Eventually(w.t, "Pebble answers", func() bool { return listens(w.manage) })
}

func listens(addr string) bool {
	c, err := net.Dial("tcp", addr)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// orders returns how many orders the server has got.
func (w *world) orders() int { return strings.Count(w.server.log(), "POST /order-plz ") }

// roots returns the CA of the issued certificates.
func (w *world) roots() *x509.CertPool {
	w.t.Helper()
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	resp, err := client.Get("https://" + w.manage + "/roots/0")
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	pool := x509.NewCertPool()
	if err != nil || !pool.AppendCertsFromPEM(text) {
		w.t.Fatalf("no root: %v %s", err, text)
	}
	return pool
}

func (w *world) path(name string) string { return filepath.Join(w.dir, name) }

func (w *world) write(name, text string) string {
	w.t.Helper()
	if err := os.WriteFile(w.path(name), []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return w.path(name)
}

// authority writes the certificate of the ACME server itself.
func (w *world) authority() {
	w.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		w.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "private CA"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		w.t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		w.t.Fatal(err)
	}
	w.write("ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	w.write("ca.key", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})))
}

// setup is the part of a proxy's configuration that differs between tests.
type setup struct {
	port    int    // of TLS and HTTP/3; 0: that of the world
	domains string // TOML; "": first and second
	acme    string // further keys of [server.acme]
	keys    string // in the place of directory_ca and the external account
	workers int
}

// proxy is a running pdproxy.
type proxy struct {
	*process
	addr, admin string
}

// proxy starts a pdproxy and waits until it serves operators.
func (w *world) proxy(s setup) *proxy {
	w.t.Helper()
	if s.port == 0 {
		s.port = w.port
	}
	if s.domains == "" {
		s.domains = fmt.Sprintf("[%q, %q]", first, second)
	}
	if s.keys == "" {
		s.keys = fmt.Sprintf("directory_ca = %q\neab_key_id = %q\neab_key_file = %q", w.path("ca.pem"), eabID, w.path("eab"))
	}
	addr, admin := fmt.Sprintf("127.0.0.1:%d", s.port), testbed.FreeAddr(w.t)
	config := w.write(fmt.Sprintf("config-%d.toml", s.port), fmt.Sprintf(`
[server]
listen = %q
http3 = %[1]q
drain_timeout = "1s"
takeover_timeout = "1s"
[server.acme]
domains = %s
storage = %q
directory = %q
%s
%s
[admin]
listen = %q
[fleet]
workers = %d
dir = %q
[[engine]]
name = "e"
url = "http://127.0.0.1:1"
role = "both"
connector = "none"
`, addr, s.domains, w.path("storage"), w.directory, s.acme, s.keys, admin, s.workers, w.path(fmt.Sprintf("run-%d", s.port))))
	p := &proxy{w.start(pdproxy, "run", config), addr, admin}
	testbed.Eventually(w.t, "the proxy serves operators", func() bool {
		resp, err := http.Get("http://" + admin + "/healthz")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil && resp.StatusCode == http.StatusOK
	})
	return p
}

// process is a started program, and the processes that it starts.
type process struct {
	group int    // id of the process and of the group
	out   string // file of the output
}

// log returns the output until now.
func (p *process) log() string {
	text, _ := os.ReadFile(p.out) // none means that nothing is there yet
	return string(text)
}

// start runs a program until the test ends.
func (w *world) start(program string, args ...string) *process {
	w.t.Helper()
	out, err := os.CreateTemp(w.dir, filepath.Base(program)+"-*.log")
	if err != nil {
		w.t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = out, out, &syscall.SysProcAttr{Setpgid: true}
	// Pebble then waits for nothing at random and refuses no nonce.
	cmd.Env = append(os.Environ(), "PEBBLE_VA_NOSLEEP=1", "PEBBLE_WFE_NONCEREJECT=0")
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	go func() { _ = cmd.Wait() }() // ends with the process
	p := &process{cmd.Process.Pid, out.Name()}
	t := w.t
	t.Cleanup(func() {
		p.stop()
		if log := p.log(); t.Failed() || strings.Contains(log, "panic: ") {
			t.Errorf("%s:\n%s", filepath.Base(program), log)
		}
	})
	return p
}

// stop ends the processes as an operator does.
func (p *process) stop() {
	signal := syscall.SIGTERM
	for end := time.Now().Add(30 * time.Second); syscall.Kill(-p.group, signal) == nil; time.Sleep(10 * time.Millisecond) {
		if signal = 0; time.Now().After(end) {
			signal = syscall.SIGKILL
		}
	}
}
