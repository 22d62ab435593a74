package page

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// process is a pdproxy that a test has started.
type process struct {
	cmd *exec.Cmd
	log bytes.Buffer // read it after the end of the process
}

// start runs the built binary until the test ends.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	binary, err := filepath.Abs("../../bin/pdproxy")
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(binary, args...)}
	p.cmd.Stderr = &p.log
	p.cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR="+t.TempDir())
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("pdproxy does not start (make build builds it): %v", err)
	}
	t.Cleanup(func() { p.end(t, args[0]) })
	return p
}

// end ends the process as an operator does.
func (p *process) end(t *testing.T, name string) {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // an error means that the process has ended
	hung := time.AfterFunc(patience, func() { p.cmd.Process.Kill() })
	_ = p.cmd.Wait() // the exit code of a killed engine has no meaning
	if !hung.Stop() {
		t.Errorf("pdproxy %s ignores SIGTERM", name)
	}
	log := p.log.String()
	if t.Failed() || strings.Contains(log, "\npanic: ") || strings.Contains(log, "panic in a handler") {
		t.Errorf("log of pdproxy %s:\n%s", name, tail(log, 30))
	}
}

func tail(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// free returns an address whose port no other process gets by chance: the port is below those
// that the kernel gives to connections.
func free(t *testing.T) string {
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

// given are the addresses that free has returned.
var given sync.Map

// engine is a simulated engine.
type engine struct {
	*process
	name, role, addr, side string
}

// section is the engine's section of the configuration.
func (e *engine) section() string {
	return fmt.Sprintf("[[engine]]\nname = %q\nurl = \"http://%s\"\nrole = %q\nconnector = \"vllm-nixl\"\nkv_events = \"tcp://%s\"\n\n", e.name, e.addr, e.role, e.side)
}

// get reads an endpoint of the admin address.
func (p *proxy) get(t *testing.T, path string, into any) {
	t.Helper()
	resp, err := http.Get(p.admin + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%s: status %d, %v", path, resp.StatusCode, err)
	}
}

// wait waits until a list of the admin address has a row with these values.
func (p *proxy) wait(t *testing.T, path string, row map[string]string) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		var rows []map[string]any
		p.get(t, path, &rows)
		if slices.ContainsFunc(rows, func(r map[string]any) bool {
			for name, value := range row {
				if r[name] != value {
					return false
				}
			}
			return true
		}) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("never: %s has %v: %v", path, row, rows)
		}
	}
}

// startEngines starts engines that are slow enough to watch: those whose name begins with p
// are prefill, the others decode.
func startEngines(t *testing.T, names ...string) map[string]*engine {
	t.Helper()
	engines := make(map[string]*engine)
	for _, name := range names {
		e := &engine{name: name, role: "decode", addr: free(t), side: free(t)}
		if name[0] == 'p' {
			e.role = "prefill"
		}
		e.start(t)
		engines[name] = e
	}
	return engines
}

// start starts the process of the engine, also after the end of an earlier one.
func (e *engine) start(t *testing.T) {
	t.Helper()
	e.process = start(t, "sim", "--connector", "vllm-nixl", "--role", e.role, "--listen", e.addr, "--name", e.name, "--side-channel-port", "0",
		"--zmq-events", "tcp://"+e.side, "--kv-blocks", "1500", "--prefill-us-per-token", "200", "--decode-us-per-token", "15000",
		"--dev-mode", "--wake-time", "3s")
}

// proxy is a proxy in front of engines.
type proxy struct {
	*process
	url, admin string
}

// startProxy runs a proxy with these sections, which follow admin.listen, and returns when
// the proxy serves.
func startProxy(t *testing.T, adminKeys, sections string) *proxy {
	t.Helper()
	p := &proxy{url: "http://" + free(t), admin: "http://" + free(t)}
	file := filepath.Join(t.TempDir(), "config.toml")
	text := fmt.Sprintf("[server]\nlisten = %q\n[admin]\nlisten = %q\n%s\n[health]\ninterval = \"500ms\"\n%s", p.url[7:], p.admin[7:], adminKeys, sections)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p.process = start(t, "run", file)
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		resp, err := http.Get(p.url + "/health")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				return p
			}
		}
		if time.Now().After(end) {
			t.Fatalf("the proxy does not serve: %v", err)
		}
	}
}

// complete sends one streamed chat, with more names and values of header lines, and returns its status.
func (p *proxy) complete(ctx context.Context, id, prompt string, tokens int, header ...string) int {
	body, _ := json.Marshal(map[string]any{"stream": true, "max_tokens": tokens, "stream_options": map[string]bool{"include_usage": true},
		"messages": []map[string]string{{"role": "user", "content": prompt}}})
	r, err := http.NewRequestWithContext(ctx, "POST", p.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return 0
	}
	r.Header.Set("Content-Type", "application/json")
	if id != "" {
		r.Header.Set("X-Request-Id", id)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body) // a killed engine breaks streams off
	return resp.StatusCode
}

// load sends requests of that many users until the test ends. Users share the beginnings of
// their prompts.
func (p *proxy) load(t *testing.T, users int) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(cancel)
	for user := range users {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(2, uint64(user)))
			shared := strings.Repeat(fmt.Sprintf("You are guide %d to the sea. ", user%3), 20)
			for n := 0; ctx.Err() == nil; n++ {
				prompt := shared + strings.Repeat("Tell me more of the waves. ", 5*(n%8)+random.IntN(20))
				p.complete(ctx, "", prompt, 20+random.IntN(80))
				time.Sleep(time.Duration(random.IntN(400)) * time.Millisecond)
			}
		})
	}
}
