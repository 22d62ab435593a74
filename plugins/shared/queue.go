package shared

import (
	"slices"
	"sync"

	"github.com/pdproxy/pdproxy/abi/host"
)

// queue is one shared queue: items in their order of arrival.
type queue struct {
	id      uint32
	space   *Space
	senders map[string]struct{} // other vm_ids that have resolved the queue; nil: none; guarded by store.mu

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

// Resolve returns the id of the queue of that name in the space of vmID; "" is the space's
// own vm_id. From now on the space may add items to the queue. It may not remove any: only
// the queue's own vm_id may. NotFound: there is no such queue.
func (sp *Space) Resolve(vmID, name string) (queue uint32, status host.Status) {
	s := sp.store
	s.mu.Lock()
	defer s.mu.Unlock()
	of := sp
	if vmID != "" {
		of = s.spaces[vmID]
	}
	if of == nil || of.queues[name] == nil {
		return 0, host.NotFound
	}
	q := of.queues[name]
	if of != sp {
		if q.senders == nil {
			q.senders = make(map[string]struct{})
		}
		q.senders[sp.vmID] = struct{}{}
	}
	return q.id, host.OK
}

// own returns a queue of the space; nil for the id of another space.
func (sp *Space) own(id uint32) *queue {
	s := sp.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if q := s.queues[id]; q != nil && q.space == sp {
		return q
	}
	return nil
}

// target returns a queue of the space, or one that the space has resolved; nil for the id
// of any other queue.
func (sp *Space) target(id uint32) *queue {
	s := sp.store
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[id]
	if q == nil || q.space == sp {
		return q
	}
	if _, ok := q.senders[sp.vmID]; ok {
		return q
	}
	return nil
}

// Enqueue appends a copy of value to a queue and calls its last listener. NotFound: there
// is no such queue, or it belongs to another vm_id and this space has not resolved it.
// InternalFailure: the queue, or all queues of its space together, are full.
func (sp *Space) Enqueue(id uint32, value []byte) host.Status {
	q := sp.target(id)
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

// Dequeue removes and returns the oldest item. NotFound: the space has no such
// queue. Empty: the queue has no item.
func (sp *Space) Dequeue(id uint32) (value []byte, status host.Status) {
	q := sp.own(id)
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
