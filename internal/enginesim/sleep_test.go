package enginesim

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TestSleep: the states of vLLM's sleep mode, by its routes and its metric.
func TestSleep(t *testing.T) {
	e := startEngine(t, Config{Model: "tiny", Ranks: 2})
	for _, step := range []struct {
		call   string
		states [3]int // awake, weights_offloaded, discard_all
		sleeps bool
	}{
		{"", [3]int{1, 0, 0}, false},
		{"/sleep", [3]int{0, 1, 0}, true},
		{"/wake_up", [3]int{1, 0, 0}, false},
		{"/sleep?level=2", [3]int{0, 0, 1}, true},
		{"/wake_up?tags=weights", [3]int{1, 0, 0}, true},
		{"/wake_up?tags=kv_cache", [3]int{1, 0, 0}, false},
		{"/sleep?level=0", [3]int{0, 0, 0}, true},
		{"/wake_up?tags=scheduling", [3]int{1, 0, 0}, false},
	} {
		if step.call != "" {
			if a := post(t, e.URL()+step.call, ""); a.status != http.StatusOK || len(a.body) != 0 {
				t.Fatalf("%s: %d %s", step.call, a.status, a.body)
			}
		}
		if got := string(get(t, e.URL()+"/is_sleeping").body); got != fmt.Sprintf(`{"is_sleeping":%t}`, step.sleeps) {
			t.Errorf("after %s: %s", step.call, got)
		}
		metrics := string(get(t, e.URL()+"/metrics").body)
		for i, state := range []string{"awake", "weights_offloaded", "discard_all"} {
			for rank := range 2 {
				line := fmt.Sprintf("vllm:engine_sleep_state{engine=\"%d\",model_name=\"tiny\",sleep_state=%q} %d", rank, state, step.states[i])
				if !strings.Contains(metrics, "\n"+line+"\n") {
					t.Errorf("after %s: no %s", step.call, line)
				}
			}
		}
	}
}

// TestSleepHoldsRequests: sleep ends a running stream with the finish reason "abort" and drops the
// cached blocks. A request that arrives during the sleep is answered after it.
func TestSleepHoldsRequests(t *testing.T) {
	e := startEngine(t, Config{DecodeUsPerToken: 1000})
	prompt := words(17, 20)
	first, _ := postAside(t, e.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":2000,"ignore_eos":true`))
	eventually(t, "a running request", func() bool { return e.State().RequestsRunning == 1 })
	post(t, e.URL()+"/sleep", "")
	if a := <-first; a.status != 200 || !strings.Contains(string(a.body), `"finish_reason":"abort"`) {
		t.Errorf("the running request: %d %s", a.status, a.body)
	}
	if s := e.State(); s.BlocksUsed != 0 || s.Aborted != 1 {
		t.Errorf("asleep: %+v", s)
	}
	second, _ := postAside(t, e.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":2`))
	eventually(t, "a waiting request", func() bool { return e.State().RequestsWaiting == 1 })
	post(t, e.URL()+"/wake_up?tags=weights", "")
	if s := e.State(); s.RequestsWaiting != 1 {
		t.Errorf("half awake: %+v", s)
	}
	post(t, e.URL()+"/wake_up", "")
	if a := <-second; a.status != 200 || e.State().CachedTokens != 0 {
		t.Errorf("the waiting request: %d %s; %+v", a.status, a.body, e.State())
	}
}
