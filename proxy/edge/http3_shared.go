package edge

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/pdproxy/pdproxy/proxy/edge/quicshare"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

const (
	// handshakesLeast is the shortest wait of a draining member for running handshakes.
	// A first packet may still be in a queue of quic-go.
	handshakesLeast = 100 * time.Millisecond
	// handshakesMost is the longest wait. By then a client has sent the second packet of
	// its first flight three times.
	handshakesMost = 3 * time.Second
)

// sharedPort is this process's membership in a UDP port that several processes share. It
// drains in an order in which no request fails:
//
//  1. New clients go to other members that serve.
//  2. Running handshakes end, and this process accepts their connections.
//  3. All connections serve their running requests. Unless a successor serves, later requests
//     are refused as not processed (H3_REQUEST_REJECTED), so that clients send them on a new
//     connection, to another member.
//  4. A connection ends settleTime after its last request, or when its client closes it.
type sharedPort struct {
	conn      *quicshare.Conn
	transport *quic.Transport
	draining  atomic.Bool
	receiving sync.WaitGroup // conn.Run
	accepted  chan struct{}  // closed when no more connections are accepted
}

// openShared opens addr together with the other members of dir. As soon as its transport
// listens, it forwards the packets of other members, until close. It answers new clients
// only after conn.Serve.
func openShared(dir *privatedir.Dir, addr string) (*sharedPort, error) {
	p := &sharedPort{accepted: make(chan struct{})}
	var err error
	if p.conn, err = quicshare.Listen(dir, addr); err != nil {
		return nil, err
	}
	if p.transport, err = p.conn.Transport(); err != nil {
		p.conn.Close()
		return nil, err
	}
	p.receiving.Go(p.conn.Run)
	return p, nil
}

// stopAccepting takes the first two steps of a drain, within ctx. Call it after serve. A second call
// does nothing.
func (p *sharedPort) stopAccepting(ctx context.Context, l *quic.Listener, conns *http3Conns) error {
	if p.draining.Swap(true) {
		return nil
	}
	err := p.conn.Drain() // after an error other members are not informed, and new clients still arrive
	waitHandshakes(ctx, &conns.handshaking)
	_ = l.Close() // never fails
	<-p.accepted
	return err
}

// waitHandshakes waits until no handshake runs whose connection would be lost.
func waitHandshakes(ctx context.Context, handshaking *atomic.Int64) {
	ctx, cancel := context.WithTimeout(ctx, handshakesMost)
	defer cancel()
	tick := time.NewTicker(handshakesLeast)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if handshaking.Load() == 0 {
				return
			}
		}
	}
}

// close leaves the port. The transport must be closed before.
func (p *sharedPort) close() {
	p.conn.Close()
	p.receiving.Wait()
}
