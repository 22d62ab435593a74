package shared

import (
	"slices"
	"sync"

	"github.com/pdproxy/pdproxy/abi/host"
)

// queue is one shared queue: items in the order they came.
type queue struct {
	id    uint32
	space *Space

	mu        sync.Mutex
	items     [][]byte
	size      int
	listeners []listener // the last one is told
}

// listener is one registration of a queue.
type listener struct {
	owner any
	ready func(queue uint32)
}

// Register opens the queue of that name, or makes it, and returns its id, which
// is unique in the store and never 0. From now on ready is called once for each
// item that comes, until owner forgets the space or another one registers; it
// must not block nor call the store. A queue that was there keeps its items. The
// id is 0 when the space holds too many queues, or too many bytes in them.
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

// Queue returns the id of the queue of that name, which is made if need be, for
// one who is not told of its items. It is 0 when the space holds too many queues.
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

// queue returns the queue of that name, which is made if need be; nil when there
// are too many. store.mu is held.
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

// take counts n bytes of queues. false: the space would hold too many.
func (sp *Space) take(n int) bool {
	if sp.queued.Add(int64(n)) > MaxQueues {
		sp.queued.Add(-int64(n))
		return false
	}
	return true
}

// nextQueue returns an id that no queue has. s.mu is held.
func (s *Store) nextQueue() uint32 {
	for {
		s.lastQueue++
		if s.lastQueue != 0 && s.queues[s.lastQueue] == nil {
			return s.lastQueue
		}
	}
}

// Forget takes owner's registrations back. Whoever registered before it is told
// of the items to come.
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

// Enqueue appends a copy of value to a queue and tells its last registrar.
// NotFound: there is no such queue. InternalFailure: it is full, or all queues
// of its space together are.
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

// Dequeue takes the oldest item. NotFound: there is no such queue. Empty: there
// is nothing in it.
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
