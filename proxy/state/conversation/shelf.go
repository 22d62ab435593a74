package conversation

import (
	"container/list"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Shelf stores values for lists of token ids, until a longer list arrives that begins with
// such a list. Each value is returned once. All ids are compared, so a match is certain.
// Safe for concurrent use.
type Shelf[V any] struct {
	most, maxIDs int
	count        atomic.Int64 // of values, read without the lock

	mu      sync.Mutex
	byHash  map[uint64][]*onShelf[V] // guarded by mu, as all that follows
	byName  map[string]*onShelf[V]
	lengths []shelfLength // ascending
	order   list.List     // of *onShelf[V], the longest there first
	ids     int
}

// OnShelf is a value and its token ids.
type OnShelf[V any] struct {
	// Scope must be equal in both lists: model, adapter, salt.
	Scope string
	// Name is the name of the conversation; "": none. A new value replaces the value of
	// the same name. The name alone proves no match.
	Name    string
	IDs     []uint32
	Expires time.Time
	Value   V
}

type onShelf[V any] struct {
	OnShelf[V]
	hash uint64
	at   *list.Element
}

// shelfLength counts the values of one length.
type shelfLength struct{ length, count int }

// NewShelf returns a shelf for that many values and that many ids in total, of 4 bytes
// each.
func NewShelf[V any](values, ids int) *Shelf[V] {
	return &Shelf[V]{most: values, maxIDs: ids, byHash: make(map[uint64][]*onShelf[V]), byName: make(map[string]*onShelf[V])}
}

// Empty reports whether there are no values, without a lock.
func (s *Shelf[V]) Empty() bool { return s.count.Load() == 0 }

// Put stores o and returns the values that it replaces: the value of the same name, and
// the oldest ones if there is no room. Expired values are dropped.
func (s *Shelf[V]) Put(o OnShelf[V], now time.Time) (out []V) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(o.IDs) > s.maxIDs {
		return []V{o.Value}
	}
	drop := func(old *onShelf[V]) {
		s.remove(old)
		if now.Before(old.Expires) {
			out = append(out, old.Value)
		}
	}
	if old := s.byName[o.key()]; old != nil && o.Name != "" {
		drop(old)
	}
	for first := s.order.Front(); first != nil; first = s.order.Front() {
		old := first.Value.(*onShelf[V])
		if s.order.Len() < s.most && s.ids+len(o.IDs) <= s.maxIDs && now.Before(old.Expires) {
			break
		}
		drop(old)
	}
	e := &onShelf[V]{OnShelf: o, hash: hashScope(o.Scope)}
	for _, id := range o.IDs {
		e.hash = hashID(e.hash, id)
	}
	e.at = s.order.PushBack(e)
	s.byHash[e.hash] = append(s.byHash[e.hash], e)
	if o.Name != "" {
		s.byName[o.key()] = e
	}
	s.ids += len(o.IDs)
	i, found := slices.BinarySearchFunc(s.lengths, len(o.IDs), compareLength)
	if !found {
		s.lengths = slices.Insert(s.lengths, i, shelfLength{length: len(o.IDs)})
	}
	s.lengths[i].count++
	s.count.Store(int64(s.order.Len()))
	return out
}

// key returns the key of a value by name: names belong to a scope.
func (o *OnShelf[V]) key() string { return o.Scope + "\x00" + o.Name }

func compareLength(l shelfLength, n int) int { return l.length - n }

// Named reports whether there is a value of that name; it may have expired.
func (s *Shelf[V]) Named(scope, name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byName[(&OnShelf[V]{Scope: scope, Name: name}).key()] != nil
}

// Take removes and returns the value for the longest beginning of ids, unless it has
// expired.
func (s *Shelf[V]) Take(scope string, ids []uint32, now time.Time) (v V, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var best *onShelf[V]
	h, n := hashScope(scope), 0
	for _, l := range s.lengths {
		if l.length > len(ids) {
			break
		}
		for ; n < l.length; n++ {
			h = hashID(h, ids[n])
		}
		for _, e := range s.byHash[h] {
			if e.Scope == scope && now.Before(e.Expires) && slices.Equal(e.IDs, ids[:n]) {
				best = e
			}
		}
	}
	if best == nil {
		return v, false
	}
	s.remove(best)
	return best.Value, true
}

// TakeNamed removes and returns the value of that name. False: there is none, or it has
// expired.
func (s *Shelf[V]) TakeNamed(scope, name string, now time.Time) (v V, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.byName[(&OnShelf[V]{Scope: scope, Name: name}).key()]
	if e == nil {
		return v, false
	}
	s.remove(e)
	return e.Value, now.Before(e.Expires)
}

// TakeAll removes and returns all values that have not expired.
func (s *Shelf[V]) TakeAll(now time.Time) (all []V) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for first := s.order.Front(); first != nil; first = s.order.Front() {
		e := first.Value.(*onShelf[V])
		s.remove(e)
		if now.Before(e.Expires) {
			all = append(all, e.Value)
		}
	}
	return all
}

// remove removes e; mu is held.
func (s *Shelf[V]) remove(e *onShelf[V]) {
	s.order.Remove(e.at)
	rest := slices.DeleteFunc(s.byHash[e.hash], func(o *onShelf[V]) bool { return o == e })
	if s.byHash[e.hash] = rest; len(rest) == 0 {
		delete(s.byHash, e.hash)
	}
	if s.byName[e.key()] == e {
		delete(s.byName, e.key())
	}
	s.ids -= len(e.IDs)
	i, _ := slices.BinarySearchFunc(s.lengths, len(e.IDs), compareLength)
	if s.lengths[i].count--; s.lengths[i].count == 0 {
		s.lengths = slices.Delete(s.lengths, i, i+1)
	}
	s.count.Store(int64(s.order.Len()))
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
