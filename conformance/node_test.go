package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// The modes in which the tests run a proxy. Its answers and counters are the
// same in all modes.
const (
	modeSingle = "single" // one node does everything
	modeFleet  = "fleet"  // a coordinator and its workers, over a Unix socket
	modeHosts  = "hosts"  // workers of another host's coordinator, over TCP with a token
)

// modeVar and connectorsVar are environment variables. The first one selects
// the mode of the package's tests. The second one selects connectors, by their
// names with commas, for the tests of every connector; unset means all.
const (
	modeVar       = "PDPROXY_MODE"
	connectorsVar = "PDPROXY_CONNECTORS"
)

// workers is the number of workers of a fleet. manyWorkers is so large that
// consecutive requests hardly ever use the same worker.
const (
	workers     = 2
	manyWorkers = 4
)

// mode returns the mode of the test.
func mode(t *testing.T) string {
	t.Helper()
	m := os.Getenv(modeVar)
	if m == "" {
		return modeSingle
	}
	if !slices.Contains([]string{modeSingle, modeFleet, modeHosts}, m) {
		t.Fatalf("%s: there is no mode %q", modeVar, m)
	}
	return m
}

// process is a node that runs in the test's process, as in a separate process.
type process struct {
	*node.Node
	t     *testing.T
	cfg   config.Config
	admin surface.Admin // of this process alone
	stop  context.CancelFunc
	done  chan error
	ended bool
}

// startProcess starts a node.
func startProcess(t *testing.T, cfg *config.Config, log io.Writer, o node.Options) *process {
	t.Helper()
	if log == nil {
		log = io.Discard
	}
	name := "single"
	if o.Role != node.RoleSingle {
		name = fmt.Sprint(o.Role, o.Slot)
	}
	own := *cfg // the node keeps the configuration
	n, err := node.New(&own, slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})).With("process", name), o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{
		Node: n, t: t, cfg: *cfg, stop: cancel, done: make(chan error, 1),
		admin: surface.Admin{Client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, URL: n.AdminURL()},
	}
	go func() { p.done <- n.Serve(ctx) }()
	return p
}

// end stops the node and returns the error of its drain.
func (p *process) end() error {
	if p.ended {
		return nil
	}
	p.ended = true
	p.stop()
	return <-p.done
}

// engines returns the states of the engines that the process knows, by name.
func (p *process) engines() map[string]string {
	p.t.Helper()
	var rows []struct{ Name, State string }
	if err := p.admin.Get("/v1/engines", &rows); err != nil {
		p.t.Fatal(err)
	}
	states := make(map[string]string)
	for _, r := range rows {
		states[r.Name] = r.State
	}
	return states
}

// healthy reports whether the process answers balancers with health.
func (p *process) healthy() bool {
	resp, err := p.admin.Client.Get(p.URL() + "/health")
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// startNode starts the proxy in the mode of the test.
func (f *fleet) startNode(cfg *config.Config, log io.Writer) {
	f.t.Helper()
	f.cfg, f.log, f.mode = *cfg, log, mode(f.t)
	var entries []string
	switch f.mode {
	case modeSingle:
		f.front = startProcess(f.t, &f.cfg, log, node.Options{})
		entries = []string{f.front.URL()}
	default:
		f.dir = f.privateDir()
		f.cfg.Fleet.Workers = cmp.Or(f.size, workers)
		f.cfg.Fleet.Patience = config.Duration(5 * time.Second) // a live process has enough time on a busy machine
		if f.mode == modeHosts {
			f.token = "the-token-of-this-fleet"
			f.cfg.Fleet.TokenFile = filepath.Join(f.t.TempDir(), "token")
			if err := os.WriteFile(f.cfg.Fleet.TokenFile, []byte(f.token+"\n"), 0o600); err != nil {
				f.t.Fatal(err)
			}
			if f.cfg.Fleet.Listen == "" {
				f.cfg.Fleet.Listen = "127.0.0.1:0"
			}
		}
		f.startCoordinator()
		for slot := range f.cfg.Fleet.Workers {
			f.workers = append(f.workers, f.startWorker(slot))
			entries = append(entries, f.workers[slot].URL())
		}
	}
	f.url = entries[0]
	f.client = &http.Client{Transport: &spread{Transport: &http.Transport{MaxIdleConnsPerHost: 100}, url: f.url, entries: entries}}
	f.t.Cleanup(f.close)
}

// privateDir returns a folder of the fleet, which close closes.
func (f *fleet) privateDir() *privatedir.Dir {
	d := privatedirtest.Open(f.t)
	f.dirs = append(f.dirs, d)
	return d
}

// startCoordinator starts the coordinator of a fleet. Its admin address is the
// proxy's. A later coordinator uses the addresses of the earlier one.
func (f *fleet) startCoordinator() {
	f.t.Helper()
	if f.front != nil {
		f.cfg.Admin.Listen = f.front.admin.URL[len("http://"):]
	}
	f.front = startProcess(f.t, &f.cfg, f.log, node.Options{Role: node.RoleCoordinator, Dir: f.dir})
	if a := f.front.FleetAddr(); a != nil {
		f.cfg.Fleet.Listen = a.String()
	}
}

// startWorker starts a worker. It has a separate admin address for the test.
func (f *fleet) startWorker(slot int) *process {
	f.t.Helper()
	admin, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.t.Fatal(err)
	}
	cfg, dir := f.cfg, f.dir
	if f.mode == modeHosts { // it knows the other host only by its address
		cfg.Fleet.Coordinator, cfg.Fleet.Listen, dir = cfg.Fleet.Listen, "", f.privateDir()
	}
	return startProcess(f.t, &cfg, f.log, node.Options{Role: node.RoleWorker, Slot: slot, Dir: dir, Sockets: edge.Sockets{Admin: admin}})
}

// reload gives every process another configuration, as SIGHUP does.
func (f *fleet) reload(next *config.Config) error {
	err := f.front.Reload(f.asStarted(next))
	for _, w := range f.workers {
		if err != nil {
			return err
		}
		err = w.Reload(f.asStarted(next))
	}
	return err
}

// asStarted returns a configuration with the settings of the mode.
func (f *fleet) asStarted(next *config.Config) *config.Config {
	own := *next
	own.Fleet = f.cfg.Fleet
	return &own
}

// end stops the proxy, the workers first, and returns the errors of their drains.
func (f *fleet) end() error {
	f.client.CloseIdleConnections()
	for _, w := range f.workers { // all at once
		w.stop()
	}
	var errs []error
	for _, w := range f.workers {
		errs = append(errs, w.end())
	}
	return errors.Join(append(errs, f.front.end())...)
}

// awaitWorkers waits until every worker knows the same engines as the coordinator.
func (f *fleet) awaitWorkers() {
	f.t.Helper()
	for _, w := range f.workers {
		f.eventually("the worker knows the engines", func() bool {
			states := f.front.engines()
			for name, state := range states {
				if state == "waking" { // only the process that wakes the engine shows it
					states[name] = "asleep"
				}
			}
			return maps.Equal(w.engines(), states)
		})
	}
}

// oneEntry sends all following requests through one worker.
func (f *fleet) oneEntry() {
	s := f.client.Transport.(*spread)
	s.entries = s.entries[:1]
}

// spread sends requests for url to all entries in turn.
type spread struct {
	*http.Transport
	url     string
	entries []string
	next    atomic.Uint32
}

// RoundTrip implements http.RoundTripper.
func (s *spread) RoundTrip(req *http.Request) (*http.Response, error) {
	if len(s.entries) == 1 || req.URL.Scheme+"://"+req.URL.Host != s.url {
		return s.Transport.RoundTrip(req)
	}
	entry, err := url.Parse(s.entries[int(s.next.Add(1))%len(s.entries)])
	if err != nil {
		return nil, err
	}
	to := req.Clone(req.Context())
	to.URL.Host = entry.Host
	return s.Transport.RoundTrip(to)
}
