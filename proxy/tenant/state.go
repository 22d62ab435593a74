package tenant

import (
	"cmp"
	"slices"
	"time"
)

// Key identifies a tenant: the beginning of the SHA-256 of its name. Zero: no tenant.
type Key [16]byte

// Version orders the states of one tenant. The zero Version is older than all others.
type Version struct {
	Epoch  uint64 // of the coordinator that counted; 0: no coordinator
	Change uint64 // number of the change in the ledger of that coordinator
}

// Compare returns -1 if v is older than w, 1 if v is newer, and 0 if they are equal.
func (v Version) Compare(w Version) int {
	return cmp.Or(cmp.Compare(v.Epoch, w.Epoch), cmp.Compare(v.Change, w.Change))
}

// State is the used part of the budgets of a tenant at a moment, as one process tells another.
// It has an age instead of a time, because the clocks of hosts differ.
type State struct {
	Key      Key
	Version  Version
	Requests int64         // used, in 60,000,000ths of a request
	Tokens   int64         // used, in 60,000,000ths of a token
	Age      time.Duration // of the amounts
}

const (
	// MaxUsed is the largest Requests or Tokens of a State.
	MaxUsed = maxDebt * MaxPerMinute * unit
	// MaxAge is the age from which a State is worthless: nothing of it is used any more.
	MaxAge = maxDebt * time.Minute
)

// Lead begins to count for the coordinator of that epoch, and returns the epoch of the
// coordinator that counted in this ledger before; 0: none.
func (l *Ledger) Lead(epoch uint64) (before uint64) {
	defer l.lock()()
	before = l.table.epoch
	l.table.epoch = max(before, epoch)
	return before
}

// Changes returns the states that have changed since a change, 0 for all, and the number of
// the last change. It leaves out what no longer matters.
func (l *Ledger) Changes(since uint64) (states []State, until uint64) {
	l.mu.Lock()
	unused := l.table == nil
	l.mu.Unlock()
	if unused {
		return nil, 0
	}
	defer l.lock()()
	now := l.now().UnixMicro()
	for at := range l.table.records {
		p := l.pair(at)
		age := time.Duration(max(0, now-p.at())) * time.Microsecond
		if p.version.Change > since && age < MaxAge && l.table.records[at].key != (Key{}) {
			states = append(states, State{l.table.records[at].key, p.version, p.requests.used, p.tokens.used, age})
		}
	}
	return states, l.table.changes
}

// Merge replaces the states of this ledger that are older than those of another one. States
// that the other ledger does not have stay.
func (l *Ledger) Merge(states []State) {
	defer l.lock()()
	now := l.now().UnixMicro()
	for _, s := range states {
		at := l.find(s.Key)
		if s.Version.Compare(l.pair(at).version) <= 0 {
			continue
		}
		then := now - s.Age.Microseconds()
		l.table.changes = max(l.table.changes, s.Version.Change)
		l.replace(at, pair{requests: bucket{s.Requests, then}, tokens: bucket{s.Tokens, then}, version: s.Version})
	}
}

// CopyShares makes the budgets those of one of n processes that share the states of another
// ledger.
func (l *Ledger) CopyShares(states []State, n int) {
	defer l.lock()()
	for _, s := range states {
		l.copyShare(s, n)
	}
}

// Copy is CopyShares for the state of an answer of the other ledger. It counts the request of
// the answer as running unless it is refused.
func (l *Ledger) Copy(a *Answer, n int) {
	defer l.lock()()
	at := l.copyShare(a.State, n)
	if a.Refused == Admitted {
		l.table.running[at][l.process()]++
	}
}

// copyShare returns the place of the record. The caller has locked the state.
func (l *Ledger) copyShare(s State, n int) int {
	at, then := l.find(s.Key), l.now().UnixMicro()-s.Age.Microseconds()
	l.store(at, pair{requests: bucket{s.Requests / int64(n), then}, tokens: bucket{s.Tokens / int64(n), then}})
	return at
}

// Newest collects the newest State of each tenant that a process has been told. The zero value
// is empty and ready. It is for one goroutine.
type Newest struct {
	states map[Key]told
}

// told is a State and the time when it was told.
type told struct {
	State
	at time.Time
}

// Add adds states, unless newer ones of the same tenants have been added.
func (n *Newest) Add(states ...State) {
	if n.states == nil {
		n.states = make(map[Key]told)
	}
	for _, s := range states {
		if s.Version.Compare(n.states[s.Key].Version) <= 0 {
			continue
		}
		if _, known := n.states[s.Key]; !known && len(n.states) >= MaxTenants {
			n.expire()
		}
		if len(n.states) < MaxTenants {
			n.states[s.Key] = told{s, time.Now()}
		}
	}
}

// States returns the states with their present ages, in the order of their keys.
func (n *Newest) States() []State {
	n.expire()
	states := make([]State, 0, len(n.states))
	for _, t := range n.states {
		t.Age += time.Since(t.at)
		states = append(states, t.State)
	}
	slices.SortFunc(states, func(a, b State) int { return slices.Compare(a.Key[:], b.Key[:]) })
	return states
}

// expire removes what no longer matters.
func (n *Newest) expire() {
	for k, t := range n.states {
		if t.Age+time.Since(t.at) >= MaxAge {
			delete(n.states, k)
		}
	}
}
