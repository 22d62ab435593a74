package exchange_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// holdingWorld is a world whose plan policy holds all requests until release is called, each
// for at most limit.
func holdingWorld(t *testing.T, limit time.Duration) (w *world.World, asked *atomic.Int64, release func()) {
	t.Helper()
	e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
	w = world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
		c.Limits.QueueTimeout, c.Limits.DeadlineHeader = config.Duration(20*time.Second), "X-Deadline"
	}})
	var released atomic.Bool
	asked = new(atomic.Int64)
	w.Decider.Hold = func(*abi.PlanFacts) (bool, time.Duration) {
		asked.Add(1)
		return !released.Load(), limit
	}
	return w, asked, func() { released.Store(true) }
}

// TestHold: a request that the plan policy holds waits, and is served when the policy lets it go.
func TestHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, asked, release := holdingWorld(t, 0)
		got := make(chan world.Answer, 1)
		go func() { got <- w.Post(world.CompletionsPath, world.Completions(false)) }()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if n := w.Metric("pdproxy_requests_waiting", "m", "policy"); n != 1 {
			t.Errorf("%v requests are shown as held, want 1", n)
		}
		if n := asked.Load(); n < 10 || n > 20 {
			t.Errorf("the policy was asked %d times in 10 s, want about once a second", n)
		}
		release()
		if a := <-got; a.Status != 200 {
			t.Errorf("got %d %s", a.Status, a.Body)
		}
		if n := w.Metric("pdproxy_requests_waiting", "m", "policy"); n != 0 {
			t.Errorf("%v requests are shown as held after the end", n)
		}
		if e := w.Explained(); !strings.Contains(strings.Join(e.Notes, "\n"), "the plan policy held the request for 1") {
			t.Errorf("explain has the notes %q", e.Notes)
		}
	})
}

// TestHoldEnds: the wait ends at the limit of the policy, of the configuration, or of the request.
func TestHoldEnds(t *testing.T) {
	for _, tt := range []struct {
		name     string
		limit    time.Duration
		deadline string
		want     time.Duration
		code     string
	}{
		{"limit of the policy", 700 * time.Millisecond, "", 700 * time.Millisecond, "held_by_policy"},
		{"queue_timeout", 0, "", 20 * time.Second, "held_by_policy"},
		{"queue_timeout is less", time.Hour, "", 20 * time.Second, "held_by_policy"},
		{"deadline", time.Hour, "300", 300 * time.Millisecond, "deadline_exceeded"},
	} {
		world.Run(t, tt.name, func(t *testing.T) {
			w, _, _ := holdingWorld(t, tt.limit)
			began := time.Now()
			a := w.Post(world.CompletionsPath, world.Completions(false), "X-Deadline", tt.deadline)
			if took := time.Since(began); took != tt.want || a.Status != 503 || !strings.Contains(a.Body, `"code":"`+tt.code+`"`) || a.Header.Get("Retry-After") == "" {
				t.Errorf("%d %v %s after %v", a.Status, a.Header, a.Body, took)
			}
			if n := w.Metric("pdproxy_shed_total", tt.code); n != 1 {
				t.Errorf("%v requests are counted as shed", n)
			}
		})
	}
}

// TestHeldClientLeaves: a held request ends when its client leaves, and its place is free.
func TestHeldClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, asked, release := holdingWorld(t, 0)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if a := world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(false)); a.Err == nil {
			t.Errorf("the client that left got %d", a.Status)
		}
		synctest.Wait()
		before := asked.Load()
		time.Sleep(5 * time.Second)
		if n := asked.Load() - before; n != 0 {
			t.Errorf("the policy was asked %d times after the client had left", n)
		}
		if n := w.Metric("pdproxy_requests_waiting", "m", "policy"); n != 0 {
			t.Errorf("%v requests are shown as held", n)
		}
		release()
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 {
			t.Errorf("the next request: %d", a.Status)
		}
	})
}

// TestHeldWhileDraining: a drain ends the wait of held requests with 503.
func TestHeldWhileDraining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, _ := holdingWorld(t, 0)
		got := make(chan world.Answer, 1)
		go func() { got <- w.Post(world.CompletionsPath, world.Completions(false)) }()
		time.Sleep(time.Second)
		w.Drain()
		if a := <-got; a.Status != 503 || !strings.Contains(a.Body, `"code":"draining"`) {
			t.Errorf("%d %s", a.Status, a.Body)
		}
		if a := w.Get("/health"); a.Status != 503 || !strings.Contains(a.Body, "the proxy drains") {
			t.Errorf("GET /health: %d %s", a.Status, a.Body)
		}
	})
}
