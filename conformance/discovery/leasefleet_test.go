//go:build kubernetes

package discovery

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
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// leaseFleet is three pods of the built program that elect their leader in a Lease. Their rights are
// those that the Helm chart gives a service account.
type leaseFleet struct {
	*cluster
	engines []*enginesim.Engine
	members []*member
	secret  string // file of fleet.token_file
}

// member is one pod: a supervisor, a coordinator and a worker.
type member struct {
	node  // of its public and its admin address
	f     *leaseFleet
	fleet string // the address that the coordinator's record must have
	admin surface.Admin
	wire  *testbed.Wire // to the API server
	file  string        // the configuration
	log   testbed.Log
	cmd   *exec.Cmd // nil: killed
}

// engineKVLease is the time after which a prefill engine frees the blocks of a proxy that died. It is
// longer than a request of the test takes on a busy machine.
const engineKVLease = 15 * time.Second

func newLeaseFleet(t *testing.T) *leaseFleet {
	t.Helper()
	f := &leaseFleet{cluster: newCluster(t)}
	f.giveRights()
	f.secret = filepath.Join(t.TempDir(), "fleet")
	if err := os.WriteFile(f.secret, []byte("sixteen characters\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for i, role := range []string{"prefill", "prefill", "decode", "decode"} {
		e, err := enginesim.New(enginesim.Config{Connector: "vllm-nixl", Role: role, Listen: engineHost + ":0", Lease: engineKVLease})
		if err == nil {
			err = e.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		f.engines = append(f.engines, e)
		f.pod(fmt.Sprint("e", i), role, e.Addr())
	}
	for range 3 {
		f.members = append(f.members, f.member())
	}
	for _, m := range f.members {
		m.ready()
	}
	return f
}

// giveRights makes the service account and the rights of the chart, and a token of the account.
func (f *leaseFleet) giveRights() {
	f.t.Helper()
	for _, o := range documents(f.t, f.mustHelm("template", "fleet", chart, "--set", "rbac.leases=true,rbac.pods=true")) {
		if kind := o["kind"].(string); slices.Contains([]string{"ServiceAccount", "Role", "RoleBinding"}, kind) {
			f.do(http.MethodPost, strings.Replace(chartPaths[kind], "NAMESPACE", "llm", 1), o)
		}
	}
	path := strings.Replace(chartPaths["ServiceAccount"], "NAMESPACE", "llm", 1) + "/fleet-pdproxy/token"
	status, answer := f.call(http.MethodPost, path, "application/json", []byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{"expirationSeconds":3600}}`))
	var made struct{ Status struct{ Token string } }
	if err := json.Unmarshal(answer, &made); err != nil || status != http.StatusCreated || made.Status.Token == "" {
		f.t.Fatalf("token of the service account: status %d, %v\n%s", status, err, answer)
	}
	f.tell(made.Status.Token)
	client, _ := f.over(f.t)
	if _, err := client.Read(f.t.Context(), "/api/v1/namespaces/llm/secrets/x"); err == nil || !strings.Contains(err.Error(), "403") {
		f.t.Errorf("the service account reads Secrets: %v", err)
	}
}

// member starts a pod. Its processes listen for the fleet on all addresses, as pods with one
// configuration do.
func (f *leaseFleet) member() *member {
	f.t.Helper()
	listen, admin, port := testbed.FreeAddr(f.t), testbed.FreeAddr(f.t), testbed.Ports(f.t, 1)
	m := &member{
		node: node{t: f.t, url: "http://" + listen, adm: "http://" + admin}, f: f, fleet: fmt.Sprint("127.0.0.1:", port),
		admin: surface.Admin{Client: http.DefaultClient, URL: "http://" + admin}, wire: testbed.NewWire(f.t, f.server.addr()),
		file: filepath.Join(f.t.TempDir(), "config.toml"),
	}
	text := fmt.Sprintf(`[server]
listen = %q
expose_placement = true
[admin]
listen = %q
[policy]
place = "conversation"
[health]
interval = "100ms"
timeout = "10s"
[fleet]
workers = 1
listen = "0.0.0.0:%d"
token_file = %q
dir = %q
patience = "5s" # a live process has enough time on a busy machine
[fleet.lease]
name = "fleet"
duration = "2s"
[discovery.kubernetes]
api = "https://%s"
ca = %q
token_file = %q
namespace = "llm"
pods = "llm-d.ai/inference-serving=true"
[[discovery.kubernetes.engine]]
name = "vllm"
url = "http://vllm"
role = "both"
connector = "vllm-nixl"
`, listen, admin, port, f.secret, privatedirtest.Open(f.t).Name(), m.wire.Addr(), f.certs.ca, f.token)
	if err := os.WriteFile(m.file, []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
	m.start()
	f.t.Cleanup(func() {
		if m.kill(); f.t.Failed() {
			f.t.Logf("member %s:\n%s", m.fleet, m.log.String())
		}
	})
	return m
}

// start starts the pod's processes in a PID namespace, so that all of them end with the first one.
func (m *member) start() {
	m.f.t.Helper()
	m.cmd = exec.Command("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", os.Getenv("PDPROXY_PROGRAM"), "run", m.file)
	m.cmd.Stderr = &m.log
	if err := m.cmd.Start(); err != nil {
		m.f.t.Fatal(err)
	}
}

// kill ends the pod as the loss of its host does.
func (m *member) kill() {
	if m.cmd != nil {
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait() // killed, it says
		m.cmd = nil
	}
}

// ready waits until the pod serves and its coordinator leads or is in step.
func (m *member) ready() {
	m.f.t.Helper()
	for _, url := range []string{m.url + "/health", m.adm + "/readyz"} {
		testbed.Eventually(m.f.t, m.fleet+" is ready", func() bool { return answers(url) == http.StatusOK })
	}
}

// answers returns the status of a GET; 0: no answer.
func answers(url string) int {
	resp, err := http.Get(url)
	if err != nil {
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

// metric returns the sum of the series of a metric; -1: no answer.
func (m *member) metric(name string, labels ...string) float64 {
	v, err := m.admin.Metric(name, labels...)
	if err != nil {
		return -1
	}
	return v
}

// leader returns the member that leads by the Lease, and its epoch.
func (f *leaseFleet) leader() (*member, uint64) {
	f.t.Helper()
	_, l := f.lease()
	for _, m := range f.members {
		if m.fleet == l.Address {
			return m, l.Epoch
		}
	}
	f.t.Fatalf("the record names no member: %+v", l)
	return nil, 0
}

// next waits until another member leads with an epoch above one.
func (f *leaseFleet) next(before *member, epoch uint64) (*member, uint64) {
	f.t.Helper()
	began := time.Now()
	testbed.Eventually(f.t, "another member leads", func() bool { m, e := f.leader(); return m != before && e > epoch })
	f.t.Logf("another member leads in the Lease after %v", time.Since(began).Round(time.Millisecond))
	return f.leader()
}

// others returns the members except one.
func (f *leaseFleet) others(of *member) []*member {
	return slices.DeleteFunc(slices.Clone(f.members), func(m *member) bool { return m == of })
}

// follow waits until the coordinator of a member has the connections of n workers.
func (m *member) follow(n float64) {
	m.f.t.Helper()
	testbed.Eventually(m.f.t, fmt.Sprint(n, " workers follow ", m.fleet), func() bool { return m.metric("pdproxy_fleet_workers") == n })
}

// held makes the engines decode so slowly that open streams last, or at once.
func (f *leaseFleet) held(hold bool) {
	for _, e := range f.engines {
		e.SetDecodeUsPerToken(map[bool]int{true: 50_000}[hold])
	}
}

// turn sends a turn of a conversation and returns the engines. An error is any answer but a whole one.
func (m *member) turn(conversation string) (engines string, err error) {
	body := fmt.Sprintf(`{"model":"sim","prompt":"a turn of %s","max_tokens":4,"ignore_eos":true,"conversation_id":%q}`, conversation, conversation)
	resp, err := http.Post(m.url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	return resp.Header.Get("X-Pdproxy-Prefill") + " " + resp.Header.Get("X-Pdproxy-Decode"), err
}

// load sends requests through members until stop, one after another through each. stop returns the errors.
func load(members ...*member) (stop func() (served int, failed error)) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	ended := make(chan struct{})
	served, failed := 0, error(nil)
	for i, m := range members {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-ended:
					return
				default:
				}
				_, err := m.turn(fmt.Sprintf("load %d-%d", i, n))
				mu.Lock()
				if served++; err != nil {
					failed = errors.Join(failed, fmt.Errorf("through %s: %w", m.fleet, err))
				}
				mu.Unlock()
			}
		})
	}
	return func() (int, error) {
		close(ended)
		wg.Wait()
		return served, failed
	}
}

// content is the text of the events of a stream.
var content = regexp.MustCompile(`"content": ?"([^"]*)"`)

// text reads the rest of a stream.
func text(t *testing.T, resp *http.Response) string {
	t.Helper()
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.Contains(body, []byte("data: [DONE]")) {
		t.Errorf("the stream broke: %v", err)
	}
	var whole strings.Builder
	for _, m := range content.FindAllSubmatch(body, -1) {
		whole.Write(m[1])
	}
	return whole.String()
}

// nothingLeft waits until the coordinators have no lease, and no engine holds KV. No engine may have
// received an id twice.
func (f *leaseFleet) nothingLeft() {
	f.t.Helper()
	for _, m := range f.members {
		if m.cmd != nil {
			testbed.Eventually(f.t, m.fleet+" has no lease", func() bool { return m.metric("pdproxy_leases_open") == 0 })
		}
	}
	for _, e := range f.engines {
		testbed.Eventually(f.t, "the engine "+e.Addr()+" is empty", func() bool {
			s := e.State()
			return s.BlocksUsed == 0 && s.BlocksPinned == 0 && s.RequestsRunning == 0
		})
		if s := e.State(); s.DuplicateIDs > 0 {
			f.t.Errorf("the engine %s received %d ids twice", e.Addr(), s.DuplicateIDs)
		}
	}
}

// alone returns how many requests the workers of a leader have placed without a coordinator.
func (m *member) alone() float64 {
	return m.metric("pdproxy_fallbacks_total", `what="place"`, `reason="coordinator"`)
}

// led matches the line with which a coordinator begins a term.
var led = regexp.MustCompile(`msg="this coordinator leads" .*epoch=(\d+)`)

// epochs returns the epochs of all terms so far, each once for each coordinator that led in it.
func (f *leaseFleet) epochs() (all []uint64) {
	f.t.Helper()
	for _, m := range f.members {
		for _, line := range led.FindAllStringSubmatch(m.log.String(), -1) {
			n, err := strconv.ParseUint(line[1], 10, 64)
			if err != nil {
				f.t.Fatal(err)
			}
			all = append(all, n)
		}
	}
	slices.Sort(all)
	return all
}

// TestLeaseFleet: three pods share the state of the one that leads by the Lease. The loss of the
// leader, of its way to the API server, or of the API server loses no request of another pod and no KV.
func TestLeaseFleet(t *testing.T) {
	f := newLeaseFleet(t)
	leader, epoch := f.leader()
	leader.follow(3)
	homes := map[string]string{}
	for i := range 12 {
		id := fmt.Sprint("c", i)
		for _, m := range f.members {
			home, err := m.turn(id)
			if homes[id] == "" {
				homes[id] = home
			}
			if err != nil || home != homes[id] {
				t.Errorf("%s through %s: on %q, before on %q, %v", id, m.fleet, home, homes[id], err)
			}
		}
	}
	if n := leader.alone(); n != 0 {
		t.Errorf("%v requests were placed without the leader", n)
	}
	if n := leader.metric("pdproxy_exchanges_total", `outcome="ok"`); n != 36 {
		t.Errorf("the leader counts %v exchanges, want those of all members: 36", n)
	}
	f.nothingLeft()
	want := text(t, (&node{t: t, url: startEngineAt(t, engineHost, "vllm-nixl", "both", 0).URL()}).open(200, true))

	t.Run("the leader is killed", func(t *testing.T) {
		f.t = t
		f.held(true)
		rest := f.others(leader)
		var streams []*http.Response
		for _, m := range rest {
			streams = append(streams, m.open(200, true))
		}
		testbed.Eventually(t, "the leader has the leases", func() bool { return leader.metric("pdproxy_leases_open") == 2 })
		defer leader.open(200, true).Body.Close() // ends with the pod
		time.Sleep(time.Second)                   // ten copies of the homes to the standbys
		stop, lost := load(rest...), load(leader)
		testbed.Eventually(t, "the load runs", func() bool { return leader.metric("pdproxy_leases_open") >= 4 })
		leader.kill()
		next, later := f.next(leader, epoch)
		next.follow(2)
		testbed.Eventually(t, "the next leader has the leases", func() bool { return next.metric("pdproxy_leases_open") >= 2 })
		served, failed := stop()
		t.Logf("%d requests through the other pods", served)
		if failed != nil {
			t.Error(failed)
		}
		if _, err := lost(); err == nil {
			t.Error("the killed pod answers")
		}
		was := next.alone()
		for id, home := range homes {
			if at, err := rest[0].turn(id); err != nil || at != home {
				t.Errorf("conversation %s was on %s and is on %s, %v", id, home, at, err)
			}
		}
		if n := next.alone() - was; was == 0 || n != 0 {
			t.Errorf("%v requests were placed without a leader before the next one led, and %v afterwards", was, n)
		}
		f.held(false)
		for _, s := range streams {
			if got := text(t, s); got != want {
				t.Errorf("got %q\nwant %q", got, want)
			}
		}
		f.nothingLeft()
		leader.start()
		leader.ready()
		next.follow(3)
		leader, epoch = next, later
	})

	t.Run("the leader is cut off from the API server", func(t *testing.T) {
		f.t = t
		stop := load(f.members...)
		leader.wire.Cut(true)
		next, later := f.next(leader, epoch)
		next.follow(2) // each worker follows one leader
		leader.follow(1)
		for range 20 {
			for _, m := range f.members {
				if _, err := m.turn("split"); err != nil {
					t.Error(err)
				}
			}
		}
		leader.wire.Cut(false)
		next.follow(3)
		testbed.Eventually(t, "the former leader has stepped down", func() bool {
			return strings.Contains(leader.log.String(), "another coordinator leads; this one steps down")
		})
		if served, failed := stop(); failed != nil {
			t.Errorf("of %d requests: %v", served, failed)
		}
		f.nothingLeft()
		leader, epoch = next, later
	})

	t.Run("the API server is away", func(t *testing.T) {
		f.t = t
		was := leader.alone()
		stop := load(f.members...)
		f.server.kill()
		time.Sleep(5 * time.Second) // more than twice the time of the Lease
		f.server.start()
		time.Sleep(3 * time.Second) // a candidate that counted the time without the server would lead now
		if m, e := f.leader(); m != leader || e != epoch {
			t.Errorf("%s leads in epoch %d, want %s and %d", m.fleet, e, leader.fleet, epoch)
		}
		if served, failed := stop(); failed != nil {
			t.Errorf("of %d requests: %v", served, failed)
		}
		if n := leader.alone() - was; n != 0 {
			t.Errorf("%v requests were placed without the leader", n)
		}
		f.nothingLeft()
	})

	t.Run("the leader is killed without the API server", func(t *testing.T) {
		f.t = t
		rest := f.others(leader)
		stop := load(rest...)
		f.server.kill()
		leader.kill()
		for range 20 {
			for _, m := range rest {
				if _, err := m.turn("nobody leads"); err != nil {
					t.Error(err)
				}
				if got := answers(m.adm + "/readyz"); got != http.StatusOK {
					t.Errorf("readyz of %s is %d while nobody leads", m.fleet, got)
				}
			}
		}
		f.server.start()
		next, _ := f.next(leader, epoch)
		next.follow(2)
		if served, failed := stop(); failed != nil {
			t.Errorf("of %d requests: %v", served, failed)
		}
		f.nothingLeft()
	})

	f.t = t
	epochs := f.epochs()
	if len(epochs) != 4 || len(slices.Compact(epochs)) != 4 {
		t.Errorf("the coordinators led in the epochs %d, want four different ones", epochs)
	}
}
