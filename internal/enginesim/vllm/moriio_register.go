package enginesim

import (
	"context"
	"strconv"
	"strings"
	"time"
)

// register sends the engine's registration to the proxy every few seconds, and
// reconnects when the connection ends.
func (m *moriio) register(ctx context.Context) {
	addr := strings.TrimPrefix(m.e.cfg.MoRIIO.Register, "tcp://")
	proxy := newZMTPPeering(m.e) // separate, so that its failures do not delay transfers
	tick := time.NewTicker(m.e.cfg.MoRIIO.PingInterval)
	defer tick.Stop()
	for n := 0; ; n++ {
		proxy.send(ctx, addr, m.registration(n)) // a lost registration is repeated
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// registration is the n-th message to the proxy, in one of the two forms.
func (m *moriio) registration(n int) []byte {
	kind, mode := "D", "WRITE"
	if m.producer {
		kind = "P"
	}
	if m.read {
		mode = "READ"
	}
	ranks, tp := len(m.e.ranks), m.e.cfg.MoRIIO.TPSize
	if m.e.cfg.MoRIIO.OldRegistration {
		return packMap("type", "register", "role", kind, "index", strconv.Itoa(n), "request_address", m.e.URL()+"/v1/completions",
			"handshake_port", m.handshake, "notify_port", m.notify, "dp_size", ranks, "tp_size", tp, "transfer_mode", mode)
	}
	return packMap("type", kind, "http_address", m.e.Addr(), "zmq_address", m.address(),
		"dp_size", ranks, "tp_size", tp, "transfer_mode", mode)
}
