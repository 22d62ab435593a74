package edge

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/downstream"
)

// Serve answers on all sockets until ctx ends. Then it drains: it accepts no new
// connection, and running requests may end within the limit. Requests that do not end in
// time are cancelled with downstream.ErrDraining. After StopAccepting, Serve goes on with the
// connections that it has. Serve returns when no connection is left. The error is nil
// after a drain that cancelled nothing. Call Serve once, after Handle.
func (s *Server) Serve(ctx context.Context, limits Limits) error {
	var wg, accepting sync.WaitGroup
	watching, unwatch := context.WithCancel(context.Background())
	defer unwatch()
	for _, c := range []*connections{s.places, s.operators} {
		s.watchers.Go(func() { c.cutStalled(watching, s.stall) })
	}
	failed := s.start(&wg, &accepting)
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	case <-s.stopped:
		err = s.serveRemaining(ctx, &wg, &accepting, failed, limits.Remaining())
	}
	if errors.Is(err, errSuccessor) {
		err = s.shutdown(0, limits.Remaining())
	} else {
		limit := limits.Drain()
		err = errors.Join(err, s.shutdown(limit, limit))
	}
	accepting.Wait()
	wg.Wait()
	s.notifying.Wait()
	unwatch()
	s.watchers.Wait()
	return err
}

// start serves all listeners. The returned channel gets the errors of those that fail.
func (s *Server) start(wg, accepting *sync.WaitGroup) <-chan error {
	failed := make(chan error, len(s.servers)+1)
	for _, e := range s.servers {
		serve := func() {
			err := e.Serve(e.listener)
			if !errors.Is(err, http.ErrServerClosed) && !(s.stopping.Load() && errors.Is(err, net.ErrClosed)) {
				failed <- err
			}
		}
		if e.later {
			wg.Go(serve)
		} else {
			accepting.Go(serve)
		}
	}
	if s.tls != nil {
		wg.Go(s.tls.run)
	}
	if s.quic != nil {
		wg.Go(func() {
			if err := s.quic.serve(); err != nil {
				failed <- err
			}
		})
	}
	return failed
}

// shutdown drains within limit. The error names waited, the time that the requests had in
// all before they were cancelled.
func (s *Server) shutdown(limit, waited time.Duration) error {
	s.options.OnDrain()
	s.leave()
	ctx, cancel := context.WithTimeout(context.Background(), limit+s.options.CutGrace)
	defer cancel()
	var cut atomic.Int64
	timer := time.AfterFunc(limit, func() {
		cut.Store(int64(s.options.Running()))
		s.cancel(downstream.ErrDraining)
	})
	err := s.shutdownAll(ctx)
	if err != nil {
		s.endWatches()
		for _, e := range s.servers {
			e.Close()
		}
		s.places.closeAll() // the servers have forgotten those that a handler has taken over
	}
	s.quic.close()
	if timer.Stop() || cut.Load() == 0 { // a connection without a request may have delayed it
		return nil
	}
	return fmt.Errorf("drain: %d exchanges were cut after %s", cut.Load(), waited)
}

// shutdownAll waits until no server has a connection left. The admin server serves while the others
// drain.
func (s *Server) shutdownAll(ctx context.Context) error {
	var wg sync.WaitGroup
	public := s.servers
	if s.admin != nil {
		public = public[:len(public)-1]
	}
	errs := make([]error, len(public)+1)
	for i, e := range public {
		wg.Go(func() { errs[i] = e.Shutdown(ctx) })
	}
	wg.Go(func() { errs[len(public)] = s.quic.shutdown(ctx) })
	if s.tls != nil {
		s.tls.close()
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	select {
	case <-s.places.sockets.Idle(): // connections that handlers have taken over are left
	case <-ctx.Done():
		return ctx.Err()
	}
	s.endWatches()
	if s.admin == nil {
		return nil
	}
	return s.servers[len(public)].Shutdown(ctx)
}
