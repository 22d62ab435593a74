package connector

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// TestHandoffLease: prefill's blocks are held for the configured time, or for vLLM's
// default. Only a nixl decode renews this time.
func TestHandoffLease(t *testing.T) {
	const nixlAnswer = `{"choices":[{}],"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_engine_id":"e","remote_host":"10.0.0.5","remote_port":5600}}`
	const moriioAnswer = `{"choices":[{}],"kv_transfer_params":{"remote_block_ids":[[1,2]],"remote_engine_id":"10.0.0.5:6301","remote_host":"10.0.0.5"}}`
	for _, tt := range []struct {
		connector        string
		reads            Connector
		answer           string
		configured, want time.Duration
		renews           bool
	}{
		{config.ConnectorVLLMNixl, nixl{}, nixlAnswer, 0, 30 * time.Second, true},
		{config.ConnectorVLLMNixl, nixl{}, nixlAnswer, 7 * time.Second, 7 * time.Second, true},
		{config.ConnectorVLLMMoRIIORead, moriio{read: true}, moriioAnswer, 0, time.Minute, false},
		{config.ConnectorVLLMMoRIIORead, moriio{read: true}, moriioAnswer, 7 * time.Second, 7 * time.Second, false},
	} {
		a := pair(t, "/v1/completions", `{"prompt":"x"}`)
		spec := config.Engine{Connector: tt.connector, Ranks: 1, KVLeaseDuration: config.Duration(tt.configured)}
		a.Prefill = place(spec, "10.0.0.5", 0, engine.Facts{})
		h, err := tt.reads.ReadPrefill(a, []byte(tt.answer))
		if err != nil || !h.Pinned || h.Lease != tt.want || h.Renews != tt.renews {
			t.Errorf("%s, configured %v: got %+v, %v; want the lease %v", tt.connector, tt.configured, h, err, tt.want)
		}
	}
}

// TestCleanupOutlastsLease: the proxy repeats the call that frees prefill's blocks as long as
// prefill holds them. No decode engine may be ready before.
func TestCleanupOutlastsLease(t *testing.T) {
	const lease = 7 * time.Minute
	const nixlParams = `"remote_block_ids":[[1,2]],"remote_engine_id":"e","remote_host":"10.0.0.5","remote_port":5600`
	for name, tt := range map[string]struct {
		reads     Connector
		connector string
		params    string
	}{
		"nixl":                            {nixl{}, config.ConnectorVLLMNixl, nixlParams + `,"remote_request_id":"r"`},
		"nixl, prefill's id is not known": {nixl{}, config.ConnectorVLLMNixl, nixlParams},
		"moriio reads":                    {moriio{read: true}, config.ConnectorVLLMMoRIIORead, `"remote_block_ids":[[1,2]],"remote_engine_id":"10.0.0.5:6301","remote_host":"10.0.0.5"`},
	} {
		t.Run(name, func(t *testing.T) {
			a := pair(t, "/v1/completions", `{"prompt":"x"}`)
			a.Prefill = place(config.Engine{Connector: tt.connector, Ranks: 1, KVLeaseDuration: config.Duration(lease)}, "10.0.0.5", 0, engine.Facts{})
			h, err := tt.reads.ReadPrefill(a, []byte(`{"choices":[{}],"kv_transfer_params":{`+tt.params+`}}`))
			if err != nil {
				t.Fatal(err)
			}
			calls := tt.reads.Cleanup(a, Orphan{PrefillSent: true, PrefillDone: true, Handoff: &h})
			if len(calls) != 1 || calls[0].Hold != lease {
				t.Errorf("got %d calls %+v, want one for %v", len(calls), calls, lease)
			}
		})
	}
}
