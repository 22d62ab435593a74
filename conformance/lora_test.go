package conformance

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// loraFleet starts a fleet of one prefill and three decode engines with three adapters. A decode
// engine runs one adapter at a time.
func loraFleet(t *testing.T, place string, hide bool) *fleet {
	return startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{
		prefill: 1, decode: 3, workers: 1,
		engine: func(role string, _ int, c *enginesim.Config) {
			c.LoRA = enginesim.LoRAConfig{Modules: []string{"sql", "chat", "law"}, MaxLoRAs: 1, HideInfo: hide}
			c.DecodeUsPerToken = 30_000 // so that the streams of hold last longer than the test
			if role == enginesim.RolePrefill {
				c.LoRA.MaxLoRAs = 3
			}
		},
		config: func(c *config.Config) {
			c.Policy.Place, c.Health.LoadInterval = place, config.Duration(50*time.Millisecond)
		},
	})
}

// loraRequests numbers the short requests.
var loraRequests atomic.Int64

// ofAdapter returns a completion for an adapter.
func ofAdapter(adapter string, first int) string {
	return strings.Replace(prompt(first, 40), `"sim"`, fmt.Sprintf("%q", adapter), 1)
}

// hold begins a stream of an adapter that lasts until end is called, and returns its decode engine.
func (f *fleet) hold(adapter string, tokens int) (engine string, end func()) {
	f.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f.t.Cleanup(cancel)
	body := strings.Replace(ofAdapter(adapter, tokens), `"max_tokens":4`, fmt.Sprintf(`"max_tokens":%d,"stream":true`, tokens), 1)
	r := f.openAt(ctx, completionsPath, body)
	return r.Header.Get("X-Pdproxy-Decode"), func() { cancel(); r.Body.Close() }
}

// adapterAt sends a short request for an adapter. It returns its decode engine, and the state of
// the adapter at each decode engine.
func (f *fleet) adapterAt(adapter string) (engine string, states map[string]any) {
	f.t.Helper()
	n := int(loraRequests.Add(1))
	e := f.explained(fmt.Sprintf("lora-%d", n), ofAdapter(adapter, n))
	states = map[string]any{}
	for _, c := range e.Candidates {
		if c.Facts["role"] == "decode" {
			states[c.Engine] = c.Facts["adapter"]
		}
	}
	for _, l := range e.Legs {
		if l.Phase == "decode" {
			engine = l.Engine
		}
	}
	return engine, states
}

// TestLoRAAffinity: the requests of an adapter go where the adapter runs, and not where another
// adapter takes the only place. If the load there is too high, they go to an engine with a free
// place. All answers are right.
func TestLoRAAffinity(t *testing.T) {
	for _, place := range []string{"kv_aware", "pair_aware", "least_load"} {
		t.Run(place, func(t *testing.T) {
			f := loraFleet(t, place, false)
			sql, endSQL := f.hold("sql", 3500)
			defer endSQL()
			f.known("sql", sql, "running")
			for range 8 {
				if at, states := f.adapterAt("sql"); at != sql {
					t.Errorf("sql runs on %s, and a request went to %s: %v", sql, at, states)
				}
			}
			f.known("chat", sql, "full")
			chat, endChat := f.hold("chat", 3500)
			defer endChat()
			f.known("chat", chat, "running")
			if chat == sql {
				t.Errorf("chat went to %s, where sql takes the only place", chat)
			}
			for range 4 {
				if at, states := f.adapterAt("law"); at == sql || at == chat {
					t.Errorf("law went to %s, which has no place for it: %v", at, states)
				}
			}
			_, endMore := f.hold("sql", 40_000) // 0.16 s of other requests' time
			defer endMore()
			f.eventually("sql spreads", func() bool { at, _ := f.adapterAt("sql"); return at != sql && at != chat })
		})
	}
}

// known waits until the proxy knows the state of an adapter at a decode engine.
func (f *fleet) known(adapter, engine, state string) {
	f.t.Helper()
	f.eventually(fmt.Sprintf("%s is %s on %s", adapter, state, engine), func() bool {
		_, states := f.adapterAt(adapter)
		return states[engine] == state
	})
}

// TestLoRAHidden: engines that do not report their adapters get requests as other engines do.
func TestLoRAHidden(t *testing.T) {
	f := loraFleet(t, "kv_aware", true)
	for _, adapter := range []string{"sql", "chat", "sql", "law", "sim"} {
		if _, states := f.adapterAt(adapter); len(states) != 3 || fmt.Sprint(states) != "map[d0:<nil> d1:<nil> d2:<nil>]" {
			t.Errorf("%s: states %v", adapter, states)
		}
	}
	if a := f.post(context.Background(), f.url, completionsPath, ofAdapter("none", 1)); a.status != http.StatusNotFound {
		t.Errorf("an unknown adapter got status %d", a.status)
	}
}
