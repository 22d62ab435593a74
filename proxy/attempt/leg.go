package attempt

import (
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// leg is one request to an engine. The goroutine that runs the leg owns it until the leg
// has ended.
type leg struct {
	*journal.Leg
	target  engine.Target
	try     int           // of its phase, counted from 1
	limit   time.Duration // until the first byte of a decode leg
	kvBound bool          // limit is that of the transfer
	short   bool          // the plan policy's limit bounds its first byte
	watched watched       // what Evict and Lingers read from other goroutines
	a       *attempt      // whose leg it is; for Wanted, which the leg's own goroutine calls

	reserved bool      // the retry budget has reserved a retry for the moment when the leg is given up
	silence  time.Time // start of the silence while no other engine could take the leg; guarded by upstream's call list
	starved  bool      // it was given up because prefill, which has its KV, does not respond

	// The request under way; its memory is reused.
	request upstream.Request
	fields  []upstream.Field
	body    [1][]byte
}

// free drops what the request that has been sent refers to.
func (l *leg) free() {
	clear(l.fields)
	l.fields, l.body, l.request = l.fields[:0], [1][]byte{}, upstream.Request{}
}

// legs are the legs of an exchange, whose memory is reused. Several goroutines of the
// exchange may call begin at the same time.
type legs struct {
	mu   sync.Mutex
	list []*leg // guarded by mu
	used int    // how many of list are this exchange's; guarded by mu
}

// take returns a leg that is zero but for its memory.
func (l *legs) take() *leg {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.used == len(l.list) {
		l.list = append(l.list, new(leg))
	}
	l.used++
	return l.list[l.used-1]
}

// reset drops what the legs refer to. None runs any more.
func (l *legs) reset() {
	for _, one := range l.list[:l.used] {
		*one = leg{fields: one.fields}
	}
	l.used = 0
}

// beginLeg begins a leg on t, the given try of its phase.
func (env *Env) beginLeg(phase abi.Phase, t engine.Target, try int, id string) *leg {
	l := env.legs.take()
	l.target, l.try = t, try
	l.Leg = env.Journal.BeginLeg(phase, t, try, id)
	return l
}
