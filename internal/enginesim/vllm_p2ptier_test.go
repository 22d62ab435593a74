package enginesim

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// tierLegs are the parameters of both legs of a transfer.
func tierLegs(p *Engine, id string) (prefill, decode string) {
	host, port, _ := net.SplitHostPort(p.SideAddress())
	return fmt.Sprintf(`"max_tokens":1,"kv_transfer_params":{"remote_decoder":{"kv_request_id":%q}}`, id),
		fmt.Sprintf(`"max_tokens":12,"kv_transfer_params":{"remote_prefiller":{"kv_request_id":%q,"remote_host":%q,"remote_port":%s}}`, id, host, port)
}

func startTier(t *testing.T, change func(*Config)) pair {
	t.Helper()
	return startPair(t, func(c *Config) {
		if c.Connector = ConnectorVLLMP2PTier; change != nil {
			change(c)
		}
	})
}

// Decode fetches the whole blocks of prefill, in either order of the legs, and
// computes the rest. Prefill then holds nothing.
func TestTierEqualsDirect(t *testing.T) {
	for n, decodeFirst := range []bool{false, true} {
		pd := startTier(t, nil)
		for _, length := range lengths {
			prompt, id := words(length, length), fmt.Sprint("tx-", n, length)
			first, second := tierLegs(pd.p, id)
			if !decodeFirst {
				post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, first))
				if held := pd.p.State().BlocksPinned; held != (length-1)/16 {
					t.Errorf("%d tokens: %d blocks are held", length, held)
				}
			}
			got := make(chan answer, 1)
			go func() { got <- post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, second)) }()
			if decodeFirst {
				post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, first))
			}
			if a, want := <-got, pd.direct(t, prompt).text(t); a.text(t) != want {
				t.Errorf("got %d tokens: %q, want %q", length, a.text(t), want)
			}
			eventually(t, "prefill holds nothing", func() bool { return pd.p.State().BlocksPinned == 0 })
		}
		if s := pd.d.State(); s.PromptTokens-s.CachedTokens > int64(16*len(lengths)) {
			t.Errorf("decode has computed more than the last block of each: %+v", s)
		}
	}
}

// Decode computes blocks that it does not get, if necessary after its timeout.
// Prefill drops blocks that no decode fetches.
func TestTierWithoutItsPeer(t *testing.T) {
	pd := startTier(t, func(c *Config) {
		c.P2PTier.LoadTimeout, c.P2PTier.UnboundTimeout = 50*time.Millisecond, 50*time.Millisecond
	})
	prompt := words(1, 100)
	want := pd.direct(t, prompt).text(t)
	_, never := tierLegs(pd.p, "tx-never")
	if got := post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, never)).text(t); got != want {
		t.Errorf("text = %q, want %q", got, want)
	}
	first, _ := tierLegs(pd.p, "tx-left")
	post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, first))
	if pd.p.State().BlocksPinned == 0 {
		t.Error("prefill keeps no blocks")
	}
	eventually(t, "it is given up", func() bool { return pd.p.State().BlocksPinned == 0 })
	pd.p.Kill()
	_, gone := tierLegs(pd.p, "tx-gone")
	other := words(2, 100)
	want = pd.direct(t, other).text(t)
	if got := post(t, pd.d.URL()+core.RouteCompletions, completion(other, gone)).text(t); got != want {
		t.Errorf("text = %q, want %q", got, want)
	}
}
