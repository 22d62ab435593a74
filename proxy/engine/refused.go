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

// IsRefused reports whether err, the error of a dial, means that no process listens at
// the address. A busy engine does not refuse: its kernel queues the connection.
func IsRefused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// setEnded sets whether the process of i has ended. The calls that need an instance which was
// unhealthy before it ended are withdrawn now.
func (r *Registry) setEnded(i *Instance, ended bool) {
	if i.ended.Swap(ended) == ended {
		return
	}
	signal(r.changed)
	if ended && i.probed() == Unhealthy {
		signal(i.evictNow)
	}
}

// Refused notes that a leg's connection was refused: no process listens there. The
// circuit opens at once, and the registry probes the instance soon. If the probe is
// refused too, the instance becomes unhealthy. If the engine answers the probe, the
// circuit closes again. A mirror opens its own circuit and reports a failure to the
// coordinator, whose registry then probes.
func (i *Instance) Refused() {
	i.refused.Store(true)
	i.ended.Store(true)
	i.Breaker.Trip()
	i.ProbeSoon()
}

// connAccepted closes the circuit that Refused has opened, because the instance has
// answered a probe. A probe of a bootstrap server does not count, because the bootstrap
// server has another port.
func (p *prober) connAccepted() {
	if _, bootstrap := p.i.protocol.HealthPath(p.i.Role); bootstrap && p.i.Spec.HealthPath == "" {
		return
	}
	if p.i.refused.Swap(false) {
		p.i.Breaker.Success()
	}
}

// watchProbes makes the registry probe i as soon as the engine closes the connection of
// its probes. A process's connections end with the process, so a dead engine is known
// before a request reaches it. Transports other than net/http's are not changed.
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

// Read implements net.Conn. The close of a connection counts only if it was open from
// one probe to the next: some servers close each connection after their answer. Another
// process may listen by now, so the next probe also reads the facts.
func (c *probeConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if (err == io.EOF || errors.Is(err, syscall.ECONNRESET)) && time.Since(c.since) > time.Duration(c.r.health.Load().Interval) {
		c.i.relearn.Store(true)
		c.i.ProbeSoon()
	}
	return n, err
}
