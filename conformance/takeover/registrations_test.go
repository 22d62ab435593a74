package takeover

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// way is one form in which engines register with the proxy itself.
type way struct {
	name, connector string
	expiry          time.Duration // of an engine that stops registering
	// keys returns the section of the configuration for an address.
	keys func(addr string) string
	// register makes an engine register at an address, from its start on. It
	// returns a function that ends both as if they had died.
	register func(t *testing.T, c enginesim.Config, addr string) (e *enginesim.Engine, kill func())
}

// ways are vLLM's registrations, through libzmq as its connector makes them, and
// TensorRT-LLM's cluster storage.
var ways = []way{
	{"zmq", enginesim.ConnectorVLLMMoRIIO, 10 * time.Second, func(addr string) string {
		return fmt.Sprintf("[discovery.moriio]\nlisten = \"tcp://%s\"\n", addr)
	}, overZeroMQ},
	{"cluster storage", enginesim.ConnectorTRTLLM, 6 * time.Second, func(addr string) string {
		return fmt.Sprintf("[discovery.trtllm]\ncluster_uri = \"http://%s\"\ncluster_name = \"blue\"\n", addr)
	}, overHTTP},
}

// python is Debian's own, which finds Debian's packages.
const python = "/usr/bin/python3"

func importZeroMQ() error {
	if out, err := exec.Command(python, "-c", "import zmq, msgpack").CombinedOutput(); err != nil {
		return fmt.Errorf("import zmq and msgpack: %w\n%s", err, out)
	}
	return nil
}

func overZeroMQ(t *testing.T, c enginesim.Config, addr string) (*enginesim.Engine, func()) {
	t.Helper()
	if err := testbed.Install(importZeroMQ, "python3", "python3-zmq", "python3-msgpack"); err != nil {
		t.Fatal(err)
	}
	e := startEngine(t, c)
	var handshake, notify string
	role := "P"
	if c.Role == enginesim.RoleDecode {
		role = "D"
	}
	for part := range strings.SplitSeq(e.KVAddress(), ",") {
		if _, port, ok := strings.Cut(part, "handshake:"); ok {
			handshake = port
		} else if _, port, ok := strings.Cut(part, "notify:"); ok {
			notify = port
		}
	}
	script := exec.Command(python, "../kvevents/testdata/register.py", "new", "tcp://"+addr, role, e.Addr(), handshake, notify, "WRITE")
	script.Stderr = os.Stderr
	if err := script.Start(); err != nil {
		t.Fatal(err)
	}
	quit := sync.OnceFunc(func() { script.Process.Kill(); script.Wait() })
	t.Cleanup(quit)
	return e, func() { quit(); e.Kill() }
}

func overHTTP(t *testing.T, c enginesim.Config, addr string) (*enginesim.Engine, func()) {
	t.Helper()
	c.TRTLLM = enginesim.TRTLLMConfig{ClusterURI: "http://" + addr, ClusterName: "blue", Heartbeat: time.Second, InactiveTimeout: 6 * time.Second}
	e := startEngine(t, c)
	return e, e.Kill
}

// registered is a deployment whose proxy knows only engines that register.
type registered struct {
	*world
	way
	addrs []string // addresses of the engines that stay
	spare func()   // kills an engine that serves another model
	gone  string   // address of that engine

	missing sync.Once
}

func newRegistered(t *testing.T, how way, workers int) *registered {
	t.Helper()
	addr := testbed.FreeAddr(t)
	r := &registered{way: how}
	var engines []*enginesim.Engine
	for _, role := range []string{enginesim.RolePrefill, enginesim.RolePrefill, enginesim.RoleDecode, enginesim.RoleDecode} {
		e, _ := how.register(t, enginesim.Config{Connector: how.connector, Role: role, PrefillUsPerToken: 100, DecodeUsPerToken: 10_000}, addr)
		engines = append(engines, e)
		r.addrs = append(r.addrs, e.Addr())
	}
	spare, kill := how.register(t, enginesim.Config{Connector: how.connector, Role: enginesim.RolePrefill, Model: "spare"}, addr)
	r.spare, r.gone = kill, spare.Addr()
	alone := startEngine(t, enginesim.Config{Connector: how.connector, Role: enginesim.RoleBoth})
	r.world = newWorldOf(t, false, workers, engines, alone, how.keys(addr))
	return r
}

// engineAt reports whether an engine is listed and is not leaving.
func engineAt(rows []engineRow, addr string) bool {
	return slices.ContainsFunc(rows, func(e engineRow) bool { return e.URL == "http://"+addr && e.State != "draining" })
}

// engineRow is one row of GET /v1/engines.
type engineRow struct{ URL, State string }

// known returns the engines that the proxy lists; false without an answer.
func (r *registered) known() (rows []engineRow, ok bool) {
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Get("http://" + r.admin + "/v1/engines")
	if err != nil {
		return nil, false
	}
	defer resp.Body.Close()
	return rows, resp.StatusCode == 200 && json.NewDecoder(resp.Body).Decode(&rows) == nil
}

// ready waits until all engines are ready.
func (r *registered) ready() {
	r.t.Helper()
	r.eventually("not all engines are ready", func() bool {
		rows, ok := r.known()
		return ok && len(rows) == len(r.addrs)+1 && !slices.ContainsFunc(rows, func(e engineRow) bool { return e.State != "ready" })
	})
}

// watch asserts that no registering engine is ever missing, in any process. It
// returns a function that ends the check.
func (r *registered) watch() (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			if rows, ok := r.known(); ok && len(rows) > 0 { // a coordinator that has just started has none
				for _, addr := range r.addrs {
					if !engineAt(rows, addr) {
						r.missing.Do(func() { r.t.Errorf("%s is missing, at %s: %+v", addr, time.Now().Format("15:04:05.000"), rows) })
					}
				}
			}
			select {
			case <-done:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	return func() {
		close(done)
		wg.Wait()
		for line := range strings.Lines(r.logged()) { // includes workers
			if strings.Contains(line, "engine is draining") && slices.ContainsFunc(r.addrs, func(addr string) bool { return strings.Contains(line, "url=http://"+addr) }) {
				r.t.Error(line)
			}
		}
	}
}

// Each successor knows the engines that register with the proxy from its start,
// none is lost, and each leaves when its own time is over.
func TestRegistrationsAreHandedOver(t *testing.T) {
	for _, how := range ways {
		for _, workers := range []int{0, 2} {
			t.Run(fmt.Sprintf("%s, workers %d", how.name, workers), func(t *testing.T) {
				r := newRegistered(t, how, workers)
				r.run()
				pid := r.successor(0, func() {})
				r.awaitReady()
				r.ready()
				stop := r.watch()
				load := startLoad(t, r.world, false)
				for n := range 5 {
					next := func() { syscall.Kill(pid, syscall.SIGUSR2) }
					if n%2 == 1 {
						next = func() { r.run("--takeover") }
					}
					before := load.answered.Load()
					next()
					if n == 2 {
						r.spare()
					}
					pid = r.successor(pid, next)
					load.await(before + 50)
				}
				if workers > 0 {
					r.killCoordinator(load)
				}
				r.become(2 - workers)
				r.successor(pid, func() { r.run("--takeover") })
				time.Sleep(r.expiry + 2*time.Second) // longer than the time after which an engine without a registration is dropped
				r.eventually("an engine that died stays", func() bool {
					rows, ok := r.known()
					return ok && !slices.ContainsFunc(rows, func(e engineRow) bool { return e.URL == "http://"+r.gone })
				})
				load.end()
				stop()
			})
		}
	}
}

// become makes a fleet with that many workers, or one process, take over.
func (r *registered) become(workers int) {
	r.t.Helper()
	text, err := os.ReadFile(r.config)
	if err == nil {
		text = regexp.MustCompile(`workers = \d`).ReplaceAll(text, fmt.Appendf(nil, "workers = %d", workers))
		err = os.WriteFile(r.config, text, 0o600)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.run("--takeover")
}

// killCoordinator kills the coordinator, which receives registrations, again
// and again.
func (r *registered) killCoordinator(load *load) {
	r.expected = "a process " // has ended
	for range 3 {
		for _, pid := range r.children("coordinator") {
			syscall.Kill(pid, syscall.SIGKILL)
			r.eventually("the coordinator is not replaced", func() bool {
				now := r.children("coordinator")
				for _, p := range now {
					if p == pid {
						return false
					}
				}
				return len(now) == 1
			})
		}
		load.await(load.answered.Load() + 50)
		r.awaitReady()
	}
}

// When a successor fails shortly before it is ready, its predecessor keeps the
// registrations, which it has received all the time.
func TestSuccessorFailsAmongRegistrations(t *testing.T) {
	for _, how := range ways {
		t.Run(how.name, func(t *testing.T) {
			r := newRegistered(t, how, 0)
			r.run()
			pid := r.successor(0, func() {})
			r.awaitReady()
			r.ready()
			text, err := os.ReadFile(r.config)
			if err != nil {
				t.Fatal(err)
			}
			// Its configuration has no engines, so it cannot become ready.
			picky := r.config + ".picky"
			if err := os.WriteFile(picky, append(text, "[discovery]\nallow = [\"192.0.2.1\"]\n"...), 0o600); err != nil {
				t.Fatal(err)
			}
			stop := r.watch()
			load := startLoad(t, r.world, false)
			c := exec.Command(pdproxy, "run", picky, "--takeover")
			out, _ := c.CombinedOutput()
			if code := c.ProcessState.ExitCode(); code != 1 || !strings.Contains(string(out), "no request could be served here") {
				t.Errorf("c.ProcessState.ExitCode() = %d, %s", code, out)
			}
			time.Sleep(r.expiry / 2) // longer than the time between two registrations, which the predecessor receives
			load.end()
			stop()
			if r.holder() != pid {
				t.Error("the predecessor is not in office")
			}
			// The next one can become ready.
			r.run("--takeover")
			r.successor(pid, func() {})
			r.ready()
			r.serves(20)
		})
	}
}
