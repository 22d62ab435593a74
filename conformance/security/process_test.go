package security

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// adminToken is the token of every proxy that the tests start.
const adminToken = "the-admin-token-of-the-tests"

// proxyProcess is a running pdproxy. Its methods fail the test from the test's own
// goroutine only, except where they return an error.
type proxyProcess struct {
	t      *testing.T
	cmd    *exec.Cmd
	addr   string // of clients, host:port; over UDP too when secure
	dir    string // fleet.dir
	secure bool   // TLS and HTTP/3
	config string // path of the configuration file
	log    string // path of the file with the standard error
	admin  surface.Admin
	ended  chan struct{} // closed when the process has ended
	// stopped reports that the test ends the process, or allows it to end. Only the test's
	// goroutine uses it.
	stopped bool

	before resources // at the start, before the first request
}

// setup holds the settings of a proxy that differ between tests.
type setup struct {
	server   string   // keys of [server]
	sections string   // further sections: engines, limits, plugins
	secure   bool     // TLS with a self-signed certificate, and HTTP/3
	noToken  bool     // no admin.token_file
	fleet    string   // keys of [fleet] besides dir
	dir      string   // fleet.dir; "" = one of the test, "default" = none is configured
	files    int      // limit of open files; 0 = the machine's
	memory   int      // limit of address space in GiB; 0 = the machine's
	env      []string // of the process, added to the test's
}

// resources are the resources of a process.
type resources struct {
	goroutines, descriptors int
	rss                     int64 // bytes of resident memory
}

// startProxy runs the program until the test ends and waits until it serves.
func startProxy(t *testing.T, s setup) *proxyProcess {
	t.Helper()
	p := prepare(t, s)
	p.run(s)
	p.awaitReady()
	p.before = p.resources()
	return p
}

// prepare writes the configuration of a proxy and runs nothing.
func prepare(t *testing.T, s setup) *proxyProcess {
	t.Helper()
	home := t.TempDir()
	p := &proxyProcess{
		t: t, addr: testbed.FreeAddr(t), secure: s.secure,
		dir: filepath.Join(home, "run"), config: filepath.Join(home, "config.toml"), log: filepath.Join(home, "log"),
	}
	admin, token := testbed.FreeAddr(t), filepath.Join(home, "admin-token")
	p.admin = surface.Admin{URL: "http://" + admin, Client: &http.Client{Timeout: patience, Transport: withToken{&http.Transport{DisableKeepAlives: true}}}}
	var text bytes.Buffer
	fmt.Fprintf(&text, "[server]\nlisten = %q\ndrain_timeout = \"1s\"\n%s\n", p.addr, s.server)
	if s.secure {
		fmt.Fprintf(&text, "http3 = %q\n[server.tls]\nself_signed = true\n", p.addr)
	}
	fmt.Fprintf(&text, "[admin]\nlisten = %q\n", admin)
	if !s.noToken {
		fmt.Fprintf(&text, "token_file = %q\n", token)
		write(t, token, adminToken+"\n")
	}
	fmt.Fprintf(&text, "[transport]\nidle_timeout = \"500ms\"\n[fleet]\n%s\n", s.fleet)
	if s.dir != "" {
		p.dir = s.dir
	}
	if p.dir != "default" {
		fmt.Fprintf(&text, "dir = %q\n", p.dir)
	}
	text.WriteString(s.sections)
	write(t, p.config, text.String())
	return p
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// withToken adds the admin token to every request.
type withToken struct{ http.RoundTripper }

func (w withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+adminToken)
	return w.RoundTripper.RoundTrip(r)
}

// run starts the process, which ends with the test.
func (p *proxyProcess) run(s setup) {
	p.t.Helper()
	p.cmd = exec.Command(pdproxy, "run", p.config)
	limits := ""
	if s.files > 0 {
		limits = fmt.Sprintf("ulimit -n %d; ", s.files)
	}
	if s.memory > 0 {
		limits += fmt.Sprintf("ulimit -v %d; ", s.memory<<20)
	}
	if limits != "" {
		p.cmd = exec.Command("sh", "-c", limits+`exec "$0" run "$1"`, pdproxy, p.config)
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	p.cmd.Stderr = log
	p.ended, p.stopped = make(chan struct{}), false
	p.cmd.Env = append(append(os.Environ(), "XDG_CACHE_HOME="+filepath.Join(buildDir, "cache")), s.env...)
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	cmd, ended := p.cmd, p.ended
	go func() {
		cmd.Wait()
		close(ended)
	}()
	p.t.Cleanup(p.stop)
}

// stop ends the process. It must still run and must not have panicked.
func (p *proxyProcess) stop() {
	if !p.alive() && !p.stopped {
		p.t.Errorf("the proxy died: %s", p.cmd.ProcessState)
	}
	p.terminate()
	text := p.logged()
	if strings.Contains(text, "panic") {
		p.t.Error("the proxy panicked")
	}
	if p.t.Failed() {
		lines := strings.Split(strings.TrimSpace(text), "\n")
		p.t.Logf("last log lines of the proxy:\n%.4000s", strings.Join(lines[max(0, len(lines)-15):], "\n"))
	}
}

// terminate ends the process as an operator does.
func (p *proxyProcess) terminate() {
	p.stopped = true
	p.cmd.Process.Signal(syscall.SIGTERM) // an error reports that the process has ended
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.t.Error("the proxy does not end")
		p.cmd.Process.Kill()
		<-p.ended
	}
}

func (p *proxyProcess) logged() string {
	text, _ := os.ReadFile(p.log) // not there: the process never ran
	return string(text)
}

// awaitReady waits until the proxy serves.
func (p *proxyProcess) awaitReady() {
	p.t.Helper()
	p.await("the proxy is ready", func() bool {
		resp, err := p.admin.Client.Get(p.admin.URL + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == 200
	})
}

// await waits for a condition, but not longer than the process lives.
func (p *proxyProcess) await(what string, ok func() bool) {
	p.t.Helper()
	testbed.Eventually(p.t, what, func() bool {
		if !p.alive() {
			p.t.Fatalf("the proxy has ended:\n%s", p.logged())
		}
		return ok()
	})
}

// alive is false after the process has ended.
func (p *proxyProcess) alive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// resources returns the present resources of the process.
func (p *proxyProcess) resources() resources {
	p.t.Helper()
	n, err := p.admin.Metric("go_goroutines")
	if err != nil {
		p.t.Fatal(err)
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	return resources{goroutines: int(n), descriptors: len(files), rss: p.rss()}
}

var vmRSS = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)

// rss returns the resident memory of the process in bytes; 0 after it has ended.
func (p *proxyProcess) rss() int64 {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	m := vmRSS.FindSubmatch(status)
	if m == nil {
		return 0
	}
	n, _ := strconv.ParseInt(string(m[1]), 10, 64)
	return n << 10
}

// growth calls attack and returns the largest growth of the resident memory in
// bytes, measured during the attack and after it.
func (p *proxyProcess) growth(attack func()) int64 {
	p.t.Helper()
	before, most := p.rss(), int64(0)
	done := make(chan struct{})
	go func() {
		defer close(done)
		attack()
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-time.After(20 * time.Millisecond):
		}
		most = max(most, p.rss())
	}
	return most - before
}

// wantGrowth asserts that an attack costs the process no more than the given number of
// MiB.
func (p *proxyProcess) wantGrowth(what string, mebibytes int64, attack func()) {
	p.t.Helper()
	if got := p.growth(attack); got > mebibytes<<20 {
		p.t.Errorf("%s: the resident memory grew by %d MiB, want at most %d MiB", what, got>>20, mebibytes)
	}
}

// nothingLeft asserts that an attack which is over has left nothing behind.
func (p *proxyProcess) nothingLeft() {
	p.t.Helper()
	// Probes of engines and the scrape itself come and go: a few more are no leak.
	const spareGoroutines, spareDescriptors = 16, 8
	var now resources
	var leases float64
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if !p.alive() {
			return // stop says so
		}
		now = p.resources()
		leases, _ = p.admin.Metric("pdproxy_leases_open")
		if leases == 0 && now.goroutines <= p.before.goroutines+spareGoroutines && now.descriptors <= p.before.descriptors+spareDescriptors {
			return
		}
	}
	p.t.Errorf("these remain: %d goroutines (%d at the start), %d descriptors (%d at the start), %v leases",
		now.goroutines, p.before.goroutines, now.descriptors, p.before.descriptors, leases)
}
