package fleet

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pdnode "github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// keysFile returns a file with the key team-key, which may send that many requests a minute, and
// the key free-key without limits.
func keysFile(t *testing.T, limit int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	text := fmt.Appendf(nil, "team %x rpm=%d\nfree %x\n", sha256.Sum256([]byte("team-key")), limit, sha256.Sum256([]byte("free-key")))
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// budgetStatus sends a request with a key to a worker, and returns its status.
func (f *fleet) budgetStatus(w *node, key string) int {
	f.t.Helper()
	status, _ := f.budgetAnswer(w, key)
	return status
}

// budgetAnswer is budgetStatus that also returns the requests that are left.
func (f *fleet) budgetAnswer(w *node, key string) (status, left int) {
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
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	if err == nil && key == "team-key" {
		left, err = strconv.Atoi(resp.Header.Get("X-Ratelimit-Remaining-Requests"))
	}
	if err != nil {
		f.t.Errorf("status %d: %v", resp.StatusCode, err)
	}
	return resp.StatusCode, left
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
	f.cfg.Server.Auth.KeysFile = keysFile(t, limit)
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

// budgetLoad is clients of one tenant at the workers of a fleet.
type budgetLoad struct {
	f         *fleet
	clients   int
	admitted  atomic.Int64
	refused   atomic.Int64
	ended     atomic.Bool
	wg        sync.WaitGroup
	began     time.Time    // before the first request
	firstDone atomic.Int64 // when the first request was answered, after began
}

// load starts clients at each worker. They send one request after another.
func (f *fleet) load(clients int) *budgetLoad {
	l := &budgetLoad{f: f, clients: clients * len(f.workers), began: time.Now()}
	for n := range l.clients {
		l.wg.Go(func() {
			for !l.ended.Load() {
				switch status := f.budgetStatus(f.workers[n%len(f.workers)], "team-key"); status {
				case 200:
					l.firstDone.CompareAndSwap(0, int64(time.Since(l.began)))
					l.admitted.Add(1)
				case 429:
					l.refused.Add(1)
					time.Sleep(5 * time.Millisecond) // leaves the processors to the others
				default:
					f.t.Errorf("status %d", status)
				}
			}
		})
	}
	return l
}

// reaches waits until that many requests are admitted.
func (l *budgetLoad) reaches(n int64) {
	l.f.t.Helper()
	testbed.Eventually(l.f.t, fmt.Sprint(n, " requests are admitted"), func() bool { return l.admitted.Load() >= n })
}

// Hosts with one budget count exactly while their leader is killed under load, twice, and the
// killed coordinator returns in between.
func TestBudgetsAfterLeaderKilled(t *testing.T) {
	const limit, refill = 120, 500 * time.Millisecond
	f, s, hosts, _ := led(t, func(c *config.Config) { c.Server.Auth.KeysFile = keysFile(t, limit) })
	f.held(false)
	f.connected()
	l := f.load(2)
	l.reaches(limit / 2)
	for round := range 2 {
		gone, next := hosts[round], hosts[1-round]
		gone.kill()
		testbed.Eventually(t, "the next coordinator leads", func() bool { return leader(t, s).Address == next.cfg.Fleet.Listen })
		f.connected()
		before := l.admitted.Load()
		l.reaches(before + 4) // the budget has no debt of the time without a coordinator
		gone.start()
		testbed.Eventually(t, "the killed coordinator has the state of the leader again", gone.ready)
	}
	l.ended.Store(true)
	l.wg.Wait()
	asked := time.Now()
	status, left := f.budgetAnswer(f.workers[0], "team-key")
	if status == 200 {
		l.admitted.Add(1)
	}
	// The budget was full at the first request, and never since. So what is admitted is the
	// budget, plus its refill, minus what is left.
	most := int64(limit+int(time.Since(l.began)/refill)) - int64(left)
	least := int64(limit+int((asked.Sub(l.began)-time.Duration(l.firstDone.Load()))/refill)) - int64(left) - 1
	// An answer of a killed leader may be lost after the request was counted.
	least -= int64(2 * l.clients)
	got := l.admitted.Load()
	t.Logf("%d requests are admitted and %d refused in %v, %d are left: want %d to %d", got, l.refused.Load(), time.Since(l.began), left, least, most)
	if got < least || got > most || l.refused.Load() == 0 {
		t.Errorf("%d requests are admitted and %d refused, want %d to %d", got, l.refused.Load(), least, most)
	}
	f.nothingLeft(hosts[0], hosts[1])
}
