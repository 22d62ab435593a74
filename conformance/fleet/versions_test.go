package fleet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// programs builds pdproxy twice: this version, and one with the build tag fleetnext. The second
// program writes unknown fields into each message between processes, and sends messages and calls
// of unknown kinds.
func programs(t *testing.T) (this, next string) {
	t.Helper()
	build := func(name string, flags ...string) string {
		path := filepath.Join(t.TempDir(), name)
		args := append(append([]string{"build", "-o", path}, flags...), "../../cmd/pdproxy")
		if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
			t.Fatalf("go %v: %v\n%s", args, err, out)
		}
		program, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, mark := range []string{"a field of a later version", "a message of a later version"} {
			if bytes.Contains(program, []byte(mark)) != (name == "next") {
				t.Fatalf("program %s: it has %q, or does not have it", name, mark)
			}
		}
		return path
	}
	return build("this"), build("next", "-tags=fleetnext")
}

// site is a host whose supervisor, coordinator and worker are processes of a built program.
type site struct {
	f       *fleet
	dir     *privatedir.Dir
	program string // path that the supervisor runs
	version string // path of its content
	config  string
	clients string // server.listen
	fleet   string // fleet.listen
	admin   surface.Admin
	log     bytes.Buffer
	process *exec.Cmd
	exited  chan struct{} // closed when process has ended
}

// site starts a host with a worker and waits until it is ready.
func (f *fleet) site(version, etcd string) *site {
	f.t.Helper()
	s := &site{f: f, dir: privatedirtest.Open(f.t), clients: testbed.FreeAddr(f.t), fleet: testbed.FreeAddr(f.t), exited: make(chan struct{})}
	s.admin = surface.Admin{Client: f.client, URL: "http://" + testbed.FreeAddr(f.t)}
	s.program, s.config = filepath.Join(f.t.TempDir(), "pdproxy"), filepath.Join(f.t.TempDir(), "config.toml")
	s.install(version)
	var text strings.Builder
	fmt.Fprintf(&text, "[server]\nlisten = %q\nexpose_placement = true\n[admin]\nlisten = %q\n", s.clients, strings.TrimPrefix(s.admin.URL, "http://"))
	fmt.Fprintf(&text, "[policy]\nplace = \"conversation\"\n[health]\ninterval = \"200ms\"\ntimeout = \"10s\"\n")
	fmt.Fprintf(&text, "[fleet]\nworkers = 1\ndir = %q\nlisten = %q\n[fleet.etcd]\nendpoints = [\"http://%s\"]\nlease = \"2s\"\n", s.dir.Name(), s.fleet, etcd)
	for _, e := range f.cfg.Engines {
		fmt.Fprintf(&text, "[[engine]]\nname = %q\nurl = %q\nrole = %q\nconnector = %q\n", e.Name, e.URL, e.Role, e.Connector)
	}
	if err := os.WriteFile(s.config, []byte(text.String()), 0o600); err != nil {
		f.t.Fatal(err)
	}
	s.process = exec.Command(s.program, "run", s.config)
	s.process.Stderr = &s.log // also of its successors, whose copy ends with the last of them
	if err := s.process.Start(); err != nil {
		f.t.Fatal(err)
	}
	go func() {
		_ = s.process.Wait() // a predecessor ends with its last stream
		close(s.exited)
	}()
	f.t.Cleanup(s.end)
	s.ready()
	return s
}

// install replaces the program by a rename.
func (s *site) install(version string) {
	s.f.t.Helper()
	err := os.Link(version, s.program+".new")
	if err == nil {
		err = os.Rename(s.program+".new", s.program)
	}
	if err != nil {
		s.f.t.Fatal(err)
	}
	s.version = version
}

func (s *site) ready() {
	s.f.t.Helper()
	testbed.Eventually(s.f.t, "host "+s.fleet+" is ready", func() bool {
		return s.f.status(s.admin.URL+"/readyz") == 200 && s.f.status("http://"+s.clients+"/health") == 200
	})
}

// supervisor returns the supervisor's process; 0: none.
func (s *site) supervisor() int {
	h, _, _ := s.dir.LockHolder("office.lock") // no file: no process
	return h.PID
}

// replace upgrades the host to a version, as docs/howto/upgrade.md does, and waits until no process
// of the earlier version is left.
func (s *site) replace(version string) {
	s.f.t.Helper()
	s.install(version)
	old := s.supervisor()
	if err := syscall.Kill(old, syscall.SIGUSR2); err != nil {
		s.f.t.Fatal(err)
	}
	testbed.Eventually(s.f.t, "a successor is in office", func() bool { pid := s.supervisor(); return pid != 0 && pid != old })
	testbed.Eventually(s.f.t, "the predecessor has ended", func() bool { return gone(old) })
	s.ready()
}

// gone reports whether a process has ended, also if nothing has waited for it.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// end stops the host's processes.
func (s *site) end() {
	if pid := s.supervisor(); pid != 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM)
		testbed.Eventually(s.f.t, "host "+s.fleet+" stops", func() bool { return gone(pid) && s.supervisor() == 0 })
	}
	<-s.exited
	if s.f.t.Failed() {
		s.f.t.Logf("host %s:\n%s", s.fleet, s.log.String())
	}
}

// talk is a constant load of conversations, whose turns alternate between the hosts.
type talk struct {
	stop           atomic.Bool
	served, failed atomic.Int64
	homes          [conversations]atomic.Value // engines of the last turn
	wg             sync.WaitGroup
}

const conversations = 12

func (f *fleet) talk(sites [2]*site) *talk {
	l := new(talk)
	for c := range conversations {
		l.wg.Go(func() {
			for n := c; !l.stop.Load(); n++ {
				home, err := f.say(sites[n%2], c, n%3 > 0)
				if err != nil {
					l.failed.Add(1)
					f.t.Errorf("conversation %d, turn %d: %v", c, n, err)
					return
				}
				l.homes[c].Store(home)
				l.served.Add(1)
			}
		})
	}
	return l
}

// settled returns the engines of each conversation after some more turns.
func (l *talk) settled(t *testing.T) (homes [conversations]any) {
	t.Helper()
	until := l.served.Load() + 20*conversations
	testbed.Eventually(t, "requests are served", func() bool { return l.served.Load() >= until || l.failed.Load() > 0 })
	for c := range homes {
		homes[c] = l.homes[c].Load()
	}
	return homes
}

// say sends one turn, checks that the answer is whole, and returns its engines.
func (f *fleet) say(s *site, conversation int, stream bool) (home string, err error) {
	body := fmt.Sprintf(`{"model":"sim","prompt":"conversation %d says much","max_tokens":5,"ignore_eos":true,"stream":%t,"conversation_id":"c%d"}`, conversation, stream, conversation)
	resp, err := f.client.Post("http://"+s.clients+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return "", err
	case resp.StatusCode != http.StatusOK:
		return "", fmt.Errorf("status %d: %s", resp.StatusCode, text)
	case stream && !bytes.HasSuffix(text, []byte("data: [DONE]\n\n")), !stream && !json.Valid(text), bytes.Contains(text, []byte(`"error"`)):
		return "", fmt.Errorf("the answer is not whole: %s", text)
	}
	home = resp.Header.Get("X-Pdproxy-Prefill") + " " + resp.Header.Get("X-Pdproxy-Decode")
	if len(strings.Fields(home)) != 2 {
		err = errors.New("the answer is not of two engines: " + home)
	}
	return home, err
}

// leads waits until both workers are connected to one leader, and returns its host.
func (f *fleet) leads(etcd *testbed.Etcd, sites [2]*site) (leads *site) {
	f.t.Helper()
	testbed.Eventually(f.t, "both workers are connected to one leader", func() bool {
		for _, leads = range sites {
			if n, err := leads.admin.Metric("pdproxy_fleet_workers"); err == nil && n == 2 && leader(f.t, etcd).Address == leads.fleet {
				return true
			}
		}
		return false
	})
	return leads
}

// alone returns the number of requests that the workers of this leader have placed themselves.
func (s *site) alone() float64 {
	s.f.t.Helper()
	n, err := s.admin.Metric("pdproxy_fallbacks_total", `what="place"`, `reason="coordinator"`)
	if err != nil {
		s.f.t.Fatal(err)
	}
	return n
}

// TestVersions replaces the program of two hosts, one host after the other, under a constant load:
// first by a program with a later schema, then by this one again. In between, a coordinator of each
// version leads a worker of the other. No request fails. When both workers have the next leader, no
// request is placed without it, and all conversations are on their engines again. At the end
// nothing of any request remains.
func TestVersions(t *testing.T) {
	this, next := programs(t)
	etcd := testbed.StartEtcd(t, nil)
	f := bare(t, enginesim.ConnectorVLLMNixl, 1)
	sites := [2]*site{f.site(this, etcd.Addr), f.site(this, etcd.Addr)}
	f.leads(etcd, sites)
	load := f.talk(sites)
	defer load.wg.Wait()
	defer load.stop.Store(true)
	homes := load.settled(t)
	mixed := map[string]bool{} // versions of the leader and of a worker
	for _, version := range []string{next, this} {
		for _, s := range sites {
			began := time.Now()
			s.replace(version)
			took, leads := time.Since(began), f.leads(etcd, sites)
			between := leads.alone()
			if now := load.settled(t); now != homes {
				t.Errorf("the conversations were on %v and are on %v", homes, now)
			}
			if n := leads.alone() - between; n != 0 {
				t.Errorf("%v requests were placed without the coordinator that leads", n)
			}
			for _, s := range sites {
				mixed[filepath.Base(leads.version)+" leads "+filepath.Base(s.version)] = true
			}
			t.Logf("host %s runs %s after %v, %s leads; %v requests were placed between two leaders", s.fleet, filepath.Base(version), took.Round(time.Millisecond), leads.fleet, between)
		}
	}
	for _, want := range []string{"this leads next", "next leads this"} {
		if !mixed[want] {
			t.Errorf("never: %s; only %v", want, mixed)
		}
	}
	load.stop.Store(true)
	load.wg.Wait()
	for _, s := range sites {
		testbed.Eventually(t, "no lease is open", func() bool {
			n, err := s.admin.Metric("pdproxy_leases_open")
			return err == nil && n == 0
		})
	}
	f.idle()
	t.Logf("%d requests, %d failed", load.served.Load(), load.failed.Load())
}
