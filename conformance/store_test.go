package conformance

import (
	"fmt"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// Engines share a KV cache. Decode computes only the part of the prompt that is
// not a whole block. It finds the rest by the tokens alone. A turn finds the
// blocks of the previous turn, whichever engines computed them.
func TestStoreMovesThePrompt(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMStore, fleetOptions{})
	var turn string
	for n := range 4 {
		turn += fmt.Sprintf("turn %d: %s", n, long)
		body := chat(turn, 9, n%2 == 0)
		f.right(f.try(chatPath, body), chatPath, body)
	}
	var prompt, cached int64
	for _, d := range f.decode {
		s := d.State()
		prompt, cached = prompt+s.PromptTokens, cached+s.CachedTokens
	}
	if computed := prompt - cached; prompt == 0 || computed > 4*16 {
		t.Errorf("decode computed %d of %d tokens of the prompts, want no more than a block of each", computed, prompt)
	}
	if n := f.metric("pdproxy_fallbacks_total") + f.metric("pdproxy_kv_cleanups_total"); n != 0 {
		t.Errorf("got %v counted fallbacks and clean-ups", n)
	}
}

// decode's kv_load_failure_policy determines the effect of a failed store: with
// "recompute" it is not visible.
func TestStoreFails(t *testing.T) {
	for _, recompute := range []bool{false, true} {
		t.Run(fmt.Sprint("recompute ", recompute), func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorVLLMStore, fleetOptions{prefill: 1, decode: 1,
				engine: func(_ string, _ int, c *enginesim.Config) { c.Nixl.Recompute = recompute },
				config: func(c *config.Config) { c.Retry.Attempts = 1 },
			})
			f.decode[0].SetFault("1:load", 0, "")
			body := chat(long, 9, true)
			a := f.try(chatPath, body)
			if recompute {
				f.right(a, chatPath, body)
			} else if a.status != 502 {
				t.Errorf("got status %d: %s", a.status, a.body)
			}
		})
	}
}
