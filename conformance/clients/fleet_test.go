package clients

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fleet is simulated engines, each its own process.
type fleet struct {
	engines string // the [[engine]] tables of a config.toml
	alone   string
}

// startFleet runs one prefill and one decode engine, and one engine with both
// roles for comparison. Decode is slow enough that tests can act in the middle
// of a stream.
func startFleet(t *testing.T, connector string) *fleet {
	t.Helper()
	f := &fleet{alone: startEngine(t, connector, "both")}
	for _, role := range []string{"prefill", "decode"} {
		f.add(role[:1]+"0", startEngine(t, connector, role), role, connector)
	}
	return f
}

// startEngine runs an engine and returns its URL. more are further arguments.
func startEngine(t *testing.T, connector, role string, more ...string) string {
	t.Helper()
	p := start(t, append(simArgs(connector, role, "127.0.0.1:0"), more...)...)
	words := strings.Fields(p.firstLine(t))
	return words[len(words)-1]
}

func simArgs(connector, role, addr string) []string {
	return []string{"sim", "--connector", connector, "--role", role, "--listen", addr, "--prefill-us-per-token", "50", "--decode-us-per-token", "10000"}
}

func (f *fleet) add(name, url, role, connector string) {
	f.engines += fmt.Sprintf("[[engine]]\nname = %q\nurl = %q\nrole = %q\nconnector = %q\n", name, url, role, connector)
}

// setup holds the lines of config.toml that differ between tests, by section.
type setup struct {
	server, tls, auth, timeouts, retry string
	more                               string // further tables
	adminToken                         string
	http3                              bool
}

// startProxy runs pdproxy run and returns when it is ready to serve.
func startProxy(t *testing.T, f *fleet, s setup) *front {
	t.Helper()
	port, admin := freePort(t), freePort(t)
	scheme, dir := "http", t.TempDir()
	var c strings.Builder
	fmt.Fprintf(&c, "[server]\nlisten = \"127.0.0.1:%d\"\n%s\n", port, s.server)
	if s.http3 {
		fmt.Fprintf(&c, "http3 = \"127.0.0.1:%d\"\n", port)
	}
	if s.tls != "" {
		scheme = "https"
		fmt.Fprintf(&c, "[server.tls]\n%s\n", s.tls)
	}
	fmt.Fprintf(&c, "[server.auth]\n%s\n[admin]\nlisten = \"127.0.0.1:%d\"\n", s.auth, admin)
	if s.adminToken != "" {
		fmt.Fprintf(&c, "token_file = %q\n", writeFile(t, dir, "token", s.adminToken+"\n"))
	}
	fmt.Fprintf(&c, "[timeouts]\n%s\n[retry]\n%s\n%s%s", s.timeouts, s.retry, s.more, f.engines)
	p := start(t, "run", writeFile(t, dir, "config.toml", c.String()))
	front := &front{
		process: p, Alone: f.alone, token: s.adminToken,
		URL: fmt.Sprintf("%s://127.0.0.1:%d", scheme, port), Admin: fmt.Sprintf("http://127.0.0.1:%d", admin),
	}
	eventually(t, "ready", func() error {
		resp, err := http.Get(front.Admin + "/readyz")
		if err != nil {
			return fmt.Errorf("%w\n%s", err, lastLines(p.log.String(), 5))
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			return fmt.Errorf("status %d", resp.StatusCode)
		}
		return nil
	})
	return front
}

// addr is the public host:port.
func (f *front) addr() string {
	_, addr, _ := strings.Cut(f.URL, "://")
	return addr
}

// freePort returns a port that is free for TCP and UDP. It is below the
// kernel's range for clients, so that no client takes it before the proxy does.
func freePort(t *testing.T) int {
	t.Helper()
	for range 1000 {
		port := 20000 + rand.IntN(10000)
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		tcp, err := net.Listen("tcp", addr)
		if err != nil {
			continue
		}
		udp, err := net.ListenPacket("udp", addr)
		tcp.Close()
		if err != nil {
			continue
		}
		udp.Close()
		return port
	}
	t.Fatal("no free port")
	return 0
}

func writeFile(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
