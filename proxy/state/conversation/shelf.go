package conversation

import (
	"container/list"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/gaps"
)

// Shelf stores values for lists of token ids, until a longer list arrives that begins with
// such a list. Each value is returned once. All ids are compared, so a match is certain.
//
// A value leaves its entry when its time has ended, or when there is no room. The entry without a
// value and without ids stays until it expires, so that the shelf knows whether the next turn came.
// A match of such an entry compares hashes only. Safe for concurrent use.
type Shelf[V any] struct {
	most, maxIDs int
	count        atomic.Int64 // of entries, read without the lock

	mu      sync.Mutex
	byHash  map[uint64][]*onShelf[V] // guarded by mu, as all that follows
	byName  map[string]*onShelf[V]
	lengths []shelfLength // ascending
	full    list.List     // of *onShelf[V] with values, the longest there first
	empty   list.List     // of *onShelf[V] without values, in the order in which the values left
	ids     int
}

// OnShelf is a value and its token ids.
type OnShelf[V any] struct {
	// Scope must be equal in both lists: model, adapter, salt.
	Scope string
	// Name is the name of the conversation; "": none. A new value replaces the value of
	// the same name. The name alone proves no match.
	Name string
	IDs  []uint32
	// Until is the end of the time for which the value is stored, and Expires that of the entry.
	Until, Expires time.Time
	Ended          time.Time // end of the turn
	Turn           gaps.Turn
	Likelihood     uint16 // that the next turn comes before Until; see abi.RetainDecision
	Value          V
}

type onShelf[V any] struct {
	OnShelf[V]
	hash   uint64
	length int           // of the ids
	within *list.List    // full or empty
	at     *list.Element // in within
}

// shelfLength counts the entries of one length.
type shelfLength struct{ length, count int }

// NewShelf returns a shelf for that many entries and that many ids in total, of 4 bytes
// each.
func NewShelf[V any](entries, ids int) *Shelf[V] {
	return &Shelf[V]{most: entries, maxIDs: ids, byHash: make(map[uint64][]*onShelf[V]), byName: make(map[string]*onShelf[V])}
}

// Empty reports whether there are no entries, without a lock.
func (s *Shelf[V]) Empty() bool { return s.count.Load() == 0 }

// Put stores o, without its value if its time has ended. If there is no room, the least likely values
// leave their entries. replaced is the value of the same name, evicted are the values that left, and
// lost the entries that are dropped.
func (s *Shelf[V]) Put(o OnShelf[V], now time.Time) (replaced, evicted, lost []OnShelf[V]) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.byName[o.key()]; old != nil && o.Name != "" {
		if old.within == &s.full {
			replaced = append(replaced, old.OnShelf)
		}
		s.remove(old)
	}
	e := &onShelf[V]{OnShelf: o, hash: hashScope(o.Scope), length: len(o.IDs), within: &s.full}
	for _, id := range o.IDs {
		e.hash = hashID(e.hash, id)
	}
	s.add(e)
	if !now.Before(o.Until) {
		s.vacate(e)
	}
	for s.ids > s.maxIDs || s.full.Len() > s.most {
		worst := s.leastLikely(func(*OnShelf[V]) bool { return true }, now)
		evicted = append(evicted, worst.OnShelf)
		s.vacate(worst)
	}
	for s.full.Len()+s.empty.Len() > s.most {
		oldest := s.empty.Front().Value.(*onShelf[V])
		lost = append(lost, oldest.OnShelf)
		s.remove(oldest)
	}
	return replaced, evicted, lost
}

// add puts an entry with a value into the lists and maps; mu is held.
func (s *Shelf[V]) add(e *onShelf[V]) {
	e.at = s.full.PushBack(e)
	s.byHash[e.hash] = append(s.byHash[e.hash], e)
	if e.Name != "" {
		s.byName[e.key()] = e
	}
	s.ids += len(e.IDs)
	i, found := slices.BinarySearchFunc(s.lengths, e.length, compareLength)
	if !found {
		s.lengths = slices.Insert(s.lengths, i, shelfLength{length: e.length})
	}
	s.lengths[i].count++
	s.counted()
}

func (s *Shelf[V]) counted() { s.count.Store(int64(s.full.Len() + s.empty.Len())) }

// key returns the key of an entry by name: names belong to a scope.
func (o *OnShelf[V]) key() string { return o.Scope + "\x00" + o.Name }

// chance is the likelihood of the next turn before Until. It decreases with the time that has passed
// without that turn.
func (o *OnShelf[V]) chance(now time.Time) float64 {
	if left, whole := o.Until.Sub(now), o.Until.Sub(o.Ended); left > 0 && whole > 0 {
		return float64(o.Likelihood) * float64(left) / float64(whole)
	}
	return 0
}

func compareLength(l shelfLength, n int) int { return l.length - n }

// Named reports whether there is a value of that name. An entry of that name without a value is
// removed: ok.
func (s *Shelf[V]) Named(scope, name string) (o OnShelf[V], hasValue, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.byName[(&OnShelf[V]{Scope: scope, Name: name}).key()]
	switch {
	case e == nil:
		return o, false, false
	case e.within == &s.full:
		return o, true, false
	}
	s.remove(e)
	return e.OnShelf, false, true
}

// Take removes the entry for the longest beginning of ids that has a value and has not expired. A
// longer entry without a value is removed as well. hasValue: o has a value.
func (s *Shelf[V]) Take(scope string, ids []uint32, now time.Time) (o OnShelf[V], hasValue, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var best, left *onShelf[V]
	h, n := hashScope(scope), 0
	for _, l := range s.lengths {
		if l.length > len(ids) {
			break
		}
		for ; n < l.length; n++ {
			h = hashID(h, ids[n])
		}
		for _, e := range s.byHash[h] {
			switch {
			case e.Scope != scope || e.length != n || !now.Before(e.Expires):
			case e.within == &s.empty:
				left = e
			case slices.Equal(e.IDs, ids[:n]):
				best = e
			}
		}
	}
	if left != nil && (best == nil || left.length > best.length) {
		s.remove(left)
		if best == nil {
			return left.OnShelf, false, true
		}
	}
	if best == nil {
		return o, false, false
	}
	s.remove(best)
	return best.OnShelf, true, true
}

// TakeNamed removes the entry of that name. hasValue: it has a value.
func (s *Shelf[V]) TakeNamed(scope, name string) (o OnShelf[V], hasValue, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.byName[(&OnShelf[V]{Scope: scope, Name: name}).key()]
	if e == nil {
		return o, false, false
	}
	hasValue = e.within == &s.full
	s.remove(e)
	return e.OnShelf, hasValue, true
}

// TakeAll removes all entries and returns those with values.
func (s *Shelf[V]) TakeAll() (all []OnShelf[V]) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range [...]*list.List{&s.full, &s.empty} {
		for first := l.Front(); first != nil; first = l.Front() {
			e := first.Value.(*onShelf[V])
			if l == &s.full {
				all = append(all, e.OnShelf)
			}
			s.remove(e)
		}
	}
	return all
}

// Sweep removes the values whose time has ended, and the entries that have expired. next is when the
// next of these times ends; zero if there are no entries.
func (s *Shelf[V]) Sweep(now time.Time) (ended, lost []OnShelf[V], next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sooner := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	for at := s.full.Front(); at != nil; {
		e := at.Value.(*onShelf[V])
		at = at.Next()
		if now.Before(e.Until) {
			sooner(e.Until)
			continue
		}
		ended = append(ended, e.OnShelf)
		s.vacate(e)
	}
	for at := s.empty.Front(); at != nil; {
		e := at.Value.(*onShelf[V])
		at = at.Next()
		if now.Before(e.Expires) {
			sooner(e.Expires)
			continue
		}
		lost = append(lost, e.OnShelf)
		s.remove(e)
	}
	return ended, lost, next
}

// Evict removes the least likely of the values that match selects, until their lists had that many
// ids together. At least one value leaves if match selects any.
func (s *Shelf[V]) Evict(match func(*OnShelf[V]) bool, ids int, now time.Time) (evicted []OnShelf[V]) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		worst := s.leastLikely(match, now)
		if worst == nil {
			return evicted
		}
		evicted, ids = append(evicted, worst.OnShelf), ids-worst.length
		s.vacate(worst)
		if ids <= 0 {
			return evicted
		}
	}
}

// Each calls f for each entry with a value. f must not call the shelf.
func (s *Shelf[V]) Each(f func(*OnShelf[V])) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at := s.full.Front(); at != nil; at = at.Next() {
		f(&at.Value.(*onShelf[V]).OnShelf)
	}
}

// leastLikely returns the entry with the least likely value, of equal ones the oldest; nil: match
// selects none. mu is held.
func (s *Shelf[V]) leastLikely(match func(*OnShelf[V]) bool, now time.Time) (worst *onShelf[V]) {
	least := 0.0
	for at := s.full.Front(); at != nil; at = at.Next() {
		e := at.Value.(*onShelf[V])
		if !match(&e.OnShelf) {
			continue
		}
		if chance := e.chance(now); worst == nil || chance < least {
			worst, least = e, chance
		}
	}
	return worst
}

// vacate removes the value and the ids of e, which stays as an entry without a value; mu is held.
func (s *Shelf[V]) vacate(e *onShelf[V]) {
	var none V
	s.ids -= len(e.IDs)
	e.Value, e.IDs = none, nil
	s.full.Remove(e.at)
	e.within, e.at = &s.empty, s.empty.PushBack(e)
}

// remove removes e; mu is held.
func (s *Shelf[V]) remove(e *onShelf[V]) {
	e.within.Remove(e.at)
	rest := slices.DeleteFunc(s.byHash[e.hash], func(o *onShelf[V]) bool { return o == e })
	if s.byHash[e.hash] = rest; len(rest) == 0 {
		delete(s.byHash, e.hash)
	}
	if s.byName[e.key()] == e {
		delete(s.byName, e.key())
	}
	s.ids -= len(e.IDs)
	i, _ := slices.BinarySearchFunc(s.lengths, e.length, compareLength)
	if s.lengths[i].count--; s.lengths[i].count == 0 {
		s.lengths = slices.Delete(s.lengths, i, i+1)
	}
	s.counted()
}

// hashScope and hashID compute a hash step by step. It finds candidates, whose ids are
// then compared.
func hashScope(scope string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(scope) {
		h = (h ^ uint64(scope[i])) * 1099511628211
	}
	return h
}

func hashID(h uint64, id uint32) uint64 {
	h = (h ^ uint64(id)) * 0x9e3779b97f4a7c15
	return h ^ h>>29
}
