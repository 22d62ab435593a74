package conformance

import (
	"fmt"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// Decode fetches all whole blocks of the prompt from the prefill that has
// computed it, and prefill holds nothing afterwards.
func TestP2PTierMovesThePrompt(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMP2PTier, fleetOptions{engine: func(role string, _ int, c *enginesim.Config) {
		if role != enginesim.RoleBoth {
			c.Ranks = 2
		}
	}})
	for n := range 8 {
		body := chat(fmt.Sprintf("%d %s", n, long), 9, n%2 == 0)
		f.right(f.try(chatPath, body), chatPath, body)
	}
	var prompt, cached int64
	for _, d := range f.decode {
		s := d.State()
		prompt, cached = prompt+s.PromptTokens, cached+s.CachedTokens
	}
	if computed := prompt - cached; prompt == 0 || computed > 8*16 {
		t.Errorf("decode computed %d of %d tokens of the prompts, want no more than a block of each", computed, prompt)
	}
	if n := f.metric("pdproxy_fallbacks_total") + f.metric("pdproxy_kv_cleanups_total"); n != 0 {
		t.Errorf("got %v counted fallbacks and clean-ups", n)
	}
}

// A failed transfer is not visible: decode computes the prompt.
func TestP2PTierFails(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMP2PTier, fleetOptions{})
	for _, d := range f.decode {
		d.SetFault("1:load", 0, "")
	}
	for n := range 2 {
		body := chat(fmt.Sprintf("%d %s", n, long), 9, n == 0)
		f.right(f.try(chatPath, body), chatPath, body)
	}
	if n := f.metric("pdproxy_retries_total"); n != 0 {
		t.Errorf("got %v retries", n)
	}
}
