package openapi

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// program returns the path of the built program.
func program(t *testing.T) string {
	path := os.Getenv("PDPROXY_DOCS")
	if path == "" {
		t.Skip("make test-docs runs this test with the built program")
	}
	return path
}

// start runs the program with args until the end of the test. The process has a private
// folder for the token of its admin address.
func start(t *testing.T, private string, args ...string) (firstLine string) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	c := exec.Command(program(t), args...)
	c.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+private)
	c.Stderr = log
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if c.Process.Signal(syscall.SIGTERM) != nil || c.Wait() != nil {
			text, _ := os.ReadFile(log.Name())
			t.Errorf("pdproxy %s did not end well\n%s", args[0], text)
		}
	})
	if args[0] == "sim" {
		firstLine, _ = bufio.NewReader(out).ReadString('\n')
	}
	return strings.TrimSpace(firstLine)
}

// sim starts a simulated engine and returns its URL.
func sim(t *testing.T, private, role string) string {
	t.Helper()
	words := strings.Fields(start(t, private, "sim", "--role", role, "--listen", "127.0.0.1:0"))
	if len(words) == 0 {
		t.Fatal("the simulated engine does not start")
	}
	return words[len(words)-1]
}

// proxy is a running proxy.
type proxy struct{ public, admin, token string }

// run starts a proxy with two simulated engines. The texts extend the configuration;
// %DECODE% in sections is the URL of the decode engine.
func run(t *testing.T, scheme, sections string) proxy {
	t.Helper()
	private := t.TempDir()
	if err := os.Chmod(private, 0o700); err != nil {
		t.Fatal(err)
	}
	token := "a-token-of-the-test-with-32-letters"
	public, admin := address(t), address(t)
	prefill, decode := sim(t, private, "prefill"), sim(t, private, "decode")
	write(t, private, "token", token)
	text := fmt.Sprintf("[server]\nlisten = %q\n%s\n[admin]\nlisten = %q\ntoken_file = %q\n",
		public, strings.ReplaceAll(sections, "%DECODE%", decode), admin, filepath.Join(private, "token"))
	for _, e := range [][3]string{{"p0", prefill, "prefill"}, {"d0", decode, "decode"}} {
		text += fmt.Sprintf("[[engine]]\nname = %q\nurl = %q\nrole = %q\nconnector = \"vllm-nixl\"\n", e[0], e[1], e[2])
	}
	start(t, private, "run", write(t, private, "config.toml", text))
	p := proxy{scheme + "://" + public, "http://" + admin, token}
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if resp, err := http.Get(p.admin + "/readyz"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return p
			}
		}
		if time.Now().After(end) {
			t.Fatal("the proxy is not ready")
		}
	}
}

func write(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// given are the addresses that address has returned.
var given sync.Map

// address returns an address whose port no other process gets by chance: the port is below those
// that the kernel gives to connections.
func address(t *testing.T) string {
	t.Helper()
	for range 1000 {
		addr := fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(20000))
		if _, taken := given.LoadOrStore(addr, true); taken {
			continue
		}
		if l, err := net.Listen("tcp", addr); err == nil {
			l.Close()
			return addr
		}
	}
	t.Fatal("no port is free")
	return ""
}
