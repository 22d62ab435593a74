package enginesim

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// zmtpPeering holds the DEALER connections on which an engine sends
// notifications to its peers: one for each address, kept open.
type zmtpPeering struct {
	e     *Engine
	sends sync.Mutex // one message at a time, so that they keep their order

	mu    sync.Mutex
	conns map[string]*zmtpConn // by address; guarded by mu
}

func newZMTPPeering(e *Engine) *zmtpPeering {
	return &zmtpPeering{e: e, conns: make(map[string]*zmtpConn)}
}

// send sends messages to an address, all of them on one connection. A lost
// message is logged.
func (p *zmtpPeering) send(ctx context.Context, addr string, messages ...[]byte) {
	p.sends.Lock()
	defer p.sends.Unlock()
	ctx, cancel := context.WithTimeout(ctx, p.e.cfg.HandshakeTimeout)
	defer cancel()
	for range 2 {
		c, err := p.conn(ctx, addr)
		for i := 0; i < len(messages) && err == nil; i++ {
			err = c.send(messages[i])
		}
		if err == nil {
			return
		}
	}
	p.e.cfg.Log.Warn("notification failed", "address", addr)
}

// conn returns the connection to an address. Received messages are ignored.
func (p *zmtpPeering) conn(ctx context.Context, addr string) (*zmtpConn, error) {
	p.mu.Lock()
	c := p.conns[addr]
	p.mu.Unlock()
	if c != nil {
		return c, nil
	}
	c, err := p.e.dialPeer(ctx, addr)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.conns[addr] = c
	p.mu.Unlock()
	p.e.spawn(func(context.Context) { // only a read notices the end of the connection
		for {
			if _, err := c.receive(); err != nil {
				break
			}
		}
		p.mu.Lock()
		if p.conns[addr] == c {
			delete(p.conns, addr)
		}
		p.mu.Unlock()
		p.e.hangUp(c)
	})
	return c, nil
}

// dialPeer connects to a ZMTP socket as a DEALER.
func (e *Engine) dialPeer(ctx context.Context, addr string) (*zmtpConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	e.peers.conns.state(conn, http.StateNew)
	if e.hasEnded() {
		err = errEnded
	}
	var c *zmtpConn
	if err == nil {
		c, err = greetPeer(conn, "DEALER")
	}
	if err != nil {
		e.peers.conns.state(conn, http.StateClosed)
		conn.Close()
		return nil, err
	}
	return c, nil
}

// hangUp ends a connection of dialPeer.
func (e *Engine) hangUp(c *zmtpConn) {
	c.Close()
	e.peers.conns.state(c.Conn, http.StateClosed)
}
