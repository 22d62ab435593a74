package scaling

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// modelName is the model of all engines.
const modelName = "sim"

var roles = []string{enginesim.RolePrefill, enginesim.RoleDecode}

// engineConfig are the speeds of an engine. A prefill engine computes one prompt at a time,
// 400 tokens a second. A decode engine computes 8 answers at a time, each 50 tokens a second.
func engineConfig(role string) enginesim.Config {
	c := enginesim.Config{Connector: enginesim.ConnectorVLLMNixl, Role: role, PrefillUsPerToken: 2500, DecodeUsPerToken: 20000, MaxRunning: 8}
	if role == enginesim.RolePrefill {
		c.MaxRunning = 1
	}
	return c
}

// replica is one engine of the fleet.
type replica struct {
	*enginesim.Engine
	name, role string
	leaving    bool // out of the file, and serving its last requests
}

// fleet is a proxy with engines that it finds through a file. One goroutine uses it.
type fleet struct {
	t        *testing.T
	file     string
	proxy    *node.Node
	replicas []*replica
	started  int
	stop     context.CancelFunc
	served   chan error
}

// newFleet starts a proxy without engines. It knows the model and its roles from names
// without addresses, as the headless Services of Deployments without pods are.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{t: t, file: filepath.Join(t.TempDir(), "engines.json"), served: make(chan error, 1)}
	t.Cleanup(func() {
		for _, r := range f.replicas {
			r.Close()
		}
	})
	f.write()
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Server.DrainTimeout = config.Duration(5 * time.Minute)
	cfg.Limits.NoEngineTimeout = config.Duration(5 * time.Minute)
	cfg.Discovery.File.Path = f.file
	for _, role := range roles {
		e := config.DefaultEngine()
		e.Name, e.URL, e.Role, e.Connector, e.Model = role, "http://"+role+".invalid:8000", role, "vllm-nixl", modelName
		cfg.Discovery.DNS.Engines = append(cfg.Discovery.DNS.Engines, e)
	}
	n, err := node.New(&cfg, slog.New(slog.DiscardHandler), node.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	f.proxy, f.stop = n, cancel
	t.Cleanup(cancel)
	go func() { f.served <- n.Serve(ctx) }()
	testbed.Eventually(t, "the proxy waits for requests without an engine", func() bool {
		resp, err := http.Get(n.URL() + "/health")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return f
}

// close stops the proxy, and then the engines that are left.
func (f *fleet) close() {
	f.stop()
	if err := <-f.served; err != nil {
		f.t.Errorf("the proxy ended: %v", err)
	}
}

// present returns the engines of a role that the test has not stopped.
func (f *fleet) present(role string) (n int) {
	for _, r := range f.replicas {
		if r.role == role && !r.leaving {
			n++
		}
	}
	return n
}

// running returns the engines of a role, those that are leaving included.
func (f *fleet) running(role string) (n int) {
	for _, r := range f.replicas {
		if r.role == role {
			n++
		}
	}
	return n
}

// scale starts engines, or takes the newest ones out of the file.
func (f *fleet) scale(role string, replicas int) {
	f.t.Helper()
	for f.present(role) < replicas {
		e, err := enginesim.New(engineConfig(role))
		if err != nil {
			f.t.Fatal(err)
		}
		if err := e.Start(); err != nil {
			f.t.Fatal(err)
		}
		f.started++
		f.replicas = append(f.replicas, &replica{Engine: e, role: role, name: fmt.Sprintf("%s-%d", role, f.started)})
	}
	for i := len(f.replicas) - 1; i >= 0 && f.present(role) > replicas; i-- {
		if r := f.replicas[i]; r.role == role {
			r.leaving = true
		}
	}
	f.write()
}

// write writes the file that the proxy reads.
func (f *fleet) write() {
	f.t.Helper()
	list := []map[string]any{}
	for _, r := range f.replicas {
		if !r.leaving {
			list = append(list, map[string]any{"name": r.name, "url": r.URL(), "role": r.role, "connector": "vllm-nixl"})
		}
	}
	text, err := json.Marshal(list)
	if err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(f.file+".new", text, 0o600); err != nil {
		f.t.Fatal(err)
	}
	if err := os.Rename(f.file+".new", f.file); err != nil {
		f.t.Fatal(err)
	}
}

// reap stops the leaving engines that the proxy has removed. The proxy removes an engine when the
// last request of the engine has ended. Such an engine holds nothing.
func (f *fleet) reap() {
	f.t.Helper()
	known := f.known()
	kept := f.replicas[:0]
	for _, r := range f.replicas {
		if !r.leaving || known[r.name] {
			kept = append(kept, r)
			continue
		}
		testbed.Eventually(f.t, r.name+" holds nothing", func() bool {
			s := r.State()
			return s.RequestsRunning == 0 && s.RequestsWaiting == 0 && s.BlocksUsed == 0
		})
		r.Close()
	}
	f.replicas = kept
}

// known returns the names of the engines in the proxy's list.
func (f *fleet) known() map[string]bool {
	f.t.Helper()
	var list []struct{ Name string }
	if err := json.Unmarshal(f.get("/v1/engines"), &list); err != nil {
		f.t.Fatal(err)
	}
	names := map[string]bool{}
	for _, e := range list {
		names[e.Name] = true
	}
	return names
}

// get reads a page of the admin address.
func (f *fleet) get(path string) []byte {
	f.t.Helper()
	req, err := http.NewRequest(http.MethodGet, f.proxy.AdminURL()+path, nil)
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+f.proxy.AdminToken())
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		f.t.Fatalf("GET %s: %d %v", path, resp.StatusCode, err)
	}
	return body
}

func (f *fleet) metrics() metrics { return parse(f.t, f.get("/metrics")) }

// parse reads the text format of Prometheus.
func parse(t *testing.T, text []byte) metrics {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	m, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return m
}
