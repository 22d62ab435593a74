package fleet

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// publishEvery is the shortest time between two messages about changed budgets.
const publishEvery = 100 * time.Millisecond

// publication sends the states of budgets to the standbys and to the workers. Standbys need
// them to lead. Workers need them for their shares, and report them to the next leader.
type publication struct {
	hearers atomic.Int32 // number of peers that receive the states
	due     atomic.Bool  // publishBudgets is about to run

	followers map[*follower]bool // guarded by Server.mu
	until     uint64             // last change that all peers have; 0: the next message has all states; guarded by Server.mu
}

// hear makes a peer receive the states: all of them in the next message, which goes to all peers.
// hears is guarded by mu.
func (s *Server) hear(hears *bool) {
	s.mu.Lock()
	if !*hears {
		*hears = true
		s.publication.hearers.Add(1)
	}
	s.publication.until = 0
	s.mu.Unlock()
	s.budgetsChanged()
}

// deafen is the opposite of hear. The caller holds mu.
func (s *Server) deafen(hears *bool) {
	if *hears {
		*hears = false
		s.publication.hearers.Add(-1)
		s.budgetsChanged() // the number of workers
	}
}

// attach makes a standby receive the states.
func (s *Server) attach(f *follower) {
	s.mu.Lock()
	s.publication.followers[f] = true
	s.mu.Unlock()
	s.hear(&f.hears)
}

func (s *Server) detach(f *follower) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.publication.followers, f)
	s.deafen(&f.hears)
}

// budgetsChanged makes publishBudgets run soon if a peer receives the states.
func (s *Server) budgetsChanged() {
	if s.publication.hearers.Load() > 0 && s.publication.due.CompareAndSwap(false, true) {
		time.AfterFunc(publishEvery, s.publishBudgets)
	}
}

// publishBudgets sends the peers what has changed since the last time.
func (s *Server) publishBudgets() {
	s.publication.due.Store(false)
	if s.o.Budgets == nil {
		return
	}
	epoch, newest := s.succession.term()
	if !newest {
		return // publishBudgets runs again as soon as the ledger has the newest states
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := published{whole: s.publication.until == 0, epoch: epoch}
	for _, w := range s.workers {
		if w.hears {
			p.workers = append(p.workers, w.process)
		}
	}
	slices.Sort(p.workers)
	p.workers = slices.Compact(p.workers)
	p.states, s.publication.until = s.o.Budgets.Changes(s.publication.until)
	message := p.append(nil)
	for _, w := range s.workers {
		if w.hears {
			_ = w.conn.Send(kindOf(fleetpb.Kind_KIND_BUDGETS), message, true) // fails if the connection has ended
		}
	}
	for f := range s.publication.followers {
		_ = f.conn.Send(kindOf(fleetpb.Kind_KIND_BUDGETS), message, true) // fails if the connection has ended
	}
}

// CopyBudgets notes what the leader has published; see FollowOptions.OnBudgets.
func (s *Server) CopyBudgets(payload []byte) error {
	var p published
	if err := p.read(payload); err != nil {
		return err
	}
	s.succession.copy(&p)
	return nil
}
