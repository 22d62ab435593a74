package conversation

import (
	"container/list"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Shelf keeps values, each of which stands for a list of token ids, until a
// longer list comes that begins with those. A value is handed out once. What is
// compared is every id, so that a match is proof. Safe for concurrent use.
type Shelf[V any] struct {
	most, mostIDs int
	count         atomic.Int64 // of values, read without the lock

	mu      sync.Mutex
	byHash  map[uint64][]*onShelf[V] // guarded by mu, as all that follows
	byName  map[string]*onShelf[V]
	lengths []shelfLength // ascending
	order   list.List     // of *onShelf[V], the longest there first
	ids     int
}

// OnShelf is a value with what it stands for.
type OnShelf[V any] struct {
	// Scope must be the same for two lists to be compared: model, adapter, salt.
	Scope string
	// Name is that of the conversation, "" for none. It is not proof of anything: a
	// value takes the place of another one of its name.
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

// shelfLength is how many values there are of one length.
type shelfLength struct{ length, count int }

// NewShelf returns a shelf for as many values, that stand for as many ids
// together: 4 bytes each.
func NewShelf[V any](values, ids int) *Shelf[V] {
	return &Shelf[V]{most: values, mostIDs: ids, byHash: make(map[uint64][]*onShelf[V]), byName: make(map[string]*onShelf[V])}
}

// Empty reports that there is nothing to take. It takes no lock.
func (s *Shelf[V]) Empty() bool { return s.count.Load() == 0 }

// Put keeps o, and returns what it takes the place of: that of its name, and what
// has been there longest where there is no more room. Values that have expired go
// unsaid.
func (s *Shelf[V]) Put(o OnShelf[V], now time.Time) (out []V) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(o.IDs) > s.mostIDs {
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
		if s.order.Len() < s.most && s.ids+len(o.IDs) <= s.mostIDs && now.Before(old.Expires) {
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

// key is what a value is known by where the ids are not: names are of a scope.
func (o *OnShelf[V]) key() string { return o.Scope + "\x00" + o.Name }

func compareLength(l shelfLength, n int) int { return l.length - n }

// Named reports whether there is a value of that name, which may have expired.
func (s *Shelf[V]) Named(scope, name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byName[(&OnShelf[V]{Scope: scope, Name: name}).key()] != nil
}

// Take takes the value that stands for most of the leading ids, which has not
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

// TakeNamed takes the value of that name, whatever it stands for; ok is false for
// none, and for one that has expired.
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

// TakeAll takes all that have not expired.
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

// remove takes e off; mu is held.
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

// hashScope and hashID hash step by step. They find candidates; the ids
// themselves decide.
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
