package edge

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/edge/http1"
)

// errSuccessor ends a server that has served its remaining connections.
var errSuccessor = errors.New("a successor serves")

// StopAccepting leaves the sockets to a successor that also has them. When it returns,
// this server accepts no new connection. It serves its open connections until their
// clients close them or Limits.Remaining has passed. The server asks clients to open a new
// connection: over HTTP/2 by GOAWAY at once, over HTTP/1.1 by Connection: close with the next
// answer, over a WebSocket by a close frame when no response runs. An HTTP/3 connection serves
// requests as before, until none has run for settleTime. Then the server closes it.
//
// Over TCP the server does not close an idle connection at once, because its client may just be
// writing a request that it could not safely send again. An idle connection ends after
// server.idle_timeout, as always.
func (s *Server) StopAccepting() {
	if !s.stopping.CompareAndSwap(false, true) {
		return
	}
	s.closeListeners()
	s.endWatches()
	for _, e := range s.servers {
		if h, ok := e.server.(*http1.Server); ok {
			h.Retire()
		}
	}
	s.clients.sendGoAway(&s.notifying)
	s.leave()
	close(s.stopped)
}

// serveRemaining serves the open connections until none is left. The wait for HTTP/3
// connections runs in all until shutdown ends it.
func (s *Server) serveRemaining(ctx context.Context, all, accepting *sync.WaitGroup, failed <-chan error, limit time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errSuccessor)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	none, noQUIC := make(chan struct{}), make(chan struct{})
	all.Go(func() {
		defer close(noQUIC)
		s.quic.leave()
	})
	wg.Go(func() {
		defer close(none)
		if s.tls != nil {
			s.tls.finish()
		}
		accepting.Wait() // every accepted connection is counted now
		for _, done := range []<-chan struct{}{s.places.sockets.Idle(), noQUIC} {
			select {
			case <-done:
			case <-ctx.Done():
			}
		}
	})
	select {
	case <-none:
		return errSuccessor
	case err := <-failed:
		return err
	case <-ctx.Done():
		if context.Cause(ctx) == errSuccessor {
			return errSuccessor
		}
		return nil
	}
}
