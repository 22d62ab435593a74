package fleet

import (
	"crypto/sha256"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pdnode "github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/conformance/enginesim"
	"github.com/pdproxy/pdproxy/conformance/testbed"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// budgetStatus sends a request with a key to a worker, and returns its status.
func (f *fleet) budgetStatus(w *node, key string) int {
	f.t.Helper()
	r, err := http.NewRequest("POST", w.URL()+"/v1/completions", strings.NewReader(`{"model":"sim","prompt":"hello","max_tokens":2}`))
	if err != nil {
		f.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+key)
	resp, err := f.client.Do(r)
	if err != nil {
		f.t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

// connected waits until the coordinator places the requests of each worker.
func (f *fleet) connected() {
	f.t.Helper()
	for _, w := range f.workers {
		testbed.Eventually(f.t, "the worker is connected", func() bool {
			alone := func() float64 { return f.metric(w, "pdproxy_fallbacks_total", "place", "coordinator") }
			before := alone()
			return f.budgetStatus(w, "free-key") == 200 && alone() == before
		})
	}
}

// The workers of two hosts, and a coordinator that takes the place of the first, give a tenant
// its budget exactly.
func TestBudgetsOfTwoHosts(t *testing.T) {
	const limit, refill = 10, 6 * time.Second
	f := bare(t, enginesim.ConnectorVLLMNixl, 2)
	f.cfg.Server.Auth.KeysFile = filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(f.cfg.Server.Auth.KeysFile, fmt.Appendf(nil, "team %x rpm=%d\nfree %x\n", sha256.Sum256([]byte("team-key")), limit, sha256.Sum256([]byte("free-key"))), 0o600); err != nil {
		t.Fatal(err)
	}
	f.cfg.Fleet.Listen = testbed.FreeAddr(t)
	var err error
	if f.socket, err = net.Listen("tcp", f.cfg.Fleet.Listen); err != nil {
		t.Fatal(err)
	}
	defer f.socket.Close()
	f.coordinator = f.node(pdnode.RoleCoordinator, 0)
	f.workers = append(f.workers, f.node(pdnode.RoleWorker, 0), f.node(pdnode.RoleWorker, 1))
	here := f.dir
	f.dir, f.cfg.Fleet.Coordinator = privatedirtest.Open(t), f.cfg.Fleet.Listen
	for slot := range 2 { // of another host
		f.workers = append(f.workers, f.node(pdnode.RoleWorker, slot))
	}
	f.dir, f.cfg.Fleet.Coordinator = here, ""
	for _, w := range f.workers {
		testbed.Eventually(t, "the worker is ready", func() bool { return f.status(w.URL()+"/health") == 200 })
	}
	f.connected()
	began, admitted := time.Now(), 0
	send := func(n int) {
		for i := range n {
			switch status := f.budgetStatus(f.workers[i%len(f.workers)], "team-key"); status {
			case 200:
				admitted++
			case 429:
			default:
				t.Errorf("status %d", status)
			}
		}
	}
	send(7)
	if admitted != 7 {
		t.Errorf("%d of the first 7 requests are admitted", admitted)
	}
	first := f.coordinator
	second := f.node(pdnode.RoleCoordinator, 0)
	testbed.Eventually(t, "the second coordinator is in step", func() bool { return f.status(second.admin.URL+"/readyz") == 200 })
	f.coordinator = second
	f.end(first)
	f.connected()
	send(13)
	if most := limit + int(time.Since(began)/refill); admitted < limit || admitted > most {
		t.Errorf("%d requests are admitted, want %d to %d", admitted, limit, most)
	}
	f.settled()
}
