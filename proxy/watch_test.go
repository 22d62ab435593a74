package proxy_test

import (
	"bufio"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/admin"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestViewersLeave: a viewer of the dashboard sees the traffic, and delays neither the end of
// the process nor a successor.
func TestViewersLeave(t *testing.T) {
	for name, end := range map[string]func(w *world.World){
		"shutdown":  func(w *world.World) { w.End() },
		"successor": func(w *world.World) { w.Stopped.Store(true); w.Front.StopAccepting() },
	} {
		world.Run(t, name, func(t *testing.T) {
			w := newWorld(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}})
			resp := watch(w)
			defer resp.Body.Close()
			events := bufio.NewScanner(resp.Body)
			events.Buffer(nil, 1<<20)
			var s admin.Snapshot
			next := func() bool {
				for events.Scan() {
					if text, ok := strings.CutPrefix(events.Text(), "data: "); ok {
						if err := json.Unmarshal([]byte(text), &s); err != nil {
							t.Fatalf("%v in %s", err, text)
						}
						return true
					}
				}
				return false
			}
			if !next() || len(s.Engines) != 1 || s.Engines[0].State != "ready" || s.Version != "1.2.3" || s.Traffic.Requests != 0 {
				t.Fatalf("first: %+v", s)
			}
			if a := w.Post(world.CompletionsPath, world.Completions(false), "X-Request-Id", "mine"); a.Status != 200 {
				t.Fatalf("%d %s", a.Status, a.Body)
			}
			if !next() || len(s.Latest) != 1 || s.Latest[0].RequestID != "mine" || s.Traffic.Outcomes["ok"] <= 0 {
				t.Errorf("after a request: %+v", s)
			}
			began := time.Now()
			end(w)
			for next() {
			}
			if err := events.Err(); err != nil || time.Since(began) > 2*time.Second {
				t.Errorf("the stream ended after %s: %v", time.Since(began), err)
			}
			if err := <-w.Over; err != nil {
				t.Errorf("the process ended with %v", err)
			}
			w.Over <- nil // for the end of the world
		})
	}
}

// watch opens the stream of the dashboard.
func watch(w *world.World) *http.Response {
	w.T.Helper()
	r, err := http.NewRequest("GET", "http://127.0.0.1/v1/dashboard/events", nil)
	if err != nil {
		w.T.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+world.AdminToken)
	resp, err := w.AdminClient.Do(r)
	if err != nil || resp.StatusCode != 200 {
		w.T.Fatalf("%v, %v", resp, err)
	}
	return resp
}
