package shared

import (
	"slices"
	"sync"

	"github.com/pdproxy/pdproxy/abi/host"
)

// queue is one shared queue: items in their order of arrival.
type queue struct {
	id    uint32
	space *Space

	mu        sync.Mutex
	items     [][]byte
	size      int
	listeners []listener // the last listener gets the callbacks for new items
}

// listener is one registration of a queue.
type listener struct {
	owner any
	ready func(queue uint32)
}

// Register opens or makes the queue of that name, and returns its id, which is unique in
// the store and never 0. From now on the store calls ready once for each new item, until
// Forget is called with owner or another listener registers. ready must not block and
// must not call the store. An existing queue keeps its items. The id is 0 when the space
// has too many queues, or too many bytes in them.
func (sp *Space) Register(name string, owner any, ready func(queue uint32)) uint32 {
	s := sp.store
	s.mu.Lock()
	defer s.mu.Unlock()
	q := sp.queue(name)
	if q == nil {
		return 0
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.forget(owner)
	q.listeners = append(q.listeners, listener{owner, ready})
	return q.id
}

// Queue returns the id of the queue of that name and makes the queue if needed. The
// caller gets no callbacks for new items. The id is 0 when the space has too many queues.
func (sp *Space) Queue(name string) uint32 {
	s := sp.store
	s.mu.Lock()
	defer s.mu.Unlock()
	q := sp.queue(name)
	if q == nil {
		return 0
	}
	return q.id
}

// queue returns the queue of that name and makes it if needed; nil when there
// are too many. The caller holds store.mu.
func (sp *Space) queue(name string) *queue {
	s := sp.store
	q := sp.queues[name]
	if q == nil && len(sp.queues) < maxNames && sp.take(len(name)+itemCost) {
		q = &queue{id: s.nextQueue(), space: sp}
		sp.queues[name] = q
		s.queues[q.id] = q
	}
	return q
}

// take counts n bytes of queues. It returns false when the space would hold too
// many bytes.
func (sp *Space) take(n int) bool {
	if sp.queued.Add(int64(n)) > MaxQueues {
		sp.queued.Add(-int64(n))
		return false
	}
	return true
}

// nextQueue returns an id that no queue has. The caller holds s.mu.
func (s *Store) nextQueue() uint32 {
	for {
		s.lastQueue++
		if s.lastQueue != 0 && s.queues[s.lastQueue] == nil {
			return s.lastQueue
		}
	}
}

// Forget removes owner's registrations. The listener that registered before owner gets
// the callbacks for later items.
func (sp *Space) Forget(owner any) {
	s := sp.store
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range sp.queues {
		q.mu.Lock()
		q.forget(owner)
		q.mu.Unlock()
	}
}

func (q *queue) forget(owner any) {
	q.listeners = slices.DeleteFunc(q.listeners, func(l listener) bool { return l.owner == owner })
}

// Resolve returns the id of a queue by vm_id and name. NotFound: there is none.
func (s *Store) Resolve(vmID, name string) (queue uint32, status host.Status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sp := s.spaces[vmID]
	if sp == nil || sp.queues[name] == nil {
		return 0, host.NotFound
	}
	return sp.queues[name].id, host.OK
}

func (s *Store) queue(id uint32) *queue {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.queues[id]
}

// Enqueue appends a copy of value to a queue and calls its last listener. NotFound: there
// is no such queue. InternalFailure: the queue, or all queues of its space together, are
// full.
func (s *Store) Enqueue(id uint32, value []byte) host.Status {
	q := s.queue(id)
	if q == nil {
		return host.NotFound
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.size+len(value)+itemCost > MaxQueue || !q.space.take(len(value)+itemCost) {
		return host.InternalFailure
	}
	q.size += len(value) + itemCost
	q.items = append(q.items, append([]byte(nil), value...))
	if n := len(q.listeners); n > 0 {
		q.listeners[n-1].ready(id)
	}
	return host.OK
}

// Dequeue removes and returns the oldest item. NotFound: there is no such
// queue. Empty: the queue has no item.
func (s *Store) Dequeue(id uint32) (value []byte, status host.Status) {
	q := s.queue(id)
	if q == nil {
		return nil, host.NotFound
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) == 0 {
		return nil, host.Empty
	}
	value, q.items[0] = q.items[0], nil
	q.items = q.items[1:]
	q.size -= len(value) + itemCost
	q.space.queued.Add(-int64(len(value) + itemCost))
	return value, host.OK
}
