package enginesim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// wireMembers are the members of a prefill's answer by generation, as in the
// releases, without those that stand for later releases.
var wireMembers = map[int]string{
	NixlWireFlat:      "do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_host remote_port tp_size",
	NixlWireRequestID: "do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host remote_port tp_size",
	NixlWireGroups:    "do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host remote_port tp_size",
	NixlWireLease: "do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host remote_port tp_size " +
		"remote_num_tokens remote_blocks_expiry_time",
	NixlWireMode: "do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host remote_port tp_size " +
		"remote_num_tokens remote_blocks_expiry_time transfer_mode",
	NixlWireSizes: "do_remote_prefill do_remote_decode remote_block_ids remote_engine_id remote_request_id remote_host remote_port tp_size " +
		"dcp_size pp_size remote_num_tokens remote_blocks_expiry_time transfer_mode",
}

// TestPullWires: the parameters of each generation are those of its releases,
// and transfer the prompt's KV. If the parameters contain no request id, both
// legs must have the same id.
func TestPullWires(t *testing.T) {
	for wire := NixlWireFlat; wire <= NixlWireSizes; wire++ {
		t.Run(fmt.Sprint(wire), func(t *testing.T) {
			pd := startPair(t, func(c *Config) { c.Nixl.Wire = wire })
			prompt, body := words(wire, 40), `"max_tokens":12,"kv_transfer_params":`
			p := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefillParams), "X-Request-Id", "both")
			params := p.params(t)
			var members map[string]json.RawMessage
			if err := json.Unmarshal([]byte(params), &members); err != nil {
				t.Fatal(err)
			}
			want := strings.Fields(wireMembers[wire])
			for name := range members {
				if !slices.Contains(want, name) && !strings.HasPrefix(name, "remote_agent_") && name != "remote_prefill_cached_tokens" && name != "remote_regions" {
					t.Errorf("member %s is of another generation", name)
				}
			}
			for _, name := range want {
				if _, ok := members[name]; !ok {
					t.Errorf("member %s is missing", name)
				}
			}
			if flat := strings.HasPrefix(string(members["remote_block_ids"]), "[["); flat != (wire >= NixlWireGroups) {
				t.Errorf("blocks %s", members["remote_block_ids"])
			}
			got := post(t, pd.d.URL()+core.RouteCompletions, completion(prompt, body+params), "X-Request-Id", "both")
			if want := pd.direct(t, prompt); got.text(t) != want.text(t) {
				t.Errorf("got text %q, want %q as without the proxy", got.text(t), want.text(t))
			}
			eventually(t, "prefill is told", func() bool { return pd.p.State().BlocksUsed == 0 })
		})
	}
	pd := startPair(t, func(c *Config) { c.Nixl.Wire, c.Lease = NixlWireFlat, 300*time.Millisecond })
	params := pd.prefill(t, "other ids")
	post(t, pd.d.URL()+core.RouteCompletions, completion("other ids", `"max_tokens":2,"kv_transfer_params":`+params), "X-Request-Id", "another")
	eventually(t, "the lease ends", func() bool { return pd.p.State().LeasesExpired == 1 })
}

// A first token that ends the text keeps blocks only since NixlWireLease.
func TestWireOfStops(t *testing.T) {
	for wire, kept := range map[int]bool{NixlWireGroups: false, NixlWireLease: true} {
		pd := startPair(t, func(c *Config) { c.Nixl.Wire = wire })
		a := post(t, pd.p.URL()+core.RouteCompletions, completion("<eos1> now", `"max_tokens":1,`+prefillParams))
		if got := a.params(t) != "null"; got != kept || (pd.p.State().BlocksPinned > 0) != kept {
			t.Errorf("generation %d: params %s, %+v", wire, a.params(t), pd.p.State())
		}
	}
}

// TestTPSizes: prefill and decode may have different widths. Decode must know
// prefill's. Prefill keeps its blocks until all ranks that read from one of its
// ranks have read.
func TestTPSizes(t *testing.T) {
	for _, sizes := range [][2]int{{1, 4}, {2, 4}, {4, 4}, {4, 1}, {2, 1}} {
		t.Run(fmt.Sprint(sizes), func(t *testing.T) {
			pd := startPair(t, func(c *Config) {
				c.Nixl.TPSize = sizes[0]
				if c.Role == RoleDecode {
					c.Nixl.TPSize = sizes[1]
				}
			})
			prompt := words(5, 60)
			params := pd.prefill(t, prompt)
			if sizes[0] > 1 {
				if a := pd.decode(t, prompt, strings.Replace(params, `"tp_size"`, `"tp"`, 1)); a.status != http.StatusInternalServerError {
					t.Errorf("without tp_size: status %d", a.status)
				}
			}
			got := pd.decode(t, prompt, params)
			if want := pd.direct(t, prompt); got.text(t) != want.text(t) {
				t.Errorf("got text %q, want %q as without the proxy", got.text(t), want.text(t))
			}
			eventually(t, "prefill is told", func() bool { return pd.p.State().BlocksUsed == 0 })
		})
	}
}

// TestRecompute: an engine that computes the KV that it could not load gives the right answer.
// Prefill is not informed, and its lease expires.
func TestRecompute(t *testing.T) {
	for _, connector := range []string{ConnectorVLLMNixl, ConnectorVLLMNixlPush} {
		t.Run(connector, func(t *testing.T) {
			cfg := func(role string) Config {
				return Config{Connector: connector, Role: role, Lease: 300 * time.Millisecond, Nixl: NixlConfig{Recompute: true}}
			}
			p, d := startEngine(t, cfg(RolePrefill)), startEngine(t, cfg(RoleDecode))
			prompt := words(7, 60)
			a := post(t, p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefillParams), "X-Request-Id", "x")
			params := a.params(t)
			if err := d.SetFault("1:load", 0, ""); err != nil {
				t.Fatal(err)
			}
			got := post(t, d.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12,"kv_transfer_params":`+params), "X-Request-Id", "x")
			if want := post(t, p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":12`)); got.text(t) != want.text(t) {
				t.Errorf("got text %q, want %q as without the proxy", got.text(t), want.text(t))
			}
			if s := d.State(); s.CachedTokens != 0 || s.Transfers != 0 {
				t.Errorf("decode: %+v", s)
			}
			eventually(t, "the lease ends", func() bool { return p.State().LeasesExpired == 1 })
		})
	}
}
