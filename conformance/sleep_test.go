package conformance

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestSleepingEngines: a sleeping vLLM engine gets no request, and a woken one gets requests. While
// all engines sleep, a request gets 503 at once, or waits for an engine that is awake.
func TestSleepingEngines(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		if !strings.HasPrefix(connector, "vllm") {
			return // only vLLM reports the state
		}
		f := startFleet(t, connector, fleetOptions{config: func(c *config.Config) {
			c.Health.LoadInterval = config.Duration(20 * time.Millisecond)
		}})
		all := []*enginesim.Engine{f.prefill[0], f.prefill[1], f.decode[0], f.decode[1]}
		names := []string{"p0", "p1", "d0", "d1"}
		sleep := func(which ...int) {
			for _, i := range which {
				all[i].Sleep(1, true)
			}
			for _, i := range which {
				f.eventually(names[i]+" is asleep", func() bool { return f.engineState(names[i]) == "asleep" })
			}
		}
		wake := func(which ...int) {
			for _, i := range which {
				all[i].WakeUp()
			}
			for _, i := range which {
				f.eventually(names[i]+" is awake", func() bool { return f.engineState(names[i]) == "ready" })
			}
			f.awaitWorkers()
		}
		asked := func(n int, which ...int) (requests []int64) {
			t.Helper()
			before := make([]int64, len(which))
			for i, e := range which {
				before[i] = all[e].State().Requests
			}
			for i := range n {
				body := chat(fmt.Sprintf("%d: %s", i, long), 4, i%2 == 0)
				f.right(f.try(chatPath, body), chatPath, body)
			}
			for i, e := range which {
				requests = append(requests, all[e].State().Requests-before[i])
			}
			return requests
		}
		refused := func(code string, asleep int) {
			t.Helper()
			want := fmt.Sprintf("targets that sleep: %d", asleep)
			var a answer
			f.eventually(code+", "+want, func() bool { // the workers of a fleet learn the state a moment later
				a = f.try(chatPath, chat("nobody", 4, true))
				return a.status != 200 && strings.Contains(a.body, want)
			})
			if a.status != 503 || !strings.Contains(a.body, `"code":"`+code+`"`) || a.header.Get("Retry-After") == "" {
				t.Errorf("got %d %v %s", a.status, a.header, a.body)
			}
		}

		sleep(0, 2)
		if got := asked(8, 0, 2); got[0] != 0 || got[1] != 0 {
			t.Errorf("the sleeping engines got %v requests", got)
		}
		if n := f.metric("pdproxy_engine_asleep"); n != 2 {
			t.Errorf("%v engines are shown as asleep", n)
		}
		wake(0, 2)
		sleep(1, 3)
		if got := asked(8, 0, 1, 2, 3); got[0] != 8 || got[1] != 0 || got[2] != 8 || got[3] != 0 {
			t.Errorf("p0, p1, d0, d1 got %v requests; p1 and d1 sleep", got)
		}
		sleep(0)
		refused("no_target", 3)
		sleep(2)
		refused("no_target", 4)

		next := f.cfg
		next.Limits.NoEngineTimeout = config.Duration(50 * time.Millisecond)
		if err := f.reload(&next); err != nil {
			t.Fatal(err)
		}
		refused("no_engine_timeout", 4)
		next.Limits.NoEngineTimeout = config.Duration(time.Minute)
		if err := f.reload(&next); err != nil {
			t.Fatal(err)
		}
		body := chat("patient "+long, 4, false)
		got := make(chan answer, 1)
		go func() { got <- f.post(context.Background(), f.url, chatPath, body) }()
		f.eventually("a waiting request", func() bool {
			waits := 0.0
			for _, w := range append(f.workers, f.front) {
				n, _ := w.admin.Metric("pdproxy_requests_waiting")
				waits += n
			}
			return waits > 0
		})
		wake(1, 2)
		f.right(<-got, chatPath, body)
		if got := asked(4, 0, 1, 2, 3); got[0] != 0 || got[1] != 4 || got[2] != 4 || got[3] != 0 {
			t.Errorf("p0, p1, d0, d1 got %v requests; p0 and d1 sleep", got)
		}
		wake(0, 3)
	})
}
