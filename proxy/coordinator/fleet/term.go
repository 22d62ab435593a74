package fleet

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// term is the time in which a Server leads.
type term struct {
	epoch uint64

	working context.Context // ends the connections of workers
	dismiss context.CancelCauseFunc
	workers sync.WaitGroup

	shadowed context.Context // ends the connections of standbys
	leave    context.CancelCauseFunc
	standbys sync.WaitGroup
	frozen   atomic.Bool // the last worker has left, so the next answers to standbys are final
}

var errStoodDown = errors.New("the coordinator no longer leads")

// settling is the time that a coordinator gives its standbys to fetch its last changes
// when it steps down.
const settling = time.Second

// Lead begins a term with an epoch: the Server serves workers and standbys. If it already
// leads with this epoch, the term continues; if it leads with another, a new term begins.
// Lead and StandBy are called by the same goroutine.
func (s *Server) Lead(epoch uint64) {
	s.mu.Lock()
	same := s.term != nil && s.term.epoch == epoch
	s.mu.Unlock()
	if same {
		return
	}
	s.StandBy()
	t := &term{epoch: epoch}
	t.working, t.dismiss = context.WithCancelCause(context.Background())
	t.shadowed, t.leave = context.WithCancelCause(context.Background())
	s.succession.lead(epoch)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.term = t
}

// StandBy ends the term, if there is one. It releases the workers' leases and frees the
// retained turns. Then it gives the standbys a moment to fetch the last changes. It
// returns when no connection is left; new connections are closed. Clean-ups of workers
// that have just died run after it.
func (s *Server) StandBy() {
	s.mu.Lock()
	t := s.term
	s.term = nil
	s.mu.Unlock()
	if t == nil {
		return
	}
	t.dismiss(errStoodDown)
	t.workers.Wait()
	s.turns.Clear(time.Now())
	s.succession.end()
	s.publishBudgets()
	t.frozen.Store(true)
	settled := make(chan struct{})
	go func() { // ends with the standbys' connections
		defer close(settled)
		t.standbys.Wait()
	}()
	select {
	case <-settled:
	case <-time.After(settling):
	}
	t.leave(errStoodDown)
	<-settled
}

// enter counts a connection as a worker's in the present term; nil: there is no term.
func (s *Server) enter() *term {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term != nil {
		s.term.workers.Add(1)
	}
	return s.term
}

// within returns a context that also ends with the term.
func within(ctx, term context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(term, func() { cancel(context.Cause(term)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
