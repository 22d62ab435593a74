package coordinator

import (
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// Adoption is a placement that another coordinator made, or this one for a worker
// that it has lost since.
type Adoption struct {
	Prefill, Decode engine.Target // either may be zero: its engine is not known here
	ID              uint64        // the disagg id; 0: none
	Prompt          int64         // tokens of the prompt
	Queued          int64         // of these, what is being computed; -1: that is done
	Tokens          int64         // of decode: the prompt and what it is expected to produce
}

// Adopt takes a placement into the books, as if it had been made here now.
func (l *Local) Adopt(a Adoption) *Lease {
	lease := new(Lease)
	l.hold(lease, a.Prefill, a.Decode, a.ID, burden{prompt: a.Prompt, queued: a.Queued, tokens: a.Tokens})
	return lease
}

// hold makes a lease one of l's.
func (l *Local) hold(lease *Lease, prefill, decode engine.Target, id uint64, b burden) {
	lease.local, lease.id = l, id
	if id != 0 {
		l.live.Hold(id)
	}
	lease.carry(prefill, decode, b, time.Now())
	l.open.Add(1)
}
