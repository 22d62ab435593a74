package node

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/epp"
)

// pickerListener serves epp.listen. nil: epp.listen is empty, or the process is a coordinator.
type pickerListener struct {
	listener net.Listener
	server   *epp.Server
	serving  context.Context // ends when a successor serves epp.listen
	stop     context.CancelFunc
}

// listenEPP opens epp.listen if it is configured and given is nil.
func (n *Node) listenEPP(cfg *config.Config, certs *edge.Certs, given net.Listener) error {
	if cfg.EPP.Listen == "" || n.options.Role == RoleCoordinator {
		return nil
	}
	if given == nil {
		l, err := net.Listen("tcp", cfg.EPP.Listen)
		if err != nil {
			return exit.Failed(fmt.Errorf("epp.listen: %w", err))
		}
		given = l
	}
	n.picker = &pickerListener{listener: given, server: n.server.EPP(certs)}
	n.picker.serving, n.picker.stop = context.WithCancel(context.Background())
	return nil
}

// run serves until ctx ends, or until a successor does. It returns when no stream is open.
// drain and takeover bound the time of open streams.
func (p *pickerListener) run(ctx context.Context, drain, takeover func() time.Duration) error {
	if p == nil {
		return nil
	}
	defer p.stop()
	serving, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.serving, cancel)()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(drain(), p.server.Cut) })() // also after a successor has come
	err := p.server.Serve(serving, p.listener, func() time.Duration {
		if ctx.Err() == nil {
			return takeover()
		}
		return drain()
	})
	if err != nil {
		return fmt.Errorf("serve epp.listen: %w", err)
	}
	return nil
}

// lingering returns a context for the sockets of the node, which ends after ctx. With a picker, it
// ends when gateways have moved to another one, because they may not know yet that this one ends.
// Until then the node reports that it is not ready, and serves as before. left is the rest of
// server.drain_timeout, which begins with the end of ctx.
func (n *Node) lingering(ctx context.Context) (sockets context.Context, left func() time.Duration) {
	if n.picker == nil {
		return ctx, n.DrainTimeout
	}
	var over time.Time // written before the end of sockets
	sockets, end := context.WithCancel(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() { // ends sockets, for which serveFront waits
		limit := n.DrainTimeout()
		over = time.Now().Add(limit)
		n.server.Drain()
		n.picker.server.Linger(n.picker.serving, time.Duration(n.cfg.Load().EPP.DrainQuiet), limit)
		end()
	})
	return sockets, func() time.Duration {
		if sockets.Err() == nil { // a socket has failed
			return n.DrainTimeout()
		}
		return max(0, time.Until(over))
	}
}

// retire leaves the listener to a successor. Open streams continue.
func (p *pickerListener) retire() {
	if p != nil {
		p.server.Retire()
		p.stop()
	}
}

// opened returns the listener, nil without one.
func (p *pickerListener) opened() net.Listener {
	if p == nil {
		return nil
	}
	return p.listener
}

// EPPAddr returns the address of epp.listen, nil without one.
func (n *Node) EPPAddr() net.Addr {
	if n.picker == nil {
		return nil
	}
	return n.picker.listener.Addr()
}
