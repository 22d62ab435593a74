package connector

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestHandoffLease: prefill's blocks are held for the configured time, or for vLLM's
// default.
func TestHandoffLease(t *testing.T) {
	const answer = `{"choices":[{}],"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_engine_id":"e","remote_host":"10.0.0.5","remote_port":5600}}`
	for configured, want := range map[time.Duration]time.Duration{0: 30 * time.Second, 7 * time.Second: 7 * time.Second} {
		a := pair(t, "/v1/completions", `{"prompt":"x"}`)
		a.Prefill = place(config.Engine{Ranks: 1, KVLeaseDuration: config.Duration(configured)}, "10.0.0.5", 0, engine.Facts{})
		if h, err := (nixl{}).ReadPrefill(a, []byte(answer)); err != nil || !h.Pinned || h.Lease != want {
			t.Errorf("configured %v: pinned %v, lease %v, %v; want %v", configured, h.Pinned, h.Lease, err, want)
		}
	}
}
