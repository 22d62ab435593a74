package conformance

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestFloodTakesItsShareOnly: three clients compete for the places of the proxy. One of them
// floods with long answers. All get the same number of tokens (Jain's index of at least 0.98).
// The prefill engines hold each request until all other requests wait in the proxy, so a client
// on a busy machine never leaves its share to the others.
func TestFloodTakesItsShareOnly(t *testing.T) {
	const places, rounds = 8, 60
	flood := &competitor{address: "192.0.2.1", connections: 120, long: 64}
	middle := &competitor{address: "192.0.2.2", connections: 32, long: 16}
	small := &competitor{address: "192.0.2.3", connections: 32, long: 4}
	all := []*competitor{flood, middle, small}
	var held atomic.Int64
	gate := make(chan struct{})
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{
		engine: func(role string, _ int, c *enginesim.Config) {
			if role != enginesim.RolePrefill {
				return
			}
			c.OnPrompt = func(prompt string) {
				for _, c := range all {
					if strings.Contains(prompt, c.address) {
						c.placed.Add(1)
					}
				}
				held.Add(1)
				<-gate
			}
		},
		config: func(c *config.Config) {
			c.Server.TrustedProxies = []string{"127.0.0.0/8"}
			c.Limits.MaxExchanges, c.Limits.QueueTimeout = places, config.Duration(5*time.Minute)
		},
	})
	enough := make(chan struct{})
	end := sync.OnceFunc(func() {
		close(enough)
		close(gate)
	})
	defer end()
	var wg sync.WaitGroup
	open := 0
	for _, c := range all {
		open += c.connections
		for range c.connections {
			wg.Go(func() { c.run(f, enough) })
		}
	}
	othersWait := func() {
		f.eventually("the engines hold all requests that have a place, and the others wait", func() bool {
			return held.Load() == places && f.metric("pdproxy_requests_waiting", `reason="max_exchanges"`) == float64(open-places)
		})
	}
	othersWait()
	before := make([]int64, len(all))
	for i, c := range all {
		before[i] = c.placed.Load()
	}
	for n := 0; n < rounds && !t.Failed(); n++ {
		for range places {
			gate <- struct{}{}
			held.Add(-1)
		}
		othersWait()
	}
	sum, squares := 0.0, 0.0
	for i, c := range all {
		const prompt = 13 // about; the small client's requests consist mostly of it
		tokens := float64((c.placed.Load() - before[i]) * int64(c.long+prompt))
		t.Logf("%s: %.0f tokens", c.address, tokens)
		sum, squares = sum+tokens, squares+tokens*tokens
	}
	end()
	wg.Wait()
	if jain := sum * sum / (3 * squares); jain < 0.98 {
		t.Errorf("Jain index %.4f", jain)
	}
}

// competitor is a client that always has as many requests open as it has connections.
type competitor struct {
	address           string
	connections, long int          // long is the number of tokens of each answer
	placed            atomic.Int64 // requests that have reached an engine
}

// run sends one request after the other until enough is closed.
func (c *competitor) run(f *fleet, enough <-chan struct{}) {
	for {
		if err := f.from(c.address, chat("fair "+c.address, c.long, false)); err != nil {
			f.t.Error(err)
			return
		}
		select {
		case <-enough:
			return
		default:
		}
	}
}

// from posts a chat for a client of that address. The answer must be right.
func (f *fleet) from(address, body string) error {
	r, err := http.NewRequest(http.MethodPost, f.url+chatPath, strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Forwarded-For", address)
	resp, err := f.client.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d, %w: %s", resp.StatusCode, err, answer)
	}
	return nil
}

// TestFullQueueLetsAHigherClassIn: a new request gets the place of a waiting one of a lower class, if the
// queue is full. The other way round, the new request is refused.
func TestFullQueueLetsAHigherClassIn(t *testing.T) {
	release := make(chan struct{})
	e := both("e", func(w http.ResponseWriter, leg testbed.Leg) {
		<-release
		says(200, `{"choices":[{"text":"x"}]}`)(w, leg)
	})
	f := startScripted(t, "none", func(c *config.Config) {
		for name, priority := range map[string]int{"batch": -1, "interactive": 1} {
			class := config.DefaultPriorityClass()
			class.Name, class.Priority = name, priority
			c.PriorityClasses = append(c.PriorityClasses, class)
		}
		c.Limits.PriorityHeader, c.Limits.TrustPriority = "x-priority", true
		c.Limits.MaxExchanges, c.Limits.Queue, c.Limits.QueueTimeout = 1, 1, config.Duration(time.Minute)
	}, e)
	f.oneEntry() // each worker has a queue of its own
	send := func(class string) <-chan answer {
		got := make(chan answer, 1)
		go func() {
			got <- f.post(context.Background(), f.url, completionPath, plainCompletion(false), "x-priority", class)
		}()
		return got
	}
	refused := func(a answer) {
		t.Helper()
		if a.status != 429 || a.header.Get("Retry-After") == "" || !strings.Contains(a.body, `"code":"queue_full"`) {
			t.Errorf("got status %d %v: %s", a.status, a.header, a.body)
		}
	}
	running := send("batch")
	f.eventually("one request runs", func() bool { return len(e.Seen(func(testbed.Leg) bool { return true })) == 1 })
	low := send("batch")
	f.eventually("one of the class batch waits", func() bool {
		return f.metric("pdproxy_class_requests", `class="batch"`, `state="waiting"`) == 1
	})
	high := send("interactive")
	refused(<-low)
	refused(<-send("batch"))
	close(release)
	for _, got := range []<-chan answer{running, high} {
		if a := <-got; a.status != 200 {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
	}
	f.eventually("both are counted", func() bool {
		return f.metric("pdproxy_shed_total", `reason="queue_full"`) == 2 && f.metric("pdproxy_class_exchanges_total", `class="batch"`, `outcome="shed"`) == 2
	})
}
