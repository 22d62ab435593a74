package core

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// ZMTPPeering holds the DEALER connections on which an engine sends
// notifications to its peers: one for each address, kept open.
type ZMTPPeering struct {
	e     *Engine
	sends sync.Mutex // one message at a time, so that they keep their order

	mu    sync.Mutex
	conns map[string]*ZMTPConn // by address; guarded by mu
}

func NewZMTPPeering(e *Engine) *ZMTPPeering {
	return &ZMTPPeering{e: e, conns: make(map[string]*ZMTPConn)}
}

// Send sends messages to an address, all of them on one connection. A lost
// message is logged.
func (p *ZMTPPeering) Send(ctx context.Context, addr string, messages ...[]byte) {
	p.sends.Lock()
	defer p.sends.Unlock()
	ctx, cancel := context.WithTimeout(ctx, p.e.Cfg.HandshakeTimeout)
	defer cancel()
	for range 2 {
		c, err := p.conn(ctx, addr)
		for i := 0; i < len(messages) && err == nil; i++ {
			err = c.Send(messages[i])
		}
		if err == nil {
			return
		}
	}
	p.e.Cfg.Log.Warn("notification failed", "address", addr)
}

// conn returns the connection to an address. Received messages are ignored.
func (p *ZMTPPeering) conn(ctx context.Context, addr string) (*ZMTPConn, error) {
	p.mu.Lock()
	c := p.conns[addr]
	p.mu.Unlock()
	if c != nil {
		return c, nil
	}
	c, err := p.e.DialPeer(ctx, addr)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.conns[addr] = c
	p.mu.Unlock()
	p.e.Spawn(func(context.Context) { // only a read notices the end of the connection
		for {
			if _, err := c.Receive(); err != nil {
				break
			}
		}
		p.mu.Lock()
		if p.conns[addr] == c {
			delete(p.conns, addr)
		}
		p.mu.Unlock()
		p.e.HangUp(c)
	})
	return c, nil
}

// DialPeer connects to a ZMTP socket as a DEALER.
func (e *Engine) DialPeer(ctx context.Context, addr string) (*ZMTPConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	e.Peers.conns.State(conn, http.StateNew)
	if e.HasEnded() {
		err = ErrEnded
	}
	var c *ZMTPConn
	if err == nil {
		c, err = GreetPeer(conn, "DEALER")
	}
	if err != nil {
		e.Peers.conns.State(conn, http.StateClosed)
		conn.Close()
		return nil, err
	}
	return c, nil
}

// HangUp ends a connection of DialPeer.
func (e *Engine) HangUp(c *ZMTPConn) {
	c.Close()
	e.Peers.conns.State(c.Conn, http.StateClosed)
}
