package proxy

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
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
		{"vllm-nixl", nixlAnswer, config.LowerFirst, "interactive", "", "-7"},
		{"vllm-nixl", nixlAnswer, config.LowerFirst, "batch", "", "5"},
		{"vllm-nixl", nixlAnswer, config.LowerFirst, "", "-1000000", "0"},
		{"vllm-nixl", nixlAnswer, "", "interactive", "3", "3"},
		{"vllm-nixl", nixlAnswer, "", "interactive", "", ""},
		{"sglang", doneAnswer, config.HigherFirst, "interactive", "", "7"},
		{"sglang", doneAnswer, config.HigherFirst, "batch", "9", "-5"},
		{"sglang", doneAnswer, config.LowerFirst, "batch", "", "5"},
		{"none", doneAnswer, config.HigherFirst, "interactive", "1", "7"},
	} {
		t.Run(strings.Join([]string{tt.connector, tt.order, tt.class, tt.own}, " "), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var arrived sync.WaitGroup // concurrent legs: an early answer of decode would end prefill's leg
				if tt.connector == "sglang" {
					arrived.Add(2)
				}
				answer := func(c *engineConn, _ int) {
					if tt.connector == "sglang" && c.leg.path == completionsPath {
						arrived.Done()
						arrived.Wait()
					}
					c.json(200, tt.answer)
				}
				engines := []*fakeEngine{{name: "p", role: "prefill", connector: tt.connector, serve: answer}, {name: "d", role: "decode", connector: tt.connector, serve: answer}}
				if tt.connector == "none" {
					engines = []*fakeEngine{{name: "e", serve: answer}}
				}
				for _, e := range engines {
					e.priority = tt.order
				}
				w := newWorld(t, setup{engines: engines, config: classes(true)})
				body := strings.TrimSuffix(completions(false), "}")
				if tt.own != "" {
					body += `,"priority":` + tt.own
				}
				header := []string{}
				if tt.class != "" {
					header = append(header, "X-Priority", tt.class)
				}
				w.post(completionsPath, body+"}", header...)
				legs := 0
				for _, e := range engines {
					for _, l := range e.seen() {
						if l.method != http.MethodPost || l.path != completionsPath {
							continue
						}
						legs++
						if got := legPriority(t, l.body); got != tt.want {
							t.Errorf("%s got priority %q, want %q: %s", e.name, got, tt.want, l.body)
						}
						if v := l.header.Get("X-Priority"); v != "" {
							t.Errorf("%s got the line %q", e.name, v)
						}
					}
				}
				if legs < len(engines) {
					t.Errorf("%d legs", legs)
				}
			})
		})
	}
}

// TestPriorityHeader: a header line that names no class, or a class that is more urgent than the
// client's own, is an error that names the line.
func TestPriorityHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, trust := range []bool{false, true} {
			e := &fakeEngine{serve: func(c *engineConn, _ int) { c.json(200, doneAnswer) }}
			w := newWorld(t, setup{engines: []*fakeEngine{e}, config: classes(trust)})
			for name, ok := range map[string]bool{"": true, "default": true, "batch": true, "interactive": trust, "none": false, "Batch": false, strings.Repeat("x", 10_000): false} {
				before := len(e.seen())
				a := w.post(completionsPath, completions(false), "X-Priority", name)
				if ok {
					if a.status != 200 {
						t.Errorf("trust %t, %q: status %d: %s", trust, name, a.status, a.body)
					}
					continue
				}
				var got struct {
					Error struct{ Param, Code, Message string }
				}
				if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != 400 || got.Error.Code != "invalid_priority" || got.Error.Param != "X-Priority" || len(a.body) > 1000 {
					t.Errorf("trust %t, %.20q: status %d, error %v: %.1000s", trust, name, a.status, err, a.body)
				}
				if len(e.seen()) != before {
					t.Errorf("%.20q: the request reached the engine", name)
				}
			}
			if n := w.metric("pdproxy_class_exchanges_total", "batch", "ok"); n != 1 {
				t.Errorf("counted %v requests of the class batch", n)
			}
			if err := w.stop(); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestClassesWaitTheirTurn: with one place, waiting requests run by class.
func TestClassesWaitTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		proceed := make(chan bool)
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			<-proceed
			c.json(200, `{"choices":[{"text":"x"}],"usage":{"prompt_tokens":100,"completion_tokens":100}}`)
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) {
			classes(true)(c)
			c.PriorityClasses[2].Weight = 1000
			c.Limits.MaxExchanges, c.Limits.QueueTimeout = 1, config.Duration(1e12)
			for i := range c.PriorityClasses {
				c.PriorityClasses[i].PromoteAfter = 0
			}
		}})
		ended := make(chan string, 10)
		for i, class := range []string{"batch", "batch", "batch", "interactive", "interactive"} {
			go func() {
				if a := w.post(completionsPath, completions(false), "X-Priority", class); a.status != 200 {
					t.Errorf("request %d: status %d: %s", i, a.status, a.body)
				}
				ended <- class
			}()
			synctest.Wait()
		}
		if n := w.metric("pdproxy_class_requests", "batch", "waiting"); n != 2 {
			t.Errorf("%v requests of the class batch wait", n)
		}
		var order []string
		for range 5 {
			proceed <- true
			order = append(order, <-ended)
			synctest.Wait()
		}
		if got := fmt.Sprint(order); got != "[batch batch interactive interactive batch]" && got != "[batch interactive interactive batch batch]" {
			t.Errorf("order %s", got)
		}
	})
}
