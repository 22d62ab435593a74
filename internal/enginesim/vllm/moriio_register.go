package vllm

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// register sends the engine's registration to the proxy every few seconds, and
// reconnects when the connection ends.
func (m *MoRIIO) register(ctx context.Context) {
	addr := strings.TrimPrefix(m.e.Cfg.MoRIIO.Register, "tcp://")
	proxy := core.NewZMTPPeering(m.e) // separate, so that its failures do not delay transfers
	tick := time.NewTicker(m.e.Cfg.MoRIIO.PingInterval)
	defer tick.Stop()
	for n := 0; ; n++ {
		proxy.Send(ctx, addr, m.registration(n)) // a lost registration is repeated
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// registration is the n-th message to the proxy, in one of the two forms.
func (m *MoRIIO) registration(n int) []byte {
	kind, mode := "D", "WRITE"
	if m.producer {
		kind = "P"
	}
	if m.read {
		mode = "READ"
	}
	ranks, tp := len(m.e.Ranks), m.e.Cfg.MoRIIO.TPSize
	if m.e.Cfg.MoRIIO.OldRegistration {
		return PackMap("type", "register", "role", kind, "index", strconv.Itoa(n), "request_address", m.e.URL()+"/v1/completions",
			"handshake_port", m.Handshake, "notify_port", m.Notify, "dp_size", ranks, "tp_size", tp, "transfer_mode", mode)
	}
	return PackMap("type", kind, "http_address", m.e.Addr(), "zmq_address", m.address(),
		"dp_size", ranks, "tp_size", tp, "transfer_mode", mode)
}
