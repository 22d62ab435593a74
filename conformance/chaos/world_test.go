//go:build linux

package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// patience bounds every wait for a condition; it is not a claim about speed.
const patience = time.Minute

// maxLog is the number of bytes of a process's log that a failed test shows.
const maxLog = 20 << 10

// world is two hosts of a fleet, two of engines, one of etcd, and one of
// clients, which is the test.
type world struct {
	t       *testing.T
	network *network
	clients *host
	proxies [2]*proxy
	engines []*process // prefill and decode of the first host, then of the second
	etcd    *process
	alone   *process // an engine whose answers are the right texts
	etcds   *host
	store   *clientv3.Client
}

// proxy is a host of the fleet: a supervisor, a coordinator and two workers.
type proxy struct {
	*process
	host   *host
	dir    *privatedir.Dir
	admin  surface.Admin
	listen string // of the coordinator
	config string // the file's path
}

// process is a program on a host. It can be restarted.
type process struct {
	w    *world
	host *host
	name string
	args []string
	url  string
	log  *os.File

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{}
}

// process starts one.
func (w *world) process(h *host, name, url string, args ...string) *process {
	w.t.Helper()
	log, err := os.Create(filepath.Join(w.t.TempDir(), name+".log"))
	if err != nil {
		w.t.Fatal(err)
	}
	p := &process{w: w, host: h, name: name, url: url, args: args, log: log}
	w.t.Cleanup(func() {
		p.kill()
		if w.t.Failed() {
			b, _ := os.ReadFile(log.Name())
			w.t.Logf("end of the log of %s:\n%s", name, b[max(0, len(b)-maxLog):])
		}
		log.Close()
	})
	p.start()
	return p
}

// start starts it, or starts it again.
func (p *process) start() {
	p.w.t.Helper()
	c := exec.Command(p.args[0], p.args[1:]...)
	c.Stdout, c.Stderr = p.log, p.log
	c.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH=arm64")
	if err := p.host.start(c); err != nil {
		p.w.t.Errorf("start %s on host %s: %v", p.name, p.host.name, err)
		return
	}
	done := make(chan struct{})
	go func() { _ = c.Wait(); close(done) }() // the error is the report of the kill
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd, p.done = c, done
}

func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.cmd.Process.Signal(s) // it may have ended
}

// kill ends the process as kill -9 does, and waits for its end.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	p.mu.Lock()
	done := p.done
	p.mu.Unlock()
	<-done
}

// newWorld starts everything and waits until the fleet is complete.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t}
	w.network = newNetwork(t, "clients", "a", "b", "e1", "e2", "etcd")
	h := w.network.hosts
	w.clients, w.etcds = h[0], h[5]
	w.startStore()
	var engines strings.Builder
	for i, role := range []string{enginesim.RolePrefill, enginesim.RoleDecode, enginesim.RolePrefill, enginesim.RoleDecode} {
		name := fmt.Sprintf("%s%d", role[:1], 1+i/2)
		w.engines = append(w.engines, w.engine(h[3+i/2], name, role, 8100+i))
		fmt.Fprintf(&engines, "[[engine]]\nname = %q\nurl = %q\nrole = %q\nconnector = %q\n", name, w.engines[i].url, role, enginesim.ConnectorVLLMNixl)
	}
	w.alone = w.engine(w.clients, "alone", enginesim.RoleBoth, 8199)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("the token of this fleet"), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range w.proxies {
		w.proxies[i] = w.proxy(h[1+i], token, engines.String())
	}
	await(t, "the fleet is whole", w.whole)
	return w
}

// startStore starts an etcd of one member.
func (w *world) startStore() {
	w.t.Helper()
	url, peers := "http://"+w.etcds.ip+":2379", "http://"+w.etcds.ip+":2380"
	w.etcd = w.process(w.etcds, "etcd", url, "etcd", "--name", "e0", "--data-dir", filepath.Join(w.t.TempDir(), "etcd"),
		"--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peers,
		"--initial-advertise-peer-urls", peers, "--initial-cluster", "e0="+peers, "--log-level", "warn")
	var err error
	if w.store, err = clientv3.New(clientv3.Config{Endpoints: []string{url}, Logger: zap.NewNop()}); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { w.store.Close() })
	await(w.t, "etcd answers", w.stored)
}

// stored reports whether etcd answers.
func (w *world) stored() bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, err := w.store.Get(ctx, "x")
	return err == nil
}

func (w *world) engine(h *host, name, role string, port int) *process {
	w.t.Helper()
	listen := fmt.Sprint(h.ip, ":", port)
	p := w.process(h, name, "http://"+listen, pdproxy, "sim", "--role", role, "--connector", enginesim.ConnectorVLLMNixl,
		"--listen", listen, "--name", name, "--prefill-us-per-token", "100", "--decode-us-per-token", "10000", "--log-level", "warn")
	await(w.t, "engine "+name+" answers", func() bool { return status(http.DefaultClient, p.url+"/health") == 200 })
	return p
}

// configuration is the configuration of both hosts except for their addresses.
// Health probes are frequent, so that a stopped engine is noticed within 750
// ms.
const configuration = `
[server]
listen = "%[1]s:8080"
expose_placement = true
drain_timeout = "10s"
[admin]
listen = "%[1]s:9090"
token_file = %[2]q
[health]
interval = "100ms"
suspect_interval = "25ms"
timeout = "%[5]v"
unhealthy_after = 3
healthy_after = 1
[timeouts]
dial = "500ms"
[fleet]
workers = 2
dir = %[3]q
listen = "%[1]s:8331"
token_file = %[2]q
[fleet.etcd]
endpoints = [%[4]q]
lease = "2s"
`

func (w *world) proxy(h *host, token, engines string) *proxy {
	w.t.Helper()
	p := &proxy{host: h, dir: privatedirtest.Open(w.t), listen: h.ip + ":8331"}
	w.t.Cleanup(func() { p.end(w.t) })
	p.config = filepath.Join(w.t.TempDir(), "config.toml")
	text := fmt.Sprintf(configuration, h.ip, token, p.dir.Name(), w.etcd.url, probed) + engines
	if err := os.WriteFile(p.config, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	secret, err := os.ReadFile(token)
	if err != nil {
		w.t.Fatal(err)
	}
	p.admin = surface.Admin{Client: &http.Client{Transport: bearer(secret), Timeout: 2 * time.Second}, URL: "http://" + h.ip + ":9090"}
	p.process = w.process(h, "proxy-"+h.name, "http://"+h.ip+":8080", pdproxy, "run", p.config)
	return p
}

// probeFor sets the time limit of a probe on both hosts.
func (w *world) probeFor(limit time.Duration) {
	w.t.Helper()
	for _, p := range w.proxies {
		text, err := os.ReadFile(p.config)
		if err == nil {
			text = probeTimeout.ReplaceAll(text, fmt.Appendf(nil, "\ntimeout = %q\n", limit))
			err = os.WriteFile(p.config, text, 0o600)
		}
		if err != nil {
			w.t.Fatal(err)
		}
		before := p.reloads()
		p.signal(syscall.SIGHUP)
		await(w.t, "coordinator and workers have read the file again", func() bool { return p.reloads() >= before+3 })
	}
}

var probeTimeout = regexp.MustCompile(`\ntimeout = "[^"]*"\n`)

// reloads returns how often a process of the host has read the file again.
func (p *proxy) reloads() int {
	b, _ := os.ReadFile(p.log.Name()) // the file exists
	return bytes.Count(b, []byte("configuration reloaded"))
}

// bearer sends a token. Each request has its own connection, because the
// processes behind an address change.
type bearer string

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+string(b))
	r.Close = true
	return http.DefaultTransport.RoundTrip(r)
}

// status is that of an answer, 0 for none.
func status(c *http.Client, url string) int {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0
	}
	resp, err := c.Do(r)
	if err != nil {
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

// await waits for a condition.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// holder returns the process of a host that holds a lock, 0 for none.
func (p *proxy) holder(lock string) int {
	h, held, _ := p.dir.LockHolder(lock) // no process has the lock
	if !held || h.State == "retired" {
		return 0
	}
	return h.PID
}

// children returns the processes of a role.
func (p *proxy) children(role string) (pids []int) {
	for slot := range 8 {
		if pid := p.holder(fmt.Sprintf("%s-%d.lock", role, slot)); pid != 0 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// busiest returns the worker of a host with the most requests.
func (w *world) busiest(p *proxy) (pid int) {
	leader, _ := w.leader()
	await(w.t, "host "+p.host.name+" has requests", func() bool {
		var rows []struct {
			Node        string
			PID, Leases int
		}
		most := 0
		if leader.admin.Get("/v1/workers", &rows) != nil {
			return false
		}
		for _, r := range rows {
			if r.Node == p.host.name && r.Leases > most {
				pid, most = r.PID, r.Leases
			}
		}
		return most > 0
	})
	return pid
}

// exited waits until the supervisor has found the end of a killed process. On a busy machine the
// kernel closes the sockets of the process some hundred milliseconds after SIGKILL. A request that
// comes before that is lost with the others.
func exited(t *testing.T, pid int) {
	await(t, fmt.Sprintf("process %d ends", pid), func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
}

// end kills the remaining processes of a supervisor that was killed before.
func (p *proxy) end(t *testing.T) {
	await(t, "the processes of host "+p.host.name+" end", func() bool {
		left := append(p.children("worker"), p.children("coordinator")...)
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
		}
		return len(left) == 0
	})
}

// whole reports whether all processes run and can serve, and one coordinator
// has all workers.
func (w *world) whole() bool {
	for _, p := range w.proxies {
		if p.holder("office.lock") == 0 || len(p.children("worker")) != 2 || len(p.children("coordinator")) != 1 {
			return false
		}
		if status(p.admin.Client, p.admin.URL+"/readyz") != 200 {
			return false
		}
	}
	for _, e := range w.engines {
		if status(http.DefaultClient, e.url+"/health") != 200 {
			return false
		}
	}
	if !w.stored() {
		return false
	}
	var workers []json.RawMessage
	leader, _ := w.leader()
	return leader != nil && leader.admin.Get("/v1/workers", &workers) == nil && len(workers) == 4
}

// leader returns the host whose coordinator leads, and the other host.
func (w *world) leader() (leads, standsBy *proxy) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	answer, err := w.store.Get(ctx, "/pdproxy/fleets/pdproxy/leader")
	var l election.Leader
	if err != nil || len(answer.Kvs) != 1 || json.Unmarshal(answer.Kvs[0].Value, &l) != nil {
		return nil, nil
	}
	if l.Address == w.proxies[0].listen {
		return w.proxies[0], w.proxies[1]
	}
	return w.proxies[1], w.proxies[0]
}

// rest describes the remaining state of requests; "" if nothing remains. Without blocks, an engine
// that has no request has nothing left.
func (w *world) rest(blocks bool) string {
	var left []string
	for _, p := range w.proxies {
		n, err := p.admin.Metric("pdproxy_leases_open")
		if err != nil {
			left = append(left, fmt.Sprintf("cannot read the leases of %s: %v", p.name, err))
		} else if n != 0 {
			left = append(left, fmt.Sprintf("%s has %v leases", p.name, n))
		}
	}
	for _, e := range w.engines {
		var s enginesim.State
		if err := (surface.Admin{Client: &http.Client{Timeout: time.Second}, URL: e.url}).Get("/sim/state", &s); err != nil {
			left = append(left, fmt.Sprintf("engine %s: %v", e.name, err))
		} else if n := s.RequestsRunning + s.RequestsWaiting; n > 0 || blocks && s.BlocksPinned+s.BlocksUsed > 0 {
			left = append(left, fmt.Sprintf("engine %s has %d blocks pinned, %d used, %d requests", e.name, s.BlocksPinned, s.BlocksUsed, n))
		} else if s.DuplicateIDs > 0 {
			left = append(left, fmt.Sprintf("engine %s saw %d ids twice", e.name, s.DuplicateIDs))
		}
	}
	return strings.Join(left, "; ")
}
