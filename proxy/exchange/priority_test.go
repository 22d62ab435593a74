package exchange_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
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

// TestPriorityHeader: a header line that names no class, or a class that is more urgent than the
// client's own, is an error that names the line.
func TestPriorityHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, trust := range []bool{false, true} {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.DoneAnswer) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: classes(trust)})
			for name, ok := range map[string]bool{"": true, "default": true, "batch": true, "interactive": trust, "none": false, "Batch": false, strings.Repeat("x", 10_000): false} {
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
			if n := w.Metric("pdproxy_class_exchanges_total", "batch", "ok"); n != 1 {
				t.Errorf("counted %v requests of the class batch", n)
			}
			if err := w.Stop(); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestClassesWaitTheirTurn: with one place, waiting requests run by class.
func TestClassesWaitTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		proceed := make(chan bool)
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			<-proceed
			c.JSON(200, `{"choices":[{"text":"x"}],"usage":{"prompt_tokens":100,"completion_tokens":100}}`)
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
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
				if a := w.Post(world.CompletionsPath, world.Completions(false), "X-Priority", class); a.Status != 200 {
					t.Errorf("request %d: status %d: %s", i, a.Status, a.Body)
				}
				ended <- class
			}()
			synctest.Wait()
		}
		if n := w.Metric("pdproxy_class_requests", "batch", "waiting"); n != 2 {
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
