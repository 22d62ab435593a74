package turns

import (
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

const (
	// tendEvery is the longest time between two looks at the memory of the engines while they
	// retain KV, and tendSoonest the shortest time between two ticks.
	tendEvery   = time.Second
	tendSoonest = 50 * time.Millisecond
	// fullUsage is the share of an engine's KV memory in use above which the keeper frees KV. A
	// vLLM engine that reaches 1 preempts requests.
	fullUsage = 0.9
)

// schedule makes tick run at due, or earlier.
func (k *Keeper[V]) schedule(due time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.o.Clock.Now()
	if latest := now.Add(tendEvery); due.After(latest) {
		due = latest
	}
	if soonest := now.Add(tendSoonest); due.Before(soonest) {
		due = soonest
	}
	if k.stop != nil {
		if !due.Before(k.due) {
			return
		}
		k.stop()
	}
	k.due, k.stop = due, k.o.Clock.AfterFunc(due.Sub(now), k.tick)
}

// tick frees the KV whose time has ended, and KV of engines whose memory is short.
func (k *Keeper[V]) tick() {
	now := k.o.Clock.Now()
	k.mu.Lock()
	k.stop = nil
	k.mu.Unlock()
	ended, lost, next := k.shelf.Sweep(now)
	k.leaveAll(ended, Expired, now)
	k.loseAll(lost)
	k.relieve(now)
	if !next.IsZero() {
		k.schedule(next)
	}
}

// relieve frees the least likely KV of each engine whose KV memory is used above fullUsage: as many
// tokens as are above, or the KV of one turn if the size of the memory is unknown. KV whose next turn is
// certain stays. Each report of an engine counts once, because a report does not show the effect of later calls.
func (k *Keeper[V]) relieve(now time.Time) {
	for c, report := range k.full(now) {
		above := int((report.Usage - fullUsage) * float32(report.Capacity))
		k.leaveAll(k.shelf.Evict(func(o *conversation.OnShelf[V]) bool {
			return o.Likelihood != abi.FullLikelihood && k.o.Counter(o.Value) == c
		}, above, now), Evicted, now)
	}
}

// full returns the engines that retain KV and whose newest report shows that memory is short.
func (k *Keeper[V]) full(now time.Time) map[*load.Counter]load.Report {
	counters := make(map[*load.Counter]bool)
	k.shelf.Each(func(o *conversation.OnShelf[V]) { counters[k.o.Counter(o.Value)] = true })
	delete(counters, nil)
	var full map[*load.Counter]load.Report
	k.mu.Lock()
	defer k.mu.Unlock()
	for c := range k.relieved {
		if !counters[c] {
			delete(k.relieved, c)
		}
	}
	for c := range counters {
		r, ok := c.Reported()
		if !ok || !r.Counts(now) || r.Usage <= fullUsage || !r.At.After(k.relieved[c]) {
			continue
		}
		if full == nil {
			full = make(map[*load.Counter]load.Report)
		}
		full[c], k.relieved[c] = r, r.At
	}
	return full
}
