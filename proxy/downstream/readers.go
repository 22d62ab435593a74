package downstream

import (
	"container/heap"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// sweepEvery is how often the bodies that are being read are checked.
const sweepEvery = time.Second

// slowBehind is how far a body must be behind to be slow. A body that is less behind may
// have arrived: a busy proxy has not read it yet.
const slowBehind = time.Second

// readers has the bodies that are being read. At most limits.max_reading are read at a
// time, and only a share of them belongs to one client. One more body takes the place of
// another one. Safe for concurrent use. The zero value is empty.
//
// The heaps find the slowest body. A body enters the heaps only when a limit may be reached,
// because most bodies are complete before that.
type readers struct {
	mu       sync.Mutex
	unsorted []*incoming            // guarded by mu; the bodies outside of the heaps
	all      readerHeap             // guarded by mu
	clients  map[string]*readerHeap // guarded by mu; none is empty
	sizes    clientHeap             // guarded by mu; the values of clients
	spare    []*readerHeap          // guarded by mu; empty ones, for new clients
	armed    bool                   // guarded by mu; a sweep is scheduled
	cfg      *config.Config         // guarded by mu; the configuration of the last body
	reading  int                    // guarded by mu; Limits.Reading of cfg
	share    int                    // guarded by mu; Limits.ReadingShare of cfg
}

// enter takes a place for b, whose reading begins now. While no limit can be reached, the
// bodies need no order.
func (l *readers) enter(b *incoming, now time.Time, cfg *config.Config) {
	var stopped []*incoming
	l.mu.Lock()
	if l.cfg != cfg {
		l.cfg, l.reading, l.share = cfg, cfg.Limits.Reading(), cfg.Limits.ReadingShare()
	}
	most := len(l.unsorted) // no client has more bodies than that
	if len(l.sizes) > 0 {
		most += len(l.sizes[0].list)
	}
	if len(l.unsorted)+len(l.all.list) >= l.reading || l.share > 0 && most >= l.share {
		stopped = l.makeRoom(b.client, now)
	}
	b.due = now.UnixNano()
	l.unsorted = append(l.unsorted, b)
	b.all = len(l.unsorted)
	if !l.armed {
		l.armed = true
		time.AfterFunc(sweepEvery, l.sweep)
	}
	l.mu.Unlock()
	for _, b := range stopped {
		b.stop(ErrReading)
	}
}

// leave gives up the place of b, if b has one.
func (l *readers) leave(b *incoming) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case b.all == 0:
	case b.own == 0:
		end := len(l.unsorted) - 1
		last := l.unsorted[end]
		l.unsorted[b.all-1], last.all = last, b.all
		l.unsorted[end], l.unsorted = nil, l.unsorted[:end]
		b.all = 0
	default:
		l.remove(b)
	}
}

// makeRoom sorts the bodies, and takes the places of those that must stop if one more body of
// client begins; mu is held.
func (l *readers) makeRoom(client string, now time.Time) (stopped []*incoming) {
	for i, b := range l.unsorted {
		own := l.clients[b.client]
		if own == nil {
			own = l.newClient(b.client)
		}
		heap.Push(&l.all, b)
		heap.Push(own, b)
		heap.Fix(&l.sizes, own.at)
		l.unsorted[i] = nil
	}
	l.unsorted = l.unsorted[:0]
	for l.share > 0 && l.clients[client] != nil && len(l.clients[client].list) >= l.share {
		stopped = append(stopped, l.take(l.slowest(l.clients[client], now)))
	}
	for len(l.all.list) >= l.reading {
		stopped = append(stopped, l.take(l.unfair(now, l.share > 0)))
	}
	return stopped
}

// newClient makes a heap for a client without one; mu is held.
func (l *readers) newClient(client string) *readerHeap {
	own := &readerHeap{own: true}
	if n := len(l.spare); n > 0 {
		own, l.spare = l.spare[n-1], l.spare[:n-1]
	}
	if l.clients == nil {
		l.clients = make(map[string]*readerHeap)
	}
	l.clients[client] = own
	heap.Push(&l.sizes, own)
	return own
}

// unfair returns the body that has the least right to its place: the body that is most
// behind, if that one is slow. While no body is slow, it is a body of the client that
// sends most bodies, so that a flood of one client ends no body of another. Without
// limits for clients, all bodies count as those of one client. mu is held.
func (l *readers) unfair(now time.Time, perClient bool) *incoming {
	b := l.slowest(&l.all, now)
	if !perClient || now.UnixNano()-b.due >= int64(slowBehind) {
		return b
	}
	return l.slowest(l.sizes[0], now)
}

// slowest returns the body of h that is most behind; mu is held. A body that has received
// bytes since its place was computed gets its new place first.
func (l *readers) slowest(h *readerHeap, now time.Time) *incoming {
	for {
		b := h.list[0]
		// Only the time in which the reader waited for the client counts.
		due := now.UnixNano() - int64(b.waiting(now.UnixNano())) + b.got.Load()*int64(time.Second)/fairRate
		if due <= b.due {
			return b
		}
		b.due = due
		heap.Fix(&l.all, b.all-1)
		heap.Fix(l.clients[b.client], b.own-1)
	}
}

// take removes b from the heaps and returns it; mu is held.
func (l *readers) take(b *incoming) *incoming {
	l.remove(b)
	return b
}

// remove removes b from the heaps; mu is held.
func (l *readers) remove(b *incoming) {
	heap.Remove(&l.all, b.all-1)
	own := l.clients[b.client]
	heap.Remove(own, b.own-1)
	b.all, b.own = 0, 0
	if len(own.list) > 0 {
		heap.Fix(&l.sizes, own.at)
		return
	}
	heap.Remove(&l.sizes, own.at)
	delete(l.clients, b.client)
	if len(l.spare) < 64 {
		l.spare = append(l.spare, own)
	}
}

// sweep stops the bodies that come too slowly.
func (l *readers) sweep() {
	now := time.Now().UnixNano()
	type slow struct {
		b   *incoming
		why *openai.Error
	}
	var stopped []slow
	l.mu.Lock()
	for _, list := range [][]*incoming{l.unsorted, l.all.list} {
		for _, b := range list {
			if why := b.tooSlow(now, l.cfg); why != nil {
				stopped = append(stopped, slow{b, why})
			}
		}
	}
	if l.armed = len(l.unsorted)+len(l.all.list) > 0; l.armed {
		time.AfterFunc(sweepEvery, l.sweep)
	}
	l.mu.Unlock()
	for _, s := range stopped {
		l.leave(s.b)
		s.b.stop(s.why)
	}
}

// len returns how many bodies are being read.
func (l *readers) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.unsorted) + len(l.all.list)
}

// readerHeap implements heap.Interface. The body that is most behind is first.
type readerHeap struct {
	list []*incoming
	own  bool // the heap of one client
	at   int  // of the heap of one client: its place in the clientHeap
}

// Len implements heap.Interface.
func (h *readerHeap) Len() int { return len(h.list) }

// Less implements heap.Interface.
func (h *readerHeap) Less(i, j int) bool { return h.list[i].due < h.list[j].due }

// Swap implements heap.Interface.
func (h *readerHeap) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	h.place(i)
	h.place(j)
}

// place sets the place of the body at i, counted from 1.
func (h *readerHeap) place(i int) {
	if h.own {
		h.list[i].own = i + 1
	} else {
		h.list[i].all = i + 1
	}
}

// Push implements heap.Interface.
func (h *readerHeap) Push(v any) {
	h.list = append(h.list, v.(*incoming))
	h.place(len(h.list) - 1)
}

// Pop implements heap.Interface.
func (h *readerHeap) Pop() any {
	end := len(h.list) - 1
	b := h.list[end]
	h.list[end], h.list = nil, h.list[:end]
	return b
}

// clientHeap implements heap.Interface. The client with the most bodies is first.
type clientHeap []*readerHeap

// Len implements heap.Interface.
func (h clientHeap) Len() int { return len(h) }

// Less implements heap.Interface.
func (h clientHeap) Less(i, j int) bool { return len(h[i].list) > len(h[j].list) }

// Swap implements heap.Interface.
func (h clientHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

// Push implements heap.Interface.
func (h *clientHeap) Push(v any) {
	own := v.(*readerHeap)
	own.at = len(*h)
	*h = append(*h, own)
}

// Pop implements heap.Interface.
func (h *clientHeap) Pop() any {
	end := len(*h) - 1
	own := (*h)[end]
	(*h)[end], *h = nil, (*h)[:end]
	return own
}
