package takeover

import (
	"bytes"
	"fmt"
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

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// patience bounds every wait for a condition; it is not a claim about speed.
const patience = 60 * time.Second

// takeovers is the number of times that each run replaces the program.
const takeovers = 20

var pdproxy string // the built program

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "takeover")
	if err == nil {
		pdproxy = filepath.Join(dir, "pdproxy")
		var out []byte
		if out, err = exec.Command("go", "build", "-o", pdproxy, "../../cmd/pdproxy").CombinedOutput(); err != nil {
			err = fmt.Errorf("%w\n%s", err, out)
		}
	}
	if err == nil {
		err = testbed.InstallCurl()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := isolated.Run(m)
	os.RemoveAll(dir)
	os.Exit(code)
}

// world is a deployment: engines, and a proxy in processes of its own.
type world struct {
	t       *testing.T
	engines []*enginesim.Engine
	alone   *enginesim.Engine // its answers are the right texts
	dir     *privatedir.Dir
	config  string
	addr    string // of clients
	admin   string
	metrics string // metrics.listen
	log     *os.File
	pids    []int // of all processes so far
	wg      sync.WaitGroup

	expected string // text of an error in the log that the test causes
}

func newWorld(t *testing.T, tls bool, workers int) *world {
	t.Helper()
	var engines []*enginesim.Engine
	var keys bytes.Buffer
	for i, role := range []string{enginesim.RolePrefill, enginesim.RolePrefill, enginesim.RoleDecode, enginesim.RoleDecode} {
		e := startEngine(t, enginesim.Config{Connector: enginesim.ConnectorVLLMNixl, Role: role, PrefillUsPerToken: 100, DecodeUsPerToken: 10_000})
		engines = append(engines, e)
		fmt.Fprintf(&keys, "[[engine]]\nname = \"e%d\"\nurl = %q\nrole = %q\nconnector = %q\n", i, e.URL(), role, enginesim.ConnectorVLLMNixl)
	}
	alone := startEngine(t, enginesim.Config{Connector: enginesim.ConnectorVLLMNixl, Role: enginesim.RoleBoth})
	return newWorldOf(t, tls, workers, engines, alone, keys.String())
}

// newWorldOf is a world with running engines. keys are their keys in the
// proxy's configuration.
func newWorldOf(t *testing.T, tls bool, workers int, engines []*enginesim.Engine, alone *enginesim.Engine, keys string) *world {
	t.Helper()
	w := &world{
		t: t, dir: privatedirtest.Open(t), addr: testbed.FreeAddr(t), admin: testbed.FreeAddr(t), metrics: testbed.FreeAddr(t),
		engines: engines, alone: alone,
	}
	var text bytes.Buffer
	fmt.Fprintf(&text, "[server]\nlisten = %q\ndrain_timeout = \"20s\"\n", w.addr)
	if tls { // with HTTP/3 on the same port number
		fmt.Fprintf(&text, "http3 = %q\n[server.tls]\nself_signed = true\n", w.addr)
	}
	fmt.Fprintf(&text, "[admin]\nlisten = %q\n[metrics]\nlisten = %q\n[health]\ninterval = \"200ms\"\ntimeout = \"10s\"\n[fleet]\nworkers = %d\ndir = %q\n%s", w.admin, w.metrics, workers, w.dir.Name(), keys)
	w.config = filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(w.config, text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	var err error
	if w.log, err = os.Create(filepath.Join(t.TempDir(), "log")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.end)
	return w
}

func startEngine(t *testing.T, c enginesim.Config) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.New(c)
	if err == nil {
		err = e.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

// run starts the program. The program's own processes are not the test's children.
func (w *world) run(flags ...string) {
	w.t.Helper()
	c := exec.Command(pdproxy, append([]string{"run", w.config}, flags...)...)
	c.Stderr = w.log
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := c.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.wg.Go(func() { c.Wait() })
}

// holder returns the process in office.
func (w *world) holder() int {
	h, _, _ := w.dir.LockHolder("office.lock") // no lock file means that no process has it
	return h.PID
}

// successor waits until another process than old is in office. It calls again
// from time to time.
func (w *world) successor(old int, again func()) int {
	w.t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		for range 500 {
			if pid := w.holder(); pid != 0 && pid != old {
				w.pids = append(w.pids, pid)
				return pid
			}
			time.Sleep(10 * time.Millisecond)
		}
		again()
	}
	w.t.Fatalf("no successor of %d exists", old)
	return 0
}

// children returns the processes of a role that have not retired, by slot.
func (w *world) children(role string) map[int]int {
	pids := map[int]int{}
	for slot := range 256 {
		if h, held, _ := w.dir.LockHolder(fmt.Sprintf("%s-%d.lock", role, slot)); held && h.PID != 0 && h.State != "retired" {
			pids[slot] = h.PID
		}
	}
	return pids
}

// eventually waits for a condition.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatal(what)
		}
	}
}

// awaitReady waits until requests can be served.
func (w *world) awaitReady() {
	w.t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		resp, err := http.Get("http://" + w.admin + "/readyz")
		if err != nil {
			continue
		}
		resp.Body.Close()
		if resp.StatusCode == 200 {
			return
		}
	}
	w.t.Fatal("the proxy is not ready")
}

// logged returns the log of all processes.
func (w *world) logged() string {
	b, _ := os.ReadFile(w.log.Name())
	return string(b)
}

// end stops all processes and asserts that nothing of them remains.
func (w *world) end() {
	defer func() {
		if w.t.Failed() {
			w.t.Log(w.logged())
		}
	}()
	if pid := w.holder(); pid != 0 {
		syscall.Kill(pid, syscall.SIGTERM)
	}
	deadline := time.Now().Add(patience)
	for _, pid := range w.pids {
		for alive(pid) {
			if time.Now().After(deadline) {
				w.t.Errorf("process %d does not end", pid)
				syscall.Kill(pid, syscall.SIGKILL)
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	w.wg.Wait()
	for _, role := range []string{"worker", "coordinator"} {
		w.eventually("processes of the fleet do not end", func() bool { return len(w.children(role)) == 0 })
	}
	w.eventually("an engine has blocks pinned or requests running", func() bool { // it notices the end of a connection a moment later
		return !slices.ContainsFunc(w.engines, func(e *enginesim.Engine) bool {
			s := e.State()
			return s.BlocksPinned != 0 || s.RequestsRunning != 0
		})
	})
	for line := range strings.Lines(w.logged()) {
		if w.expected != "" && strings.Contains(line, w.expected) {
			continue
		}
		if strings.Contains(line, "panic") || strings.Contains(line, "exchanges were cut") || strings.Contains(line, "level=ERROR") {
			w.t.Error(line)
		}
	}
}

// alive is false for a zombie, which the test cannot wait for.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(b), ") Z ")
}

// A new process, or a new tree of processes, takes over twenty times,
// alternately by a signal and by hand. Each serves metrics.listen, and no scrape fails.
func TestTakeover(t *testing.T) {
	for _, workers := range []int{0, 2} {
		for _, tls := range []bool{false, true} {
			t.Run(fmt.Sprintf("workers %d, tls %v", workers, tls), func(t *testing.T) {
				w := newWorld(t, tls, workers)
				w.run()
				pid := w.successor(0, func() {})
				w.awaitReady()
				load, stop, start := startLoad(t, w, tls), w.watchMetrics(), w.awaitMetrics("")
				for n := range takeovers {
					next := func() { syscall.Kill(pid, syscall.SIGUSR2) }
					if n%2 == 1 {
						next = func() { w.run("--takeover") }
					}
					before := load.answered.Load()
					next()
					pid = w.successor(pid, next)
					// Some requests reach the new process before the next
					// takeover.
					load.await(before + 50)
					start = w.awaitMetrics(start)
				}
				stop()
				load.end()
			})
		}
	}
}
