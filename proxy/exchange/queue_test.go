package exchange_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/poolobjects"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// classes configures the classes of these tests.
func classes(trust bool) func(*config.Config) {
	return func(c *config.Config) {
		for _, p := range []struct {
			name     string
			priority int
		}{{"default", 0}, {"batch", -5}, {"interactive", 7}} {
			class := config.DefaultPriorityClass()
			class.Name, class.Priority = p.name, p.priority
			c.PriorityClasses = append(c.PriorityClasses, class)
		}
		c.Limits.PriorityHeader, c.Limits.TrustPriority = "X-Priority", trust
	}
}

// legPriority returns the field "priority" of a leg, "" if the leg has none. The field must
// occur once at most.
func legPriority(t *testing.T, body string) string {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &m); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	if strings.Count(body, `"priority"`) > 1 {
		t.Errorf("two priorities in %s", body)
	}
	return string(m["priority"])
}

// TestPriorityOfLegs: each leg has the priority of its class with the sign of its engine, in
// place of the client's field. The header that names the class stays in the proxy.
func TestPriorityOfLegs(t *testing.T) {
	for _, tt := range []struct {
		connector, answer, order string
		class, own               string // header line and field of the client
		want                     string
	}{
		{"vllm-nixl", world.NIXLAnswer, config.LowerFirst, "interactive", "", "-7"},
		{"vllm-nixl", world.NIXLAnswer, config.LowerFirst, "batch", "", "5"},
		{"vllm-nixl", world.NIXLAnswer, config.LowerFirst, "", "-1000000", "0"},
		{"vllm-nixl", world.NIXLAnswer, "", "interactive", "3", "3"},
		{"vllm-nixl", world.NIXLAnswer, "", "interactive", "", ""},
		{"sglang", world.DoneAnswer, config.HigherFirst, "interactive", "", "7"},
		{"sglang", world.DoneAnswer, config.HigherFirst, "batch", "9", "-5"},
		{"sglang", world.DoneAnswer, config.LowerFirst, "batch", "", "5"},
		{"none", world.DoneAnswer, config.HigherFirst, "interactive", "1", "7"},
	} {
		world.Run(t, strings.Join([]string{tt.connector, tt.order, tt.class, tt.own}, " "), func(t *testing.T) {
			var arrived sync.WaitGroup // concurrent legs: an early answer of decode would end prefill's leg
			if tt.connector == "sglang" {
				arrived.Add(2)
			}
			answer := func(c *world.Conn, _ int) {
				if tt.connector == "sglang" && c.Leg.Path == world.CompletionsPath {
					arrived.Done()
					arrived.Wait()
				}
				c.JSON(200, tt.answer)
			}
			engines := []*world.Engine{{Name: "p", Role: "prefill", Connector: tt.connector, Serve: answer}, {Name: "d", Role: "decode", Connector: tt.connector, Serve: answer}}
			if tt.connector == "none" {
				engines = []*world.Engine{{Name: "e", Serve: answer}}
			}
			for _, e := range engines {
				e.Priority = tt.order
			}
			w := world.New(t, world.Setup{Engines: engines, Config: classes(true)})
			body := strings.TrimSuffix(world.Completions(false), "}")
			if tt.own != "" {
				body += `,"priority":` + tt.own
			}
			header := []string{}
			if tt.class != "" {
				header = append(header, "X-Priority", tt.class)
			}
			w.Post(world.CompletionsPath, body+"}", header...)
			legs := 0
			for _, e := range engines {
				for _, l := range e.Seen() {
					if l.Method != http.MethodPost || l.Path != world.CompletionsPath {
						continue
					}
					legs++
					if got := legPriority(t, l.Body); got != tt.want {
						t.Errorf("%s got priority %q, want %q: %s", e.Name, got, tt.want, l.Body)
					}
					if v := l.Header.Get("X-Priority"); v != "" {
						t.Errorf("%s got the line %q", e.Name, v)
					}
				}
			}
			if legs < len(engines) {
				t.Errorf("%d legs", legs)
			}
		})
	}
}

// TestPriorityHeader: a header line that names a class that is more urgent than the client's own is an
// error that names the line. A name of no class has the priority of the class default.
func TestPriorityHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, trust := range []bool{false, true} {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.DoneAnswer) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: classes(trust)})
			for name, ok := range map[string]bool{"": true, "default": true, "batch": true, "interactive": trust, "none": true, "Batch": true, strings.Repeat("x", 10_000): true} {
				before := len(e.Seen())
				a := w.Post(world.CompletionsPath, world.Completions(false), "X-Priority", name)
				if ok {
					if a.Status != 200 {
						t.Errorf("trust %t, %q: status %d: %s", trust, name, a.Status, a.Body)
					}
					continue
				}
				var got struct {
					Error struct{ Param, Code, Message string }
				}
				if err := json.Unmarshal([]byte(a.Body), &got); err != nil || a.Status != 400 || got.Error.Code != "invalid_priority" || got.Error.Param != "X-Priority" || len(a.Body) > 1000 {
					t.Errorf("trust %t, %.20q: status %d, error %v: %.1000s", trust, name, a.Status, err, a.Body)
				}
				if len(e.Seen()) != before {
					t.Errorf("%.20q: the request reached the engine", name)
				}
			}
			for class, want := range map[string]float64{"batch": 1, "default": 5} {
				if n := w.Metric("pdproxy_class_exchanges_total", class, "ok"); n != want {
					t.Errorf("counted %v requests of the class %s, want %v", n, class, want)
				}
			}
			if err := w.Stop(); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestObjectives: a request has the priority of the InferenceObjective that its line names. The present
// line of llm-d counts before the earlier one. Without the object the request has the class default.
func TestObjectives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, trust := range []bool{false, true} {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.DoneAnswer) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
				c.EPP.Pool, c.Limits.TrustPriority = "vllm.llm", trust
			}})
			w.SetObjects(&poolobjects.Objects{Priorities: map[string]int{"premium": 10, "bulk": -5, "plain": 0}})
			const line, old = "X-Llm-D-Inference-Objective", "X-Gateway-Inference-Objective"
			for _, tt := range []struct {
				header []string
				class  string // of a request that is served; "": 400
			}{
				{nil, "default"}, {[]string{line, "plain"}, "default"}, {[]string{line, "unknown"}, "default"},
				{[]string{line, "bulk"}, "priority_-5"}, {[]string{old, "bulk"}, "priority_-5"}, {[]string{old, "premium", line, "bulk"}, "priority_-5"},
				{[]string{line, "premium"}, map[bool]string{true: "priority_10"}[trust]},
			} {
				before := 0.0
				if tt.class != "" {
					before = w.Metric("pdproxy_class_exchanges_total", tt.class, "ok")
				}
				a := w.Post(world.CompletionsPath, world.Completions(false), tt.header...)
				switch {
				case tt.class == "":
					if a.Status != 400 || !strings.Contains(a.Body, "invalid_priority") {
						t.Errorf("trust %t, %v: %d %s", trust, tt.header, a.Status, a.Body)
					}
				case a.Status != 200 || w.Metric("pdproxy_class_exchanges_total", tt.class, "ok") != before+1:
					t.Errorf("trust %t, %v: %d, not of the class %s: %s", trust, tt.header, a.Status, tt.class, a.Body)
				}
			}
			for _, l := range e.Seen() {
				if l.Header.Get(line) != "" || l.Header.Get(old) != "" {
					t.Errorf("the engine got the line: %v", l.Header)
				}
			}
			w.SetObjects(new(poolobjects.Objects))
			before := w.Metric("pdproxy_class_exchanges_total", "default", "ok")
			if a := w.Post(world.CompletionsPath, world.Completions(false), line, "premium"); a.Status != 200 || w.Metric("pdproxy_class_exchanges_total", "default", "ok") != before+1 {
				t.Errorf("without the object: %d %s", a.Status, a.Body)
			}
			if err := w.Stop(); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestSheddable: a request with a negative priority is refused instead of waiting, and others wait.
func TestSheddable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		proceed := make(chan bool)
		w := world.New(t, world.Setup{Engines: []*world.Engine{gated(proceed)}, Config: func(c *config.Config) {
			c.EPP.Pool, c.Limits.MaxExchanges = "vllm.llm", 1
		}})
		w.SetObjects(&poolobjects.Objects{Priorities: map[string]int{"bulk": -5, "plain": 0}})
		const line = "X-Llm-D-Inference-Objective"
		ended := arrive(t, w, line, "bulk", "plain") // the first runs, because a place is free
		if a := w.Post(world.CompletionsPath, world.Completions(false), line, "bulk"); a.Status != 429 || !strings.Contains(a.Body, "queue_full") {
			t.Errorf("a sheddable request: %d %s", a.Status, a.Body)
		}
		for range 2 {
			proceed <- true
			<-ended
		}
		if err := w.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// gated returns an engine that gives one answer for each value of proceed.
func gated(proceed <-chan bool) *world.Engine {
	return &world.Engine{Serve: func(c *world.Conn, _ int) {
		<-proceed
		c.JSON(200, `{"choices":[{"text":"x"}],"usage":{"prompt_tokens":100,"completion_tokens":100}}`)
	}}
}

// arrive sends one request after the other, with these values of a header line. The channel
// receives the value of each request that has ended.
func arrive(t *testing.T, w *world.World, header string, values ...string) <-chan string {
	ended := make(chan string, len(values))
	for i, value := range values {
		go func() {
			if a := w.Post(world.CompletionsPath, world.Completions(false), header, value); a.Status != 200 {
				t.Errorf("request %d: status %d: %s", i, a.Status, a.Body)
			}
			ended <- value
		}()
		synctest.Wait()
	}
	return ended
}

// orderOf lets the requests of arrive run one by one and returns their order.
func orderOf(proceed chan<- bool, ended <-chan string) string {
	var order []string
	for range cap(ended) {
		proceed <- true
		order = append(order, <-ended)
		synctest.Wait()
	}
	return fmt.Sprint(order)
}

// TestClassesWaitTheirTurn: with one place, waiting requests run by class.
func TestClassesWaitTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		proceed := make(chan bool)
		w := world.New(t, world.Setup{Engines: []*world.Engine{gated(proceed)}, Config: func(c *config.Config) {
			classes(true)(c)
			c.PriorityClasses[2].Weight = 1000
			c.Limits.MaxExchanges, c.Limits.QueueTimeout = 1, config.Duration(1e12)
			for i := range c.PriorityClasses {
				c.PriorityClasses[i].PromoteAfter = 0
			}
		}})
		ended := arrive(t, w, "X-Priority", "batch", "batch", "batch", "interactive", "interactive")
		if n := w.Metric("pdproxy_class_requests", "batch", "waiting"); n != 2 {
			t.Errorf("%v requests of the class batch wait", n)
		}
		if got := orderOf(proceed, ended); got != "[batch batch interactive interactive batch]" && got != "[batch interactive interactive batch batch]" {
			t.Errorf("order %s", got)
		}
	})
}

// TestDisplaced: a full queue refuses a request that waits, if a new one is of a higher class. The client
// gets the error of a full queue, and the explanation names the class.
func TestDisplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		proceed := make(chan bool)
		w := world.New(t, world.Setup{Engines: []*world.Engine{gated(proceed)}, Config: func(c *config.Config) {
			classes(true)(c)
			c.Limits.MaxExchanges, c.Limits.Queue, c.Limits.QueueTimeout = 1, 1, config.Duration(time.Hour)
		}})
		running := arrive(t, w, "X-Priority", "default")
		refused := make(chan world.Answer, 1)
		go func() {
			refused <- w.Post(world.CompletionsPath, world.Completions(true), "X-Priority", "batch", "X-Request-Id", "low")
		}()
		synctest.Wait()
		if n := w.Metric("pdproxy_class_requests", "batch", "waiting"); n != 1 {
			t.Fatalf("%v requests of the class batch wait", n)
		}
		waiting := arrive(t, w, "X-Priority", "interactive")
		if a := <-refused; a.Status != 429 || a.Header.Get("Retry-After") != "1" || !strings.Contains(a.Body, `"code":"queue_full"`) {
			t.Errorf("got %d %v %s", a.Status, a.Header, a.Body)
		}
		synctest.Wait()
		if e, _ := w.Explain("low"); e.ErrorCode != "queue_full" || fmt.Sprint(e.Notes) != "[a request of the class interactive got the place of the request in the full queue]" {
			t.Errorf("explained as %q %q", e.ErrorCode, e.Notes)
		}
		if n := w.Metric("pdproxy_shed_total", "queue_full"); n != 1 {
			t.Errorf("%v requests are counted as shed", n)
		}
		if n := w.Metric("pdproxy_class_exchanges_total", "batch", "shed"); n != 1 {
			t.Errorf("%v requests of the class batch are counted as shed", n)
		}
		for _, ended := range []<-chan string{running, waiting} {
			orderOf(proceed, ended)
		}
		if err := w.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// TestFairnessHeader: flows that the header line names share the free places. A flow with many
// requests does not delay another one. Engines do not get the line.
func TestFairnessHeader(t *testing.T) {
	for header, want := range map[string]string{
		"X-Flow": "[a a b a a]",
		"":       "[a a a a b]",
	} {
		synctest.Test(t, func(t *testing.T) {
			proceed := make(chan bool)
			e := gated(proceed)
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
				c.Limits.FairnessHeader, c.Limits.MaxExchanges, c.Limits.QueueTimeout = header, 1, config.Duration(1e12)
			}})
			ended := arrive(t, w, "X-Flow", "a", "a", "a", "a", "b")
			if got := orderOf(proceed, ended); got != want {
				t.Errorf("header %q: order %s, want %s", header, got, want)
			}
			for _, l := range e.Seen() {
				if v := l.Header.Get("X-Flow"); v != "" && header != "" {
					t.Errorf("the engine got the line %q", v)
				}
			}
		})
	}
}

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
