package fleet

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// remoteLease is a worker's lease at the coordinator. The leases that are open are
// in the client's list.
type remoteLease struct {
	client          *Client
	lease           *coordinator.Lease
	prefill, decode engine.Target
	id              uint64

	// Guarded by the lease's mutex.
	session *session // whose coordinator has the lease; nil: no coordinator has it
	number  uint64   // of the lease at that coordinator
	cleanup []byte   // of an orphan; nil once the answer has begun
	early   int      // bytes of cleanup that count in Client.early; 0 after PrefillDone

	next, prev *remoteLease // guarded by Client.mu
}

// keep puts a lease into the list. It reports the lease to the coordinator, unless that coordinator
// made the lease.
func (c *Client) keep(w *remoteLease, as remoteLease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*w = as
	if w.next = c.open; w.next != nil {
		w.next.prev = w
	}
	c.open = w
	if s := c.session.Load(); s != w.session {
		w.move(s)
	}
}

// Forget removes the lease from the list of open leases.
func (w *remoteLease) Forget() {
	c := w.client
	c.mu.Lock()
	defer c.mu.Unlock()
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

// move gives the lease to s's coordinator and informs that coordinator; nil: no coordinator has the
// lease.
func (w *remoteLease) move(s *session) {
	w.lease.Locked(func(open bool, left coordinator.Charge) {
		w.session = s
		if s == nil || !open {
			return
		}
		w.number = s.last.Add(1)
		a := coordinator.Adoption{Prefill: w.prefill, Decode: w.decode, ID: w.id, Charge: left}
		s.link.Send(kindOf(fleetpb.Kind_KIND_ADOPT), fleetpb.Append(nil, adoption(w.number, &a, w.client.o.Mirror, w.cleanup)), false)
	})
}

// SetOrphanCleanup sets the clean-up that PrefillDone sends.
func (w *remoteLease) SetOrphanCleanup(cleanup []byte) {
	if w.early > 0 {
		w.client.early.Add(-int64(w.early))
		w.early = 0
	}
	w.cleanup = cleanup
}

// maxEarly limits the clean-ups of a worker that were sent before PrefillDone, in bytes. The worker
// sends all of them to a new coordinator at once, and a link ends if too many bytes wait
// (link.ErrBehind). The limit also bounds the memory of the coordinator.
const maxEarly = link.MaxFrame

// RegisterOrphanCleanup sends the clean-up to the coordinator before PrefillDone. Above maxEarly, the
// lease has no clean-up.
func (w *remoteLease) RegisterOrphanCleanup(cleanup []byte) {
	if w.client.early.Add(int64(len(cleanup))) > maxEarly {
		w.client.early.Add(-int64(len(cleanup)))
		return
	}
	w.SetOrphanCleanup(cleanup)
	w.early = len(cleanup)
	w.send(fleetpb.Kind_KIND_CLEANUP, 0, cleanup)
}

// PrefillDone informs the coordinator that the prompt is computed.
func (w *remoteLease) PrefillDone(took time.Duration) {
	w.send(fleetpb.Kind_KIND_DONE, took, w.cleanup)
}

// Answered informs the coordinator that the leg that answers has the prompt's KV.
func (w *remoteLease) Answered(took time.Duration) {
	w.SetOrphanCleanup(nil)
	w.send(fleetpb.Kind_KIND_ANSWERED, took, nil)
}

// Release informs the coordinator that the lease has ended.
func (w *remoteLease) Release() {
	w.SetOrphanCleanup(nil)
	if w.session != nil {
		m := w.client.scratch.Get().(*scratch)
		w.session.drop(w.number, m)
		w.client.scratch.Put(m)
	}
}

// Computed sends the coordinator an engine's report about its cache.
func (w *remoteLease) Computed(c coordinator.CacheReport) {
	if w.session == nil {
		return
	}
	m := w.client.scratch.Get().(*scratch)
	defer w.client.scratch.Put(m)
	r := &m.cached
	r.Lease, r.Prompt, r.Cached, r.Block, r.Blocks = w.number, c.Prompt, c.Cached, blockOf(c.Block), numbers(c.Blocks)
	m.out = fleetpb.AppendFast(m.out[:0], r)
	r.Blocks = nil
	w.session.link.Send(kindOf(fleetpb.Kind_KIND_COMPUTED), m.out, false)
}

func (w *remoteLease) send(kind fleetpb.Kind, took time.Duration, cleanup []byte) {
	if w.session == nil {
		return
	}
	m := w.client.scratch.Get().(*scratch)
	defer w.client.scratch.Put(m)
	u := &m.update
	u.Lease, u.TookUs, u.Cleanup = w.number, microsOf(took), cleanup
	m.out = fleetpb.AppendFast(m.out[:0], u)
	u.Cleanup = nil
	w.session.link.Send(kindOf(kind), m.out, len(cleanup) > 0)
}
