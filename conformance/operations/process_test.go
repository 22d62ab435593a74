package operations

import (
	"bytes"
	"errors"
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
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// program is the built pdproxy.
var program string

func TestMain(m *testing.M) {
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "operations")
	if err == nil {
		defer os.RemoveAll(dir)
		private := filepath.Join(dir, "run") // of the proxies, for their sockets and tokens
		err = errors.Join(os.Mkdir(private, 0o700), os.Setenv("XDG_RUNTIME_DIR", private))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	program = filepath.Join(dir, "pdproxy")
	build := exec.Command("go", "build", "-o", program, "./cmd/pdproxy")
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build pdproxy: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// process is a running program.
type process struct {
	cmd  *exec.Cmd
	out  bytes.Buffer // complete when done is closed
	done chan struct{}
}

// start starts a program in a process group of its own; the test's end kills the group.
func start(t *testing.T, env []string, name string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(name, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.WaitDelay = patience // children may hold the output open
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // the tests kill processes
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			text := p.out.String()
			t.Logf("%s %s:\n%s", filepath.Base(name), strings.Join(args, " "), text[max(0, len(text)-4000):])
		}
	})
	return p
}

// patience is the time in which a process ends its children and itself.
const patience = 20 * time.Second

// kill ends a fleet's children with it, and any other process at once.
func (p *process) kill() {
	pid := p.cmd.Process.Pid
	if slices.Contains(p.cmd.Args, "run") {
		_ = syscall.Kill(pid, syscall.SIGTERM) // fails if it has ended
		select {
		case <-p.done:
		case <-time.After(patience):
		}
	}
	_ = syscall.Kill(-pid, syscall.SIGKILL) // fails if it has ended
	<-p.done
}

func (p *process) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// given are the addresses that freeAddr has returned.
var given sync.Map

// freeAddr returns an address whose port no other process gets by chance: the port is below those
// that the kernel gives to connections.
func freeAddr(t *testing.T) string {
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

// wait is how long eventually waits: much longer than any condition takes.
var wait = 2 * time.Minute

// eventually waits until ok, for wait.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(wait); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("the condition did not hold in time: %s", what)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// get returns the status and the body of a URL, 0 if nothing answers.
func get(url string) (int, string) {
	resp, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(body)
}

// engines starts simulated engines and returns them by name with the lines of their
// configuration.
func engines(t *testing.T, connector string, flags map[string][]string) (map[string]*process, string) {
	t.Helper()
	running, lines := map[string]*process{}, ""
	for name, more := range flags {
		role := map[byte]string{'p': "prefill", 'd': "decode", 'b': "both"}[name[0]]
		addr := freeAddr(t)
		running[name] = start(t, nil, program, append([]string{"sim", "--connector", connector, "--role", role, "--listen", addr, "--name", name}, more...)...)
		lines += fmt.Sprintf("[[engine]]\nname = %q\nurl = %q\nrole = %q\nconnector = %q\nmodel = \"sim\"\n", name, "http://"+addr, role, connector)
	}
	return running, lines
}

// proxy is a running pdproxy.
type proxy struct {
	*process
	file, config string
	url, metrics string
}

// run starts pdproxy with that configuration, in which the addresses are added.
func run(t *testing.T, env []string, sections, server string) *proxy {
	t.Helper()
	public, metrics := freeAddr(t), freeAddr(t)
	p := &proxy{file: filepath.Join(t.TempDir(), "config.toml"), url: "http://" + public, metrics: metrics}
	p.config = fmt.Sprintf("[server]\nlisten = %q\n%s\n[admin]\nlisten = %q\n[metrics]\nlisten = %q\n%s", public, server, freeAddr(t), metrics, sections)
	p.write(t, p.config)
	p.process = start(t, env, program, "run", p.file)
	return p
}

func (p *proxy) write(t *testing.T, text string) {
	t.Helper()
	if err := os.WriteFile(p.file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (p *proxy) ready(t *testing.T) {
	t.Helper()
	eventually(t, "the proxy is ready", func() bool { status, _ := get(p.url + "/health"); return status == 200 })
}

// prompts counts the prompts. Each begins with its number, so that no engine has it in its
// cache.
var prompts atomic.Int64

// complete sends a request with a prompt of that many words, and returns the status.
func (p *proxy) complete(words int, stream bool) int {
	options := ""
	if stream {
		options = `,"stream":true,"stream_options":{"include_usage":true}`
	}
	prompt := fmt.Sprint(prompts.Add(1), strings.Repeat(" word", words))
	body := fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":8%s}`, prompt, options)
	resp, err := http.Post(p.url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body) // a broken stream is one of the failures
	return resp.StatusCode
}

// load sends requests with that many clients until stop is called.
func (p *proxy) load(t *testing.T, clients, words int) (stop func()) {
	end := make(chan struct{})
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			for n := i; ; n++ {
				select {
				case <-end:
					return
				default:
				}
				if p.complete(words, n%4 != 0) != 200 {
					time.Sleep(20 * time.Millisecond)
				}
			}
		})
	}
	var once sync.Once
	stop = func() { once.Do(func() { close(end); wg.Wait() }) }
	t.Cleanup(stop)
	return stop
}
