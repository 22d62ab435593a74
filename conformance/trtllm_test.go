package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// trtllmStyles are the two orders of TensorRT-LLM's legs.
var trtllmStyles = []string{enginesim.ConnectorTRTLLM, trtllmFirst}

// TestTRTLLMSigned: engines with a key accept requests signed with it, in
// either order of the legs. They reject requests without a signature, and nothing of
// a rejected request remains.
func TestTRTLLMSigned(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("a-key\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	locked := func(_ string, _ int, c *enginesim.Config) { c.TRTLLM.AuthKey = "a-key" }
	for _, style := range trtllmStyles {
		t.Run(style, func(t *testing.T) {
			f := startFleet(t, style, fleetOptions{engine: locked, config: func(c *config.Config) {
				c.TRTLLM.AuthKeyFile = key
			}})
			history := `{"model":"sim","messages":[{"role":"system","content":"be kind"},{"role":"user","content":"one"},{"role":"assistant","content":"two"},{"role":"user","content":"three"}],"max_tokens":9}`
			for _, body := range []string{chat(long, 8, true), chat(long, 8, false), history} {
				f.right(f.try(chatPath, body), chatPath, body)
			}
			body := prompt(3, 100)
			f.right(f.try(completionsPath, body), completionsPath, body)
			f.settled()
		})
		t.Run(style+" without the key", func(t *testing.T) {
			f := startFleet(t, style, fleetOptions{prefill: 1, decode: 1, engine: locked})
			a := f.try(chatPath, chat(long, 8, false))
			if a.status != 400 || !strings.Contains(a.body, "authentication") {
				t.Errorf("got status %d: %s", a.status, a.body)
			}
			f.settled()
		})
	}
}

// TestTRTLLMConditional: a prompt that is mostly cached on decode's engine is
// answered there by one leg, without params. Other prompts use both legs.
func TestTRTLLMConditional(t *testing.T) {
	both := startEngine(t, enginesim.Config{Connector: enginesim.ConnectorTRTLLM, Lease: time.Minute})
	f := startFleet(t, enginesim.ConnectorTRTLLM, fleetOptions{prefill: 1, config: func(c *config.Config) {
		spec := engineSpec("d0", "both", enginesim.ConnectorTRTLLM, both)
		spec.KVEvents = "poll"
		c.Engines = append(c.Engines, spec)
		c.Policy.Plan, c.Policy.Place = "pd_auto", "kv_aware"
		c.Policy.Params = map[string]map[string]float64{"pd_auto": {"local_tokens": 64}}
	}})
	f.decode = append(f.decode, both)
	for n, tt := range []struct {
		name          string
		first, tokens int
		flow          string
	}{
		{"cold", 0, 320, "prefill_first"},
		{"cached", 0, 320, "aggregated"},
		{"cached, and a little more", 0, 320 + 48, "aggregated"},
		{"cached, and too much more", 0, 320 + 48 + 96, "prefill_first"},
		{"short and cold", 777, 20, "prefill_first"},
	} {
		if e := f.explained(fmt.Sprint("r", n), prompt(tt.first, tt.tokens)); e.Flow != tt.flow {
			t.Errorf("%s: f.explained = %s, want %s", tt.name, e.Flow, tt.flow)
		}
		f.eventually("decode's engine is known to hold the prompt", func() bool {
			return f.byEvents() >= float64(tt.tokens/16)
		})
	}
}
