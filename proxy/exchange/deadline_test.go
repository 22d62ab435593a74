package exchange_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// withDeadlines configures the header of deadlines and a deadline of one class.
func withDeadlines(c *config.Config) {
	classes(true)(c)
	c.PriorityClasses[2].Deadline = config.Duration(3 * time.Second) // interactive
	c.Limits.DeadlineHeader = "X-Deadline"
	c.Limits.MaxExchanges, c.Limits.Queue, c.Limits.QueueTimeout = 1, 10, config.Duration(time.Minute)
}

// TestDeadlineOfWaitingRequests: a request that waits for a place is refused at its deadline. A
// request that got its place before runs on.
func TestDeadlineOfWaitingRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		legs := 0
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			legs++
			if v := c.Leg.Header.Get("X-Deadline"); v != "" {
				t.Errorf("the engine got the header: %s", v)
			}
			time.Sleep(10 * time.Second)
			c.JSON(200, world.Unary)
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: withDeadlines})
		running := make(chan world.Answer, 1)
		go func() { running <- w.Post(world.CompletionsPath, world.Completions(false), "X-Deadline", "500") }()
		synctest.Wait()
		for _, tt := range []struct {
			header []string
			want   time.Duration
		}{
			{[]string{"X-Deadline", "700"}, 700 * time.Millisecond},
			{[]string{"X-Priority", "interactive"}, 3 * time.Second},
			{[]string{"X-Priority", "interactive", "X-Deadline", "1000"}, time.Second},
		} {
			began := time.Now()
			r := w.Post(world.CompletionsPath, world.Completions(false), tt.header...)
			if r.Status != 503 || !strings.Contains(r.Body, `"code":"deadline_exceeded"`) || r.Header.Get("Retry-After") == "" {
				t.Errorf("%v: %d %v %s", tt.header, r.Status, r.Header, r.Body)
			}
			if took := time.Since(began); took != tt.want {
				t.Errorf("%v: refused after %v", tt.header, took)
			}
		}
		if r := w.Post(world.CompletionsPath, world.Completions(false), "X-Priority", "batch"); r.Status != 200 {
			t.Errorf("a request without a deadline: %d %s", r.Status, r.Body)
		}
		if r := <-running; r.Status != 200 {
			t.Errorf("the request that ran at its deadline: %d %s", r.Status, r.Body)
		}
		if n := w.Metric("pdproxy_shed_total", "deadline_exceeded"); n != 3 || legs != 2 {
			t.Errorf("%v requests are counted as shed, %d legs, want 3 and 2", n, legs)
		}
	})
}

// TestDeadlineWithoutAnEngine: a request that waits for an engine is refused at its deadline.
func TestDeadlineWithoutAnEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, _ := world.EmptyWorld(t, time.Minute, func(l *config.Limits) { l.DeadlineHeader = "X-Deadline" })
		began := time.Now()
		r := w.Post(world.CompletionsPath, world.Asking("m"), "X-Deadline", "400")
		if took := time.Since(began); r.Status != 503 || !strings.Contains(r.Body, `"code":"deadline_exceeded"`) || took != 400*time.Millisecond {
			t.Errorf("%d %s after %v", r.Status, r.Body, took)
		}
	})
}

// TestBadDeadlines: a wrong value is refused before the request waits. Without the configuration
// the line has no meaning.
func TestBadDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: withDeadlines})
		for _, value := range []string{"0", "-1", "1s", "1.5", "86400001", "99999999999999999999", " ", "1,2", "０"} {
			r := w.Post(world.CompletionsPath, world.Completions(false), "X-Deadline", value)
			if value == " " {
				if r.Status != 200 {
					t.Errorf("blank: %d %s", r.Status, r.Body)
				}
				continue
			}
			if r.Status != 400 || !strings.Contains(r.Body, `"param":"X-Deadline","code":"bad_header"`) {
				t.Errorf("%q: %d %s", value, r.Status, r.Body)
			}
		}
		plain := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}})
		if r := plain.Post(world.CompletionsPath, world.Completions(false), "X-Deadline", "x"); r.Status != 200 {
			t.Errorf("not configured: %d %s", r.Status, r.Body)
		}
	})
}

// TestDeadlineForPolicies: policies that need the traits learn the remaining time.
func TestDeadlineForPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Needs: abi.NeedTraits, Config: withDeadlines})
		for value, want := range map[string]int64{"250": 250, "": 0} {
			if r := w.Post(world.CompletionsPath, world.Completions(false), "X-Deadline", value); r.Status != 200 {
				t.Fatalf("%+v", r)
			}
			if got := w.Decider.Asked.Load().(abi.RequestFacts).Remaining; got != want {
				t.Errorf("%q: %d ms remain, want %d", value, got, want)
			}
		}
	})
}
