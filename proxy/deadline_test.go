package proxy

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
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
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			legs++
			if v := c.leg.header.Get("X-Deadline"); v != "" {
				t.Errorf("the engine got the header: %s", v)
			}
			time.Sleep(10 * time.Second)
			c.json(200, unary)
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: withDeadlines})
		running := make(chan answer, 1)
		go func() { running <- w.post(completionsPath, completions(false), "X-Deadline", "500") }()
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
			r := w.post(completionsPath, completions(false), tt.header...)
			if r.status != 503 || !strings.Contains(r.body, `"code":"deadline_exceeded"`) || r.header.Get("Retry-After") == "" {
				t.Errorf("%v: %d %v %s", tt.header, r.status, r.header, r.body)
			}
			if took := time.Since(began); took != tt.want {
				t.Errorf("%v: refused after %v", tt.header, took)
			}
		}
		if r := w.post(completionsPath, completions(false), "X-Priority", "batch"); r.status != 200 {
			t.Errorf("a request without a deadline: %d %s", r.status, r.body)
		}
		if r := <-running; r.status != 200 {
			t.Errorf("the request that ran at its deadline: %d %s", r.status, r.body)
		}
		if n := w.metric("pdproxy_shed_total", "deadline_exceeded"); n != 3 || legs != 2 {
			t.Errorf("%v requests are counted as shed, %d legs, want 3 and 2", n, legs)
		}
	})
}

// TestDeadlineWithoutAnEngine: a request that waits for an engine is refused at its deadline.
func TestDeadlineWithoutAnEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, _ := emptyWorld(t, time.Minute, func(l *config.Limits) { l.DeadlineHeader = "X-Deadline" })
		began := time.Now()
		r := w.post(completionsPath, asking("m"), "X-Deadline", "400")
		if took := time.Since(began); r.status != 503 || !strings.Contains(r.body, `"code":"deadline_exceeded"`) || took != 400*time.Millisecond {
			t.Errorf("%d %s after %v", r.status, r.body, took)
		}
	})
}

// TestBadDeadlines: a wrong value is refused before the request waits. Without the configuration
// the line has no meaning.
func TestBadDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: withDeadlines})
		for _, value := range []string{"0", "-1", "1s", "1.5", "86400001", "99999999999999999999", " ", "1,2", "０"} {
			r := w.post(completionsPath, completions(false), "X-Deadline", value)
			if value == " " {
				if r.status != 200 {
					t.Errorf("blank: %d %s", r.status, r.body)
				}
				continue
			}
			if r.status != 400 || !strings.Contains(r.body, `"param":"X-Deadline","code":"bad_header"`) {
				t.Errorf("%q: %d %s", value, r.status, r.body)
			}
		}
		plain := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.json(200, unary) }}}})
		if r := plain.post(completionsPath, completions(false), "X-Deadline", "x"); r.status != 200 {
			t.Errorf("not configured: %d %s", r.status, r.body)
		}
	})
}

// TestDeadlineForPolicies: policies that need the traits learn the remaining time.
func TestDeadlineForPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, unary) }}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, needs: abi.NeedTraits, config: withDeadlines})
		for value, want := range map[string]int64{"250": 250, "": 0} {
			if r := w.post(completionsPath, completions(false), "X-Deadline", value); r.status != 200 {
				t.Fatalf("%+v", r)
			}
			if got := w.decider.asked.Load().(abi.RequestFacts).Remaining; got != want {
				t.Errorf("%q: %d ms remain, want %d", value, got, want)
			}
		}
	})
}
