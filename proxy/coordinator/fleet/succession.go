package fleet

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// settleLimit is the time after the begin of a term in which a coordinator waits for the workers
// of its predecessor. A worker that lives connects in this time.
const settleLimit = reconnectGrace

// succession passes the budgets of tenants from one leader to the next one. A predecessor that
// was killed may have given parts of budgets that it did not publish to the standbys. Each such
// part has a worker that knows the state of the budgets after it. So the new leader collects the
// newest states: from its ledger, from the copy of the predecessor's ledger, and from the
// workers. It gives nothing until each worker of the predecessor has reported, or until
// settleLimit; the workers give their shares in this time. A succession without a ledger, and
// one of a coordinator whose workers have no budgets, does nothing.
type succession struct {
	ledger    *tenant.Ledger // nil: workers count for themselves
	onSettled func()
	settled   atomic.Bool // the ledger has the newest states

	mu      sync.Mutex
	epoch   uint64                 // of the term, or of the last one; guarded by mu
	used    bool                   // the ledger counts for the term; guarded by mu
	before  uint64                 // epoch of the coordinator that used the ledger before; guarded by mu
	copied  copied                 // of the last leader that this standby followed; guarded by mu
	awaited map[uint64]bool        // processes of its workers that have not reported; guarded by mu
	unknown bool                   // a worker knows states of a leader that this coordinator did not follow; guarded by mu
	over    bool                   // settleLimit has passed; guarded by mu
	waiting []func(*tenant.Ledger) // guarded by mu
	limit   *time.Timer            // ends the wait; guarded by mu
}

// copied is a standby's copy of the leader's ledger.
type copied struct {
	epoch   uint64 // of the leader; 0: there is no copy
	workers []uint64
	states  tenant.Newest
}

// lead begins a term.
func (s *succession) lead(epoch uint64) {
	if s.ledger == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settled.Store(false)
	s.epoch, s.used, s.unknown, s.over = epoch, false, false, false
	s.awaited = make(map[uint64]bool)
	for _, process := range s.copied.workers {
		s.awaited[process] = true
	}
	if states := s.copied.states.States(); len(states) > 0 {
		s.use()
		s.ledger.Merge(states)
	}
	s.limit = time.AfterFunc(settleLimit, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.epoch != epoch {
			return
		}
		if s.over = true; s.used {
			s.trySettle()
		}
	})
}

// end ends the term. No worker is connected any more.
func (s *succession) end() {
	if s.ledger == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit.Stop()
	if s.over = true; s.used {
		s.trySettle()
	}
	s.copied = copied{}
}

// term returns the epoch of the term, or of the last one, and whether the ledger has the newest
// states. A ledger that no worker needs has them.
func (s *succession) term() (epoch uint64, newest bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.epoch, !s.used || s.settled.Load()
}

// copy notes what the leader has published.
func (s *succession) copy(p *published) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.whole {
		s.copied = copied{}
	}
	s.copied.epoch, s.copied.workers = p.epoch, p.workers
	s.copied.states.Add(p.states...)
}

// report notes the states that a worker knows.
func (s *succession) report(process uint64, states []tenant.State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.awaited, process)
	if len(states) > 0 {
		s.use()
		s.ledger.Merge(states)
	}
	for i := range states {
		switch states[i].Version.Epoch {
		case 0, s.epoch, s.before, s.copied.epoch:
		default:
			s.unknown = true
		}
	}
	if s.used {
		s.trySettle()
	}
}

// settle reports whether parts of budgets can be given.
func (s *succession) settle() bool {
	if s.settled.Load() {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.use()
	return s.trySettle()
}

// do calls f with the ledger: at once, or as soon as the ledger has the newest states.
func (s *succession) do(f func(*tenant.Ledger)) {
	if !s.settle() {
		s.mu.Lock()
		waits := !s.settled.Load()
		if waits {
			s.waiting = append(s.waiting, f)
		}
		s.mu.Unlock()
		if waits {
			return
		}
	}
	f(s.ledger)
}

// use makes the ledger count for the term. If the leader that this standby
// followed used the same ledger, the ledger has all of its states, and there is no need to wait
// for its workers. The caller holds mu.
func (s *succession) use() {
	if s.used {
		return
	}
	s.used, s.before = true, s.ledger.Lead(s.epoch)
	if s.before == s.copied.epoch {
		clear(s.awaited)
	}
}

// trySettle ends the wait if nothing is missing any more. The caller holds mu and has called use.
func (s *succession) trySettle() bool {
	switch {
	case s.settled.Load():
		return true
	case !s.over && (len(s.awaited) > 0 || s.unknown):
		return false
	}
	s.limit.Stop()
	for _, f := range s.waiting {
		f(s.ledger)
	}
	s.waiting, s.awaited = nil, nil
	s.settled.Store(true)
	s.onSettled()
	return true
}
