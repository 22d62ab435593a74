package fleet

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	pdnode "github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// fleet consists of engines, a coordinator and workers. Each of them is a separate node in this
// process.
type fleet struct {
	t           *testing.T
	cfg         config.Config
	dir         *privatedir.Dir
	client      *http.Client
	engines     []*enginesim.Engine
	alone       *enginesim.Engine
	coordinator *node
	workers     []*node
	socket      net.Listener // of fleet.listen, which coordinators share; nil: each opens its own
	goroutines  int
}

// node is a running node.
type node struct {
	*pdnode.Node
	admin surface.Admin
	stop  context.CancelFunc
	done  chan error
}

// bare returns a fleet with its engines, two for prefill and two for decode,
// and the configuration of its nodes.
func bare(t *testing.T, connector string, workers int) *fleet {
	t.Helper()
	f := &fleet{t: t, cfg: config.Default(), dir: privatedirtest.Open(t), client: &http.Client{Transport: &http.Transport{}}, goroutines: runtime.NumGoroutine()}
	f.cfg.Server.Listen, f.cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	f.cfg.Server.DrainTimeout = config.Duration(5 * time.Second)
	f.cfg.Health.Interval, f.cfg.Health.Timeout = config.Duration(100*time.Millisecond), config.Duration(2*time.Second)
	f.cfg.Fleet.Workers = workers
	f.cfg.Fleet.Patience = config.Duration(5 * time.Second) // a live process has enough time on a busy machine
	for _, role := range []string{enginesim.RolePrefill, enginesim.RoleDecode} {
		for n := range 2 {
			e := f.engine(connector, role, 2000)
			f.engines = append(f.engines, e)
			spec := config.DefaultEngine()
			spec.Name, spec.URL, spec.Role, spec.Connector = fmt.Sprintf("%s%d", role[:1], n), e.URL(), role, connector
			f.cfg.Engines = append(f.cfg.Engines, spec)
		}
	}
	f.alone = f.engine(connector, enginesim.RoleBoth, 0)
	t.Cleanup(f.close)
	return f
}

// start starts a fleet with that many workers.
func start(t *testing.T, connector string, workers int) *fleet {
	t.Helper()
	f := bare(t, connector, workers)
	f.coordinator = f.node(pdnode.RoleCoordinator, 0)
	for slot := range workers {
		f.workers = append(f.workers, f.node(pdnode.RoleWorker, slot))
	}
	for _, w := range f.workers {
		testbed.Eventually(t, "the worker is ready", func() bool { return f.status(w.URL()+"/health") == 200 })
	}
	testbed.Eventually(t, "the fleet is ready", func() bool { return f.status(f.coordinator.admin.URL+"/readyz") == 200 })
	return f
}

func (f *fleet) engine(connector, role string, tokenMicros int) *enginesim.Engine {
	f.t.Helper()
	e, err := enginesim.New(enginesim.Config{Connector: connector, Role: role, DecodeUsPerToken: tokenMicros, Lease: time.Minute})
	if err == nil {
		err = e.Start()
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return e
}

// node starts a node. A worker has a separate admin address here, for the test.
func (f *fleet) node(role pdnode.Role, slot int) *node {
	f.t.Helper()
	admin, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.t.Fatal(err)
	}
	cfg, o := f.cfg, pdnode.Options{Role: role, Slot: slot, Dir: f.dir, Sockets: edge.Sockets{Admin: admin}}
	if f.socket != nil && role == pdnode.RoleCoordinator {
		shared, err := f.socket.(*net.TCPListener).File()
		if err == nil {
			o.Fleet, err = net.FileListener(shared)
			shared.Close()
		}
		if err != nil {
			f.t.Fatal(err)
		}
	}
	made, err := pdnode.New(&cfg, slog.New(slog.DiscardHandler), o)
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	n := &node{Node: made, admin: surface.Admin{Client: f.client, URL: "http://" + admin.Addr().String()}, stop: cancel, done: make(chan error, 1)}
	go func() { n.done <- made.Serve(ctx) }()
	return n
}

// end stops a node.
func (f *fleet) end(n *node) {
	n.stop()
	if err := <-n.done; err != nil {
		f.t.Errorf("the drain was not clean: %v", err)
	}
}

// close ends the fleet: first the workers, then the coordinator.
func (f *fleet) close() {
	f.client.CloseIdleConnections()
	for _, n := range append(f.workers, f.coordinator) {
		if n != nil {
			f.end(n)
		}
	}
	for _, e := range append(f.engines, f.alone) {
		e.Close()
	}
	if !f.t.Failed() { // else streams may be open
		testbed.Eventually(f.t, "goroutines are back at the baseline", func() bool { return runtime.NumGoroutine() <= f.goroutines })
	}
}

func (f *fleet) status(url string) int {
	resp, err := f.client.Get(url)
	if err != nil {
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

// metric returns the sum of series of a node; an error fails the test.
func (f *fleet) metric(n *node, name string, labels ...string) float64 {
	f.t.Helper()
	v, err := n.admin.Metric(name, labels...)
	if err != nil {
		f.t.Fatal(err)
	}
	return v
}

// stream is an answer that is being read.
type stream struct {
	resp *http.Response
	in   *bufio.Scanner
	text strings.Builder
	done bool
}

// open begins a stream and returns when its first token has arrived.
func (f *fleet) open(base, prompt string, tokens int) *stream {
	f.t.Helper()
	body := fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":%d,"ignore_eos":true,"stream":true}`, prompt, tokens)
	resp, err := f.client.Post(base+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	s := &stream{resp: resp, in: bufio.NewScanner(resp.Body)}
	if resp.StatusCode != 200 {
		text, _ := io.ReadAll(resp.Body)
		f.t.Fatalf("got status %d: %s", resp.StatusCode, text)
	}
	for s.text.Len() == 0 && s.next() {
	}
	return s
}

// next reads one line; false at the end.
func (s *stream) next() bool {
	if !s.in.Scan() {
		return false
	}
	data, ok := strings.CutPrefix(s.in.Text(), "data: ")
	if s.done = s.done || data == "[DONE]"; !ok || s.done {
		return true
	}
	var event struct{ Choices []struct{ Text string } }
	_ = json.Unmarshal([]byte(data), &event) // an error event has no choices
	for _, c := range event.Choices {
		s.text.WriteString(c.Text)
	}
	return true
}

// rest reads on and returns the whole text.
func (s *stream) rest() string {
	defer s.resp.Body.Close()
	for s.next() {
	}
	if !s.done {
		return "a stream that broke after: " + s.text.String()
	}
	return s.text.String()
}

// whole asserts that a stream completes with the text of one engine alone.
func (f *fleet) whole(s *stream, prompt string, tokens int) {
	f.t.Helper()
	if got, want := s.rest(), f.open(f.alone.URL(), prompt, tokens).rest(); got != want {
		f.t.Errorf("got %q\nwant %q", got, want)
	}
}

// held makes the engines decode so slowly that no stream ends during the test. With false
// they decode so fast that open streams end at once. So the streams outlast the test's
// steps on any machine.
func (f *fleet) held(hold bool) {
	micros := 0
	if hold {
		micros = 50_000
	}
	for _, e := range f.engines {
		e.SetDecodeUsPerToken(micros)
	}
}

// settled asserts that nothing of any request remains.
func (f *fleet) settled() {
	f.t.Helper()
	testbed.Eventually(f.t, "no lease is open", func() bool { return f.metric(f.coordinator, "pdproxy_leases_open") == 0 })
	f.idle()
}

// idle asserts that no engine holds anything, and that no engine has received
// an id twice.
func (f *fleet) idle() {
	f.t.Helper()
	for _, e := range f.engines {
		testbed.Eventually(f.t, "engine "+e.Addr()+" is idle and empty", func() bool {
			s := e.State()
			return s.BlocksUsed == 0 && s.BlocksPinned == 0 && s.RequestsRunning == 0 && s.RequestsWaiting == 0
		})
		if s := e.State(); s.DuplicateIDs > 0 {
			f.t.Errorf("engine %s saw %d ids twice", e.Addr(), s.DuplicateIDs)
		}
	}
}

// TestCoordinatorAway: the coordinator places a stream through each worker. Without the
// coordinator, requests continue and do not wait for it. The next coordinator has the leases of the
// open streams at once.
func TestCoordinatorAway(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorSGLang, enginesim.ConnectorTRTLLM} {
		t.Run(connector, func(t *testing.T) {
			f := start(t, connector, 2)
			f.held(true)
			alone := func(n *node) float64 {
				return f.metric(n, "pdproxy_fallbacks_total", `what="place"`, `reason="coordinator"`)
			}
			var before []*stream
			for n, w := range f.workers {
				before = append(before, f.open(w.URL(), fmt.Sprint("before ", n), 2000))
			}
			testbed.Eventually(t, "the coordinator has both leases", func() bool { return f.metric(f.coordinator, "pdproxy_leases_open") == 2 })
			for _, w := range f.workers {
				if n := alone(w); n != 0 {
					t.Errorf("%v requests were placed without the coordinator", n)
				}
			}

			var running []json.RawMessage
			if err := f.coordinator.admin.Get("/v1/exchanges", &running); err != nil || len(running) != 2 {
				t.Errorf("the coordinator shows %d exchanges of two, %v", len(running), err)
			}

			f.end(f.coordinator)
			f.coordinator = nil
			var during []*stream
			for n, w := range f.workers {
				during = append(during, f.open(w.URL(), fmt.Sprint("during ", n), 2000))
				if n := alone(w); n != 1 {
					t.Errorf("got %v requests placed without the coordinator, want 1", n)
				}
			}

			f.coordinator = f.node(pdnode.RoleCoordinator, 0)
			testbed.Eventually(t, "the next coordinator has all four leases", func() bool { return f.metric(f.coordinator, "pdproxy_leases_open") == 4 })
			for n, w := range f.workers {
				after := f.open(w.URL(), fmt.Sprint("after ", n), 5)
				f.whole(after, fmt.Sprint("after ", n), 5)
				id := after.resp.Header.Get("X-Request-Id")
				testbed.Eventually(t, "the coordinator explains the request", func() bool {
					return id != "" && f.status(f.coordinator.admin.URL+"/v1/explain/"+id) == 200
				})
				if n := alone(w); n != 1 {
					t.Errorf("got %v requests placed without the coordinator, want 1 from before its return", n)
				}
			}
			f.held(false)
			for n := range f.workers {
				f.whole(before[n], fmt.Sprint("before ", n), 2000)
				f.whole(during[n], fmt.Sprint("during ", n), 2000)
			}
			f.settled()
			if n := f.metric(f.coordinator, "pdproxy_exchanges_total", `outcome="ok"`); n != 6 {
				t.Errorf("the coordinator counts %v exchanges, want 6", n)
			}
		})
	}
}

// TestReload: the coordinator's reloaded engines reach the workers, which
// reload the other settings themselves.
func TestReload(t *testing.T) {
	f := start(t, enginesim.ConnectorVLLMNixl, 2)
	rows := func(n *node) (names []string) {
		var list []struct{ Name string }
		if err := n.admin.Get("/v1/engines", &list); err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			names = append(names, e.Name)
		}
		return names
	}
	next := f.cfg
	next.Engines = next.Engines[:3] // all but the second decode
	next.Limits.MaxExchanges, next.Limits.Queue, next.Limits.QueueTimeout = 2, 0, 0
	for _, n := range append(f.workers, f.coordinator) {
		if err := n.Reload(&next); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range append(f.workers, f.coordinator) {
		testbed.Eventually(t, "the engine that was taken out has gone", func() bool { return slices.Equal(rows(n), []string{"p0", "p1", "d0"}) })
	}
	for n, w := range f.workers {
		f.held(true)
		first := f.open(w.URL(), fmt.Sprint("first ", n), 300)
		body := `{"model":"sim","prompt":"second","max_tokens":4}`
		if status, text := f.call("POST", w.URL()+"/v1/completions", body); status != 429 { // one place of the two is this worker's
			t.Errorf("a second request: %d %s", status, text)
		}
		f.held(false)
		f.whole(first, fmt.Sprint("first ", n), 300)
	}
	f.settled()
}
