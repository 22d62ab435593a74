package epp

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// fleetKeys are a fleet of two workers, whose picker the gateway reaches over TLS.
const fleetKeys = "fleet.workers = 2\nepp.tls.self_signed = true\n"

// workers returns the process ids of the picker's workers, sorted.
func (w *world) workers(t *testing.T) (pids []int) {
	t.Helper()
	_, text := get(w.admin + "/v1/workers")
	var rows []struct{ PID int }
	if err := json.Unmarshal([]byte(text), &rows); err != nil {
		t.Fatal(text, err)
	}
	for _, r := range rows {
		pids = append(pids, r.PID)
	}
	slices.Sort(pids)
	return pids
}

// TestFleetOverTLS: each worker of a fleet is a picker, over TLS. While a worker is killed and
// replaced, requests fail at most as long as the gateway takes to notice.
func TestFleetOverTLS(t *testing.T) {
	w := newWorld(t, setting{picker: fleetKeys})
	for version, c := range clients {
		for i := range 20 {
			if resp, text := answer(t, c, w.url("closed"), body(version, 400, 4, i%2 == 0)); resp.StatusCode != 200 {
				t.Errorf("%s: %d %s", version, resp.StatusCode, text)
			}
		}
	}
	w.idle(t)
	if n := w.metric(t, "pdproxy_exchanges_total", `outcome="ok"`); n != 40 {
		t.Errorf("the fleet counts %v requests, want 40", n)
	}
	var before []int
	until(t, "both workers have connected", func() bool {
		before = w.workers(t)
		return len(before) == 2
	})
	if err := syscall.Kill(before[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, "the worker is replaced", func() bool {
		now := w.workers(t)
		return len(now) == 2 && !slices.Contains(now, before[0])
	})
	until(t, "20 successive requests succeed", func() bool {
		for range 20 {
			if resp, _ := answer(t, clients["H1"], w.url("closed"), body("replaced", 100, 4, false)); resp.StatusCode != 200 {
				return false
			}
		}
		return true
	})
	w.idle(t)
}

// TestTakeover: a successor takes epp.listen over, of a single process and of a fleet, with and
// without TLS. No request fails, and a running stream is complete.
func TestTakeover(t *testing.T) {
	for name, keys := range map[string]string{"single": "", "fleet": fleetKeys} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setting{picker: "fleet.dir = " + quoted(privateDir(t)) + "\n" + keys})
			stream, err := post(t.Context(), clients["H2"], w.url("closed"), body("long", 100, 20_000, true))
			if err != nil {
				t.Fatal(err)
			}
			defer stream.Body.Close()
			events := bufio.NewReader(stream.Body)
			if _, err := events.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			var failed, served atomic.Int64
			stop := make(chan struct{})
			var load sync.WaitGroup
			for version, c := range clients {
				load.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
						}
						resp, text := answer(t, c, w.url("closed"), body(version, 400, 4, false))
						if served.Add(1); resp.StatusCode != http.StatusOK {
							t.Logf("%d %s", resp.StatusCode, text)
							failed.Add(1)
						}
					}
				})
			}
			successor := w.takeOver(t)
			defer successor.stop(t, syscall.SIGTERM)
			now := served.Load()
			until(t, "the successor serves", func() bool { return served.Load() > now+100 })
			close(stop)
			load.Wait()
			if failed.Load() > 0 {
				t.Errorf("%d of %d requests failed", failed.Load(), served.Load())
			}
			rest, err := io.ReadAll(events)
			if err != nil || !strings.HasSuffix(strings.TrimSpace(string(rest)), "data: [DONE]") {
				t.Errorf("the stream ends with %q, %v", rest[max(0, len(rest)-100):], err)
			}
		})
	}
}
