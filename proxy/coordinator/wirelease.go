package coordinator

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// wireLease is what of a worker's lease is the coordinator's. Those that are open
// are in the client's list.
type wireLease struct {
	client          *Client
	lease           *Lease
	prefill, decode engine.Target
	id              uint64

	// Guarded by the lease's mu.
	session *session // whose coordinator knows of it; nil: none does
	number  uint64   // there
	owed    []byte   // until the answer has begun

	next, prev *wireLease // guarded by Client.mu
}

// keep puts a lease into the list, and tells the coordinator of it, if that is not
// the one that made it.
func (c *Client) keep(w *wireLease, as wireLease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*w = as
	if w.next = c.open; w.next != nil {
		w.next.prev = w
	}
	c.open = w
	if s := c.session.Load(); s != w.session {
		w.lease.move(s)
	}
}

// forget takes a lease off the list.
func (c *Client) forget(l *Lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := l.wire
	if w.next != nil {
		w.next.prev = w.prev
	}
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		c.open = w.next
	}
	w.next, w.prev = nil, nil
}

// move makes the lease one of s's coordinator, which is told of it; nil: of none.
func (l *Lease) move(s *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.wire
	w.session = s
	if s == nil || l.released {
		return
	}
	w.number = s.last.Add(1)
	a := Adoption{Prefill: w.prefill, Decode: w.decode, ID: w.id, Prompt: l.burden.prompt, Queued: l.burden.queued, Tokens: l.burden.tokens}
	if l.computed {
		a.Queued = -1
	}
	s.link.Send(kindAdopt, appendAdoption(nil, w.number, &a, w.client.o.Mirror, w.owed), false)
}

// The methods below tell the coordinator; the lease's mu is held.

func (w *wireLease) prefillDone(took time.Duration) {
	w.tell(kindDone, took, w.owed)
}

func (w *wireLease) answered(took time.Duration) {
	w.owed = nil
	w.tell(kindAnswered, took, nil)
}

func (w *wireLease) release() {
	w.owed = nil
	if w.session != nil {
		m := w.client.scratch.Get().(*scratch)
		w.session.drop(w.number, m)
		w.client.scratch.Put(m)
	}
}

func (w *wireLease) tell(kind uint8, took time.Duration, owed []byte) {
	if w.session == nil {
		return
	}
	m := w.client.scratch.Get().(*scratch)
	defer w.client.scratch.Put(m)
	m.out = append(appendDuration(wire.AppendUint(m.out[:0], w.number), took), owed...)
	w.session.link.Send(kind, m.out, len(owed) > 0)
}

// computed tells what an engine says of its cache; the lease's mu is not held.
func (w *wireLease) computed(key *Key, block int, prompt, cached int64, m *scratch) {
	w.lease.mu.Lock()
	defer w.lease.mu.Unlock()
	if w.session == nil || w.lease.released {
		return
	}
	m.out = wire.AppendInt(wire.AppendInt(wire.AppendUint(m.out[:0], w.number), prompt), cached)
	m.out = appendHashes(appendBlock(m.out, block), key.reported(block, cached))
	w.session.link.Send(kindComputed, m.out, false)
}
