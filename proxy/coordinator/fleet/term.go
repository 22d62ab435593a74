package fleet

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// term is while a Server leads.
type term struct {
	epoch uint64

	working context.Context // of workers' connections
	dismiss context.CancelCauseFunc
	workers sync.WaitGroup

	shadowed context.Context // of standbys' connections
	leave    context.CancelCauseFunc
	standbys sync.WaitGroup
	frozen   atomic.Bool // no worker is left: what standbys are told is the last
}

var errStoodDown = errors.New("the coordinator does not lead any more")

// settling is how long a coordinator that stands down waits for its standbys to
// have all that it knows.
const settling = time.Second

// Lead begins a term: the Server serves workers, and standbys, by an epoch. One
// that leads already goes on with its term if it is the same, and begins another
// if not. It is called by the same goroutine as StandBy.
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
	s.mu.Lock()
	defer s.mu.Unlock()
	s.term = t
}

// StandBy ends the term, if there is one: the workers' leases are released, what
// is kept of turns is freed, and then the standbys are given a moment to ask for what
// they do not know yet. It returns when no connection is left; one that comes is
// closed. What workers that have just died owe is paid after it.
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
	s.forgetTurns()
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

// enter notes a connection of the term that there is, among those of workers; nil:
// there is no term.
func (s *Server) enter() *term {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.term != nil {
		s.term.workers.Add(1)
	}
	return s.term
}

// within makes ctx end with a term's.
func within(ctx, term context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(term, func() { cancel(context.Cause(term)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
