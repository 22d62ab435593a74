package conformance

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/conformance/enginesim"
)

// What a completion's prefill has sent to a decode engine that then has no use for
// it is dropped there by a request of the same id.
func TestP2PNCCLBufferIsCleared(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMP2PNCCL, fleetOptions{
		engine: func(_ string, _ int, c *enginesim.Config) { c.P2PNCCL.BufferTimeout = 10 * time.Minute },
	})
	f.leaveBetweenLegs("/v1/completions", `{"model":"sim","prompt":"`+long+`","max_tokens":5}`)
	f.eventually("it is counted", func() bool { return f.metric("pdproxy_kv_cleanups_total", `how="same_id"`) == 1 })
}

// A decode that fails has no other take its place: the KV went to it alone. The
// request begins anew.
func TestP2PNCCLDecodeIsBound(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMP2PNCCL, fleetOptions{})
	f.decode[0].Kill()
	for range 4 {
		body := chat(long, 8, true)
		f.right(f.try(chatPath, body), chatPath, body)
	}
	if s := f.decode[1].State(); s.Errors > 0 || s.Transfers < 4 {
		t.Errorf("decode: %+v", s)
	}
}
