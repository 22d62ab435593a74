package attempt

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/sidecar"
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
	watched watched       // fields that Evict and Lingers read from other goroutines
	needed  needs         // nil for an encode leg

	reserved bool      // the retry budget has reserved a retry for the moment when the leg is given up
	silence  time.Time // start of the silence while no other engine could take the leg; guarded by upstream's call list
	starved  bool      // it was given up because prefill, which has its KV, does not respond

	// The running request. Later requests reuse its memory.
	request upstream.Request
	fields  []upstream.Field
	body    [1][]byte
}

// free drops all references of the request after it has been sent.
func (l *leg) free() {
	clear(l.fields)
	l.fields, l.body, l.request = l.fields[:0], [1][]byte{}, upstream.Request{}
}

// legs holds the legs of an exchange, and reuses their memory for the next exchange. Several
// goroutines of the exchange may call take at the same time.
type legs struct {
	mu   sync.Mutex
	list []*leg // guarded by mu
	used int    // how many of list are this exchange's; guarded by mu
}

// take returns a leg without content. Its slices may have capacity.
func (l *legs) take() *leg {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.used == len(l.list) {
		l.list = append(l.list, new(leg))
	}
	l.used++
	return l.list[l.used-1]
}

// reset drops all references of the legs. All legs must have ended.
func (l *legs) reset() {
	for _, one := range l.list[:l.used] {
		*one = leg{fields: one.fields}
	}
	l.used = 0
}

// watched holds the facts of a running leg for other goroutines: those that probe engines and
// evict calls. The fields do not change while the leg runs.
type watched struct {
	services *Services
	config   *config.Config
	route    *sidecar.Route
	winner   *atomic.Uint32 // of concurrentLegs; nil unless both legs run at the same time
	prefill  engine.Target  // of the attempt
	fetches  bool           // the leg may be waiting for prefill's KV
	handed   time.Time      // when decode could begin; zero: not known
	readBy   time.Time      // decode must have read prefill's blocks by then; zero: any time
	lease    time.Duration  // of prefill's blocks
	compute  int64          // tokens that prefill computes
}
