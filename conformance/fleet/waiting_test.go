package fleet

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	pdnode "github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestWaitInAFleet: after all engines have left the fleet, requests for their model wait in
// the workers, the coordinator shows them, and the first new engines take them.
func TestWaitInAFleet(t *testing.T) {
	f := bare(t, enginesim.ConnectorVLLMNixl, 2)
	f.cfg.Limits.NoEngineTimeout = config.Duration(2 * time.Minute)
	f.coordinator = f.node(pdnode.RoleCoordinator, 0)
	for slot := range 2 {
		f.workers = append(f.workers, f.node(pdnode.RoleWorker, slot))
	}
	for _, w := range f.workers {
		testbed.Eventually(t, "the worker is ready", func() bool { return f.status(w.URL()+"/health") == 200 })
		f.whole(f.open(w.URL(), "before", 5), "before", 5)
	}
	for _, e := range f.cfg.Engines {
		f.operate(http.MethodDelete, "/v1/engines/"+e.Name+"?drain=1s", nil)
	}
	testbed.Eventually(t, "no engine is left", func() bool {
		return f.metric(f.coordinator, "pdproxy_role_engines_ready", `model="sim"`) == 0 && f.metric(f.coordinator, "pdproxy_engine_up") == 0
	})
	testbed.Eventually(t, "the workers know it", func() bool {
		for _, w := range f.workers {
			var list []json.RawMessage
			if err := w.admin.Get("/v1/engines", &list); err != nil || len(list) > 0 {
				return false
			}
		}
		return true
	})
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			body := fmt.Sprintf(`{"model":"sim","prompt":"waits %d","max_tokens":5}`, i)
			resp, err := f.client.Post(f.workers[i%2].URL()+"/v1/completions", "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if text, err := io.ReadAll(resp.Body); resp.StatusCode != 200 || err != nil {
				t.Errorf("got status %d, %v: %s", resp.StatusCode, err, text)
			}
		})
	}
	testbed.Eventually(t, "all wait", func() bool {
		return f.metric(f.coordinator, "pdproxy_requests_waiting", `model="sim"`, `reason="no_engine"`) == 6
	})
	for n, e := range f.cfg.Engines {
		body, err := json.Marshal(map[string]string{"name": fmt.Sprint("new", n), "url": e.URL, "role": e.Role, "connector": e.Connector})
		if err != nil {
			t.Fatal(err)
		}
		f.operate(http.MethodPost, "/v1/engines", body)
	}
	wg.Wait()
	f.settled()
	if n := f.metric(f.coordinator, "pdproxy_requests_waiting"); n != 0 {
		t.Errorf("%v requests wait after their end", n)
	}
}

// operate sends a command to the coordinator.
func (f *fleet) operate(method, path string, body []byte) {
	f.t.Helper()
	r, err := http.NewRequest(method, f.coordinator.admin.URL+path, bytes.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	testbed.Authorize(f.t, r)
	resp, err := f.client.Do(r)
	if err != nil {
		f.t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode >= 300 {
		f.t.Fatalf("%s %s: %d", method, path, resp.StatusCode)
	}
}
