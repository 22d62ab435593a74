package engine

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"syscall"
	"time"
)

// IsRefused reports whether err, of a dial, says that no process listens at the
// address. A busy engine does not refuse: its kernel lets the dial wait.
func IsRefused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// Refused notes that a leg was refused a connection: no process listens there. The
// circuit opens at once, and the registry probes the instance soon. If the probe is
// refused too, the instance becomes unhealthy. If the engine answers the probe, the
// circuit closes again. A mirror opens its own circuit and reports a failure to the
// coordinator, whose registry then probes.
func (i *Instance) Refused() {
	i.refused.Store(true)
	i.Breaker.Trip()
	i.ProbeSoon()
}

// listens closes the circuit that Refused has opened: the instance has answered a
// probe. A probe of a bootstrap server says nothing of the instance's own port.
func (p *prober) listens() {
	if _, bootstrap := p.i.protocol.HealthPath(p.i.Role); bootstrap && p.i.Spec.HealthPath == "" {
		return
	}
	if p.i.refused.Swap(false) {
		p.i.Breaker.Success()
	}
}

// watchProbes has i probed as soon as the engine closes the connection of its probes.
// The connections of an engine's process end with the process, so a dead engine is
// known before a request meets it, and no request pays for that. Other transports
// than net/http's are left as they are.
func (r *Registry) watchProbes(i *Instance) {
	t, ok := i.asks.Transport.(*http.Transport)
	if !ok {
		return
	}
	dial := t.DialContext
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &probeConn{Conn: c, r: r, i: i, since: time.Now()}, nil
	}
}

// probeConn is a connection of i's probes.
type probeConn struct {
	net.Conn
	r     *Registry
	i     *Instance
	since time.Time
}

// Read implements net.Conn. That the engine has closed the connection says something
// only of one that has lived from one probe to the next: some servers close each
// connection after their answer. Another process may listen by then, so the next
// probe asks for the facts too.
func (c *probeConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if (err == io.EOF || errors.Is(err, syscall.ECONNRESET)) && time.Since(c.since) > time.Duration(c.r.health.Load().Interval) {
		c.i.relearn.Store(true)
		c.i.ProbeSoon()
	}
	return n, err
}
