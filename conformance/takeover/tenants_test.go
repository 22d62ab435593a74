package takeover

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// killAll ends all processes as kill -9 does.
func (w *world) killAll() {
	w.t.Helper()
	w.expected = "the supervisor has ended" // a child may log it before its own end
	pids := []int{w.holder()}               // first, because the supervisor replaces its children
	syscall.Kill(pids[0], syscall.SIGKILL)
	for _, role := range []string{"coordinator", "worker"} {
		for _, pid := range w.children(role) {
			syscall.Kill(pid, syscall.SIGKILL)
			pids = append(pids, pid)
		}
	}
	w.eventually("the processes do not end", func() bool {
		for _, pid := range pids {
			if alive(pid) {
				return false
			}
		}
		return w.holder() == 0
	})
}

// budgetStatus sends a request with a key until it is admitted or refused by its tenant's
// limits, and returns the status and the remaining requests. A request that no engine got
// costs nothing.
func (w *world) budgetStatus(key string) (status int, remaining string) {
	w.t.Helper()
	w.eventually("a request gets no answer", func() bool {
		r, err := http.NewRequest("POST", "http://"+w.addr+"/v1/completions", strings.NewReader(`{"model":"sim","prompt":"hello","max_tokens":2}`))
		if err != nil {
			w.t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+key)
		r.Close = true // the next one may reach another worker
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			w.t.Fatal(err)
		}
		resp.Body.Close()
		status, remaining = resp.StatusCode, resp.Header.Get("x-ratelimit-remaining-requests")
		return status == 200 || status == 429
	})
	return status, remaining
}

// The budget of a tenant goes on where it was over a takeover, and when all processes are
// killed and started again: it is exact to one request.
func TestBudgetsSurvive(t *testing.T) {
	const limit, refill = 3, 20 * time.Second
	for _, workers := range []int{0, 2} {
		t.Run(fmt.Sprintf("workers %d", workers), func(t *testing.T) {
			e := startEngine(t, enginesim.Config{Connector: enginesim.ConnectorVLLMNixl, Role: enginesim.RoleBoth})
			keys := filepath.Join(t.TempDir(), "keys")
			if err := os.WriteFile(keys, fmt.Appendf(nil, "team %x rpm=%d\n", sha256.Sum256([]byte("team-key")), limit), 0o600); err != nil {
				t.Fatal(err)
			}
			w := newWorldOf(t, false, workers, []*enginesim.Engine{e}, e, fmt.Sprintf(
				"[server.auth]\nkeys_file = %q\n[[engine]]\nname = \"e\"\nurl = %q\nrole = \"both\"\nconnector = %q\n", keys, e.URL(), enginesim.ConnectorVLLMNixl))
			w.run()
			pid := w.successor(0, func() {})
			w.awaitReady()
			began, admitted := time.Now(), 0
			// The budget is refilled by one request in each interval, so that on a machine that
			// is very slow a few more are admitted.
			check := func(when string) {
				t.Helper()
				status, remaining := w.budgetStatus("team-key")
				refilled := int(time.Since(began) / refill)
				if status == 200 {
					admitted++
				}
				if least := limit - admitted; refilled == 0 && remaining != fmt.Sprint(max(0, least)) {
					t.Errorf("%s: %s requests remain after %d", when, remaining, admitted)
				}
				if admitted > limit+refilled || status == 429 && admitted < limit {
					t.Errorf("%s: %d requests are admitted, then status %d", when, admitted, status)
				}
			}
			check("at first")
			next := func() { syscall.Kill(pid, syscall.SIGUSR2) }
			next()
			pid = w.successor(pid, next)
			w.awaitReady()
			check("after a takeover")
			for round := range 3 {
				w.killAll()
				w.run()
				pid = w.successor(0, func() {})
				w.awaitReady()
				check(fmt.Sprintf("after kill %d", round))
			}
			check("at last")
			if admitted < limit {
				t.Errorf("%d requests are admitted, want %d", admitted, limit)
			}
		})
	}
}
