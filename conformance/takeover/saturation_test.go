package takeover

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/surface"
	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// newSaturated is a fleet of two workers whose engine runs one request at a time.
func newSaturated(t *testing.T) (w *world, e *enginesim.Engine) {
	t.Helper()
	e = startEngine(t, enginesim.Config{Connector: enginesim.ConnectorVLLMNixl, Role: enginesim.RoleBoth, MaxRunning: 1})
	w = newWorldOf(t, false, 2, []*enginesim.Engine{e}, e, fmt.Sprintf(
		"[limits]\nsaturation_queue_depth = 2\nqueue_timeout = \"5m\"\ndeadline_header = \"X-Deadline\"\n[[engine]]\nname = \"e\"\nurl = %q\nrole = \"both\"\nconnector = %q\n",
		e.URL(), enginesim.ConnectorVLLMNixl))
	w.run()
	w.successor(0, func() {})
	w.awaitReady()
	w.eventually("there are not two workers", func() bool { return len(w.children("worker")) == 2 })
	return w, e
}

// completion sends a completion over a connection of its own. It returns status 0 if ctx ended.
func (w *world) completion(ctx context.Context, base string, n int, deadline string) (status int, text string) {
	body := fmt.Sprintf(`{"model":"sim","prompt":"%d %s","max_tokens":20,"ignore_eos":true}`, n, strings.Repeat("many words ", 200))
	r, err := http.NewRequestWithContext(ctx, "POST", base+path, strings.NewReader(body))
	if err != nil {
		w.t.Error(err)
		return 0, ""
	}
	r.Close = true // the next one may reach another worker
	if deadline != "" {
		r.Header.Set("X-Deadline", deadline)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		if ctx.Err() == nil {
			w.t.Error(err)
		}
		return 0, ""
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Error(err)
	}
	return resp.StatusCode, string(answer)
}

// metric returns the sum of a metric over all processes.
func (w *world) metric(name string, labels ...string) int {
	w.t.Helper()
	v, err := surface.Admin{Client: http.DefaultClient, URL: "http://" + w.admin}.Metric(name, labels...)
	if err != nil {
		w.t.Fatal(err)
	}
	return int(v)
}

// held waits until so many requests are held, and so many are open in all workers together.
// It returns the open ones of each worker.
func (w *world) held(held, open int) (perWorker []int) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("not %d of %d requests are held", held, open), func() bool {
		sum := 0
		perWorker = w.perWorker("pdproxy_worker_exchanges_open")
		for _, n := range perWorker {
			sum += n
		}
		return sum == open && w.metric("pdproxy_requests_waiting", `reason="saturated"`) == held
	})
	return perWorker
}

// TestSaturationInAFleet: the workers of a fleet hold requests while requests of others fill the
// engine, refuse those whose deadline is too near, and let the others go when the engine has room.
func TestSaturationInAFleet(t *testing.T) {
	w, e := newSaturated(t)
	for n := range 10 { // from these the coordinator knows how long a prompt is
		if status, text := w.completion(t.Context(), "http://"+w.addr, n, ""); status != 200 {
			t.Fatalf("%d %s", status, text)
		}
	}
	w.held(0, 0)

	const others = 8
	type answer struct {
		status int
		text   string
	}
	answers := make(chan answer, 300)
	send := func(ctx context.Context, base string, n int) {
		go func() {
			status, text := w.completion(ctx, base, n, "")
			answers <- answer{status, text}
		}()
	}
	e.SetDecodeUsPerToken(5_000_000)
	for n := range others {
		send(t.Context(), e.URL(), 100+n)
	}
	w.eventually("the proxy does not see the requests of others", func() bool {
		return w.metric("pdproxy_role_requests_waiting") == others-1
	})

	// A worker learns it a moment later than the coordinator. It may still place a request, whose
	// client then leaves.
	refused := 0
	for row := 0; row < 16; {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		switch status, text := w.completion(ctx, "http://"+w.addr, 500+refused, "1"); {
		case status == 503 && strings.Contains(text, `"code":"saturated"`):
			refused++
			row++
		case status == 0 || strings.Contains(text, `"code":"deadline_exceeded"`):
			row = 0
		default:
			t.Fatalf("a request whose deadline is too near: %d %s", status, text)
		}
		cancel()
	}

	sent := 0
	for both := false; !both; { // a worker without processor time accepts no connection
		for range 16 {
			send(t.Context(), "http://"+w.addr, 1000+sent)
			sent++
		}
		open := w.held(sent, sent)
		both = len(open) == 2 && open[0] > 0
		if sent > 200 {
			t.Fatalf("the workers have %v of the requests", open)
		}
	}
	w.eventually("a request of the proxy is in the engine", func() bool {
		s := e.State()
		return s.RequestsRunning == 1 && s.RequestsWaiting == others-1
	})

	leaves, left := context.WithCancel(t.Context())
	for n := range 4 {
		send(leaves, "http://"+w.addr, 600+n)
	}
	w.held(sent+4, sent+4)
	left()
	w.held(sent, sent)

	e.SetDecodeUsPerToken(0)
	ok := 0
	for range others + sent + 4 {
		switch got := <-answers; got.status {
		case 200:
			ok++
		case 0: // the client left
		default:
			t.Errorf("%d %s", got.status, got.text)
		}
	}
	if ok != others+sent {
		t.Errorf("%d requests succeed, want %d", ok, others+sent)
	}
	w.held(0, 0)
	w.eventually("leases are open", func() bool { return w.metric("pdproxy_leases_open") == 0 })
	if n := w.metric("pdproxy_shed_total", `reason="saturated"`); n < refused {
		t.Errorf("%d requests are counted as shed, want at least %d", n, refused)
	}
}
