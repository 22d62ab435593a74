package conformance

import (
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// A completion's prefill has sent KV to a decode engine that no longer needs
// it. A request of the same id removes the KV there.
func TestP2PNCCLBufferIsCleared(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMP2PNCCL, fleetOptions{
		engine: func(_ string, _ int, c *enginesim.Config) { c.P2PNCCL.BufferTimeout = 10 * time.Minute },
	})
	f.leaveBetweenLegs("/v1/completions", `{"model":"sim","prompt":"`+long+`","max_tokens":5}`)
	f.eventually("it is counted", func() bool { return f.metric("pdproxy_kv_cleanups_total", `how="same_id"`) == 1 })
}

// When its decode fails, no other decode can continue, because only that decode
// has the KV. The request begins anew.
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
