package fleet

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	pdnode "github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// asCoordinator is an environment variable. It names the configuration file
// with which this program runs as a coordinator that a test can kill.
const asCoordinator = "PDPROXY_TEST_COORDINATOR"

func TestMain(m *testing.M) {
	path := os.Getenv(asCoordinator)
	if path == "" {
		os.Exit(isolated.Run(m))
	}
	var cfg config.Config
	data, err := os.ReadFile(path)
	if err == nil {
		err = gob.NewDecoder(bytes.NewReader(data)).Decode(&cfg)
	}
	var dir *privatedir.Dir
	if err == nil {
		dir, err = privatedir.OpenExisting(filepath.Dir(path))
	}
	if err == nil {
		var n *pdnode.Node
		if n, err = pdnode.New(&cfg, slog.New(slog.NewTextHandler(os.Stderr, nil)), pdnode.Options{Role: pdnode.RoleCoordinator, Dir: dir}); err == nil {
			err = n.Serve(context.Background())
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// host is a coordinator and a worker of a fleet with several hosts.
type host struct {
	f      *fleet
	cfg    config.Config // of the coordinator
	dir    *privatedir.Dir
	admin  surface.Admin // of the coordinator
	worker *node
	log    bytes.Buffer
	cmd    *exec.Cmd // the coordinator; nil: it does not run
}

// host makes a host whose coordinator reaches etcd through one wire and whose
// worker uses another. Its coordinator is a process.
func (f *fleet) host(coordinator, worker *testbed.Wire) *host {
	f.t.Helper()
	h := &host{f: f, dir: privatedirtest.Open(f.t)}
	f.dir = h.dir
	f.cfg.Fleet.Listen = testbed.FreeAddr(f.t)
	f.cfg.Fleet.Etcd.Lease = config.Duration(2 * time.Second)
	h.cfg = f.cfg
	h.cfg.Fleet.Etcd.Endpoints = []string{"http://" + coordinator.Addr()}
	h.cfg.Admin.Listen = testbed.FreeAddr(f.t)
	h.admin = surface.Admin{Client: f.client, URL: "http://" + h.cfg.Admin.Listen}
	h.start()
	f.t.Cleanup(func() {
		if h.kill(); f.t.Failed() {
			f.t.Logf("coordinator %s:\n%s", h.cfg.Fleet.Listen, h.log.String())
		}
	})
	f.cfg.Fleet.Etcd.Endpoints = []string{"http://" + worker.Addr()}
	h.worker = f.node(pdnode.RoleWorker, 0)
	f.workers = append(f.workers, h.worker)
	testbed.Eventually(f.t, "the worker is ready", func() bool { return f.status(h.worker.URL()+"/health") == 200 })
	testbed.Eventually(f.t, "the coordinator leads or is in step", h.ready)
	return h
}

// start starts the coordinator.
func (h *host) start() {
	h.f.t.Helper()
	path := h.dir.Path("config")
	var data bytes.Buffer
	if err := gob.NewEncoder(&data).Encode(h.cfg); err != nil {
		h.f.t.Fatal(err)
	}
	if err := os.WriteFile(path, data.Bytes(), 0o600); err != nil {
		h.f.t.Fatal(err)
	}
	h.cmd = exec.Command(os.Args[0])
	h.cmd.Env = append(os.Environ(), asCoordinator+"="+path)
	h.cmd.Stderr = &h.log
	if err := h.cmd.Start(); err != nil {
		h.f.t.Fatal(err)
	}
}

// kill ends the coordinator as kill -9 does.
func (h *host) kill() {
	if h.cmd != nil {
		_ = h.cmd.Process.Kill()
		_ = h.cmd.Wait() // killed, it says
		h.cmd = nil
	}
}

func (h *host) ready() bool { return h.f.status(h.admin.URL+"/readyz") == 200 }

// leases returns the coordinator's number of leases; -1: no answer.
func (h *host) leases() float64 {
	n, err := h.admin.Metric("pdproxy_leases_open")
	if err != nil {
		return -1
	}
	return n
}

// alone returns the number of requests that the worker has placed without a
// coordinator.
func (h *host) alone() float64 {
	return h.f.metric(h.worker, "pdproxy_fallbacks_total", `what="place"`, `reason="coordinator"`)
}

// leader returns the record in etcd.
func leader(t *testing.T, s *testbed.Etcd) (l election.Leader) {
	t.Helper()
	answer, err := s.Client().Get(t.Context(), "/pdproxy/fleets/pdproxy/leader")
	if err != nil || len(answer.Kvs) != 1 {
		t.Fatalf("s.Client().Get = %v, %v", answer, err)
	}
	if err := json.Unmarshal(answer.Kvs[0].Value, &l); err != nil {
		t.Fatal(err)
	}
	return l
}

// turn sends one turn of a conversation through a worker, which must serve it,
// and returns the engine.
func (f *fleet) turn(w *node, conversation string) string {
	f.t.Helper()
	body := fmt.Sprintf(`{"model":"sim","prompt":"a turn of %s","max_tokens":2,"conversation_id":%q}`, conversation, conversation)
	resp, err := f.client.Post(w.URL()+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		f.t.Fatalf("got status %d, %v: %s", resp.StatusCode, err, text)
	}
	return resp.Header.Get("X-Pdproxy-Prefill") + " " + resp.Header.Get("X-Pdproxy-Decode")
}

// led starts a fleet of two hosts over one etcd. The first host leads. change adapts the
// configuration of all nodes.
func led(t *testing.T, change ...func(*config.Config)) (f *fleet, s *testbed.Etcd, hosts [2]*host, wires [2]*testbed.Wire) {
	t.Helper()
	s = testbed.StartEtcd(t, nil)
	f = bare(t, enginesim.ConnectorVLLMNixl, 1)
	f.cfg.Server.ExposePlacement = true
	f.cfg.Policy.Place = "conversation"
	for _, c := range change {
		c(&f.cfg)
	}
	for i := range hosts {
		wires[i] = testbed.NewWire(t, s.Addr)
		hosts[i] = f.host(wires[i], wires[i])
	}
	if l := leader(t, s); l.Address != hosts[0].cfg.Fleet.Listen {
		t.Fatalf("%+v leads", l)
	}
	f.held(true)
	return f, s, hosts, wires
}

// nothingLeft asserts that a coordinator has no lease and that no engine holds
// anything.
func (f *fleet) nothingLeft(hosts ...*host) {
	f.t.Helper()
	for _, h := range hosts {
		testbed.Eventually(f.t, "no lease is open", func() bool { return h.leases() == 0 })
	}
	f.idle()
}

// TestLeaderKilled kills the leading coordinator while streams are open, and then the next one. No
// request waits, the next coordinator has the leases, and conversations stay on their engines.
func TestLeaderKilled(t *testing.T) {
	f, s, hosts, _ := led(t)
	homes := map[string]string{}
	for n := range 12 {
		id := fmt.Sprint("c", n)
		homes[id] = f.turn(hosts[n%2].worker, id)
	}
	var streams []*stream
	for n, h := range hosts {
		streams = append(streams, f.open(h.worker.URL(), fmt.Sprint("held ", n), 8000))
		if n := h.alone(); n != 0 {
			t.Errorf("%v requests were placed without a coordinator", n)
		}
	}
	testbed.Eventually(t, "the coordinator has the leases of both streams", func() bool { return hosts[0].leases() == 2 })
	time.Sleep(time.Second) // ten polls of the standby
	for round := range 2 {
		gone, next := hosts[round%2], hosts[(round+1)%2]
		before := leader(t, s)
		gone.kill()
		began, served, longest := time.Now(), 0, time.Duration(0)
		for ; next.leases() != 2; served++ {
			asked := time.Now()
			f.turn(hosts[served%2].worker, fmt.Sprint("meanwhile ", served))
			longest = max(longest, time.Since(asked))
		}
		t.Logf("round %d: the next coordinator leads, with the leases, %v after the kill; %d requests meanwhile took at most %v", round, time.Since(began), served, longest)
		if hosts[0].alone()+hosts[1].alone() == 0 {
			t.Errorf("%d requests were served without a leader, and none is counted", served)
		}
		if l := leader(t, s); l.Epoch <= before.Epoch || l.Address != next.cfg.Fleet.Listen {
			t.Errorf("%+v leads after %+v", l, before)
		}
		was := hosts[0].alone() + hosts[1].alone()
		for id, home := range homes {
			if at := f.turn(hosts[round].worker, id); at != home {
				t.Errorf("round %d: conversation %s was on %s and is on %s", round, id, home, at)
			}
		}
		if n := hosts[0].alone() + hosts[1].alone() - was; n != 0 {
			t.Errorf("round %d: %v requests were placed without the coordinator that leads", round, n)
		}
		gone.start()
		testbed.Eventually(t, "the killed coordinator has the state of the leader again", gone.ready)
	}
	f.held(false)
	for n, stream := range streams {
		f.whole(stream, fmt.Sprint("held ", n), 8000)
	}
	f.nothingLeft(hosts[0], hosts[1])
}

// TestLeaderStopped stops the leading coordinator, as SIGSTOP does, until the
// next one has the leases. When it continues it notices that its term is over.
func TestLeaderStopped(t *testing.T) {
	f, s, hosts, _ := led(t)
	var streams []*stream
	for n, h := range hosts {
		streams = append(streams, f.open(h.worker.URL(), fmt.Sprint("held ", n), 5000))
	}
	testbed.Eventually(t, "the coordinator has the leases of both streams", func() bool { return hosts[0].leases() == 2 })
	before := leader(t, s)
	if err := hosts[0].cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for n := 0; hosts[1].leases() != 2; n++ {
		f.turn(hosts[n%2].worker, fmt.Sprint("meanwhile ", n))
	}
	if l := leader(t, s); l.Epoch <= before.Epoch {
		t.Errorf("%+v leads after %+v", l, before)
	}
	if err := hosts[0].cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	testbed.Eventually(t, "the former one has no lease and is in step", func() bool { return hosts[0].leases() == 0 && hosts[0].ready() })
	f.held(false)
	for n, stream := range streams {
		f.whole(stream, fmt.Sprint("held ", n), 5000)
	}
	f.nothingLeft(hosts[0], hosts[1])
}

// TestSplit cuts the leader's host off from etcd. The leader continues for its
// own worker, at the same time as the next one. Their ids differ, and no lease
// remains on either. When the wire is joined all follow the later leader.
func TestSplit(t *testing.T) {
	f, s, hosts, wires := led(t)
	old := f.open(hosts[0].worker.URL(), "old", 4000)
	both := f.open(hosts[1].worker.URL(), "both", 4000)
	testbed.Eventually(t, "the coordinator has the leases of both streams", func() bool { return hosts[0].leases() == 2 })
	first := leader(t, s)
	wires[0].Cut(true)
	testbed.Eventually(t, "each has its worker's lease", func() bool { return hosts[0].leases() == 1 && hosts[1].leases() == 1 })
	if l := leader(t, s); l.Epoch <= first.Epoch {
		t.Errorf("%+v leads after %+v", l, first)
	}
	was := hosts[0].alone() + hosts[1].alone()
	for n := range 40 {
		f.turn(hosts[n%2].worker, fmt.Sprint("split ", n))
	}
	if n := hosts[0].alone() + hosts[1].alone() - was; n != 0 {
		t.Errorf("%v requests were placed without a coordinator", n)
	}
	f.held(false)
	f.whole(old, "old", 4000)
	f.whole(both, "both", 4000)
	f.nothingLeft(hosts[0], hosts[1])
	f.held(true)
	near := f.open(hosts[0].worker.URL(), "near", 4000)
	far := f.open(hosts[1].worker.URL(), "far", 4000)
	wires[0].Cut(false)
	testbed.Eventually(t, "all follow the later one", func() bool { return hosts[0].leases() == 0 && hosts[1].leases() == 2 })
	f.held(false)
	f.whole(near, "near", 4000)
	f.whole(far, "far", 4000)
	f.nothingLeft(hosts[0], hosts[1])
}

// TestCoordinatorReplaced lets a second coordinator take over from the first, as in an upgrade. It
// waits until it has the whole state, and leads when the first coordinator leaves. Both have the
// same directory and the same socket of fleet.listen.
func TestCoordinatorReplaced(t *testing.T) {
	t.Run("alone", func(t *testing.T) { replace(t, bare(t, enginesim.ConnectorVLLMNixl, 2)) })
	t.Run("with etcd", func(t *testing.T) {
		s := testbed.StartEtcd(t, nil)
		f := bare(t, enginesim.ConnectorVLLMNixl, 2)
		f.cfg.Fleet.Etcd.Endpoints = []string{"http://" + s.Addr}
		replace(t, f)
	})
}

func replace(t *testing.T, f *fleet) {
	f.cfg.Server.ExposePlacement = true
	f.cfg.Policy.Place = "conversation"
	f.cfg.Fleet.Listen = testbed.FreeAddr(t)
	var err error
	if f.socket, err = net.Listen("tcp", f.cfg.Fleet.Listen); err != nil {
		t.Fatal(err)
	}
	defer f.socket.Close()
	f.coordinator = f.node(pdnode.RoleCoordinator, 0)
	f.workers = append(f.workers, f.node(pdnode.RoleWorker, 0))
	f.cfg.Fleet.Coordinator = f.cfg.Fleet.Listen
	f.workers = append(f.workers, f.node(pdnode.RoleWorker, 1)) // as a worker of another host
	f.cfg.Fleet.Coordinator = ""
	for _, w := range f.workers {
		testbed.Eventually(t, "the worker is ready", func() bool { return f.status(w.URL()+"/health") == 200 })
	}
	homes, streams := map[string]string{}, []*stream{}
	for n := range 6 {
		id := fmt.Sprint("c", n)
		homes[id] = f.turn(f.workers[n%2], id)
	}
	f.held(true)
	for n, w := range f.workers {
		streams = append(streams, f.open(w.URL(), fmt.Sprint("held ", n), 5000))
	}
	for round := range 2 {
		first := f.coordinator
		second := f.node(pdnode.RoleCoordinator, 0)
		testbed.Eventually(t, "the second is in step", func() bool { return f.status(second.admin.URL+"/readyz") == 200 })
		if n := f.metric(first, "pdproxy_leases_open"); n != 2 {
			t.Errorf("round %d: the first has %v leases", round, n)
		}
		f.coordinator = second
		f.end(first)
		testbed.Eventually(t, "the second has the leases", func() bool { return f.metric(second, "pdproxy_leases_open") == 2 })
		for id, home := range homes {
			if at := f.turn(f.workers[round], id); at != home {
				t.Errorf("round %d: conversation %s was on %s and is on %s", round, id, home, at)
			}
		}
	}
	f.held(false)
	for n, stream := range streams {
		f.whole(stream, fmt.Sprint("held ", n), 5000)
	}
	f.settled()
}

// TestEtcdAway: there is no etcd for PDPROXY_ETCD_AWAY, or for more than two
// leases, and requests are not affected.
func TestEtcdAway(t *testing.T) {
	f, s, hosts, _ := led(t)
	before := leader(t, s)
	away, err := time.ParseDuration(os.Getenv("PDPROXY_ETCD_AWAY"))
	if err != nil {
		away = 5 * time.Second
	}
	n := 0
	serve := func(d time.Duration) {
		for end := time.Now().Add(d); time.Now().Before(end); n++ {
			f.turn(hosts[n%2].worker, fmt.Sprint("c", n))
		}
	}
	s.Kill()
	serve(away)
	s.Start()
	serve(5 * time.Second)
	if l := leader(t, s); l != before {
		t.Errorf("%+v leads after %+v", l, before)
	}
	if alone := hosts[0].alone() + hosts[1].alone(); alone != 0 {
		t.Errorf("%v of %d requests were placed without a coordinator", alone, n)
	}
	f.nothingLeft(hosts[0], hosts[1])
}
