package quicshare

import (
	"sync"
	"sync/atomic"

	"golang.org/x/net/ipv4"
)

// inboxPackets is how many forwarded packets wait for the reader at most; more are
// dropped, as a full socket buffer would.
const inboxPackets = 512

// inbox is the packets that other lanes handed in and that were not read yet. One
// goroutine puts, another takes.
type inbox struct {
	filled atomic.Int32 // of ring, also when mu is not held
	mu     sync.Mutex
	ring   [inboxPackets]*held // made when first needed; guarded by mu
	first  int                 // guarded by mu
}

// held is a packet in memory of its own.
type held struct {
	packet
	memory [16 + maxZone + maxControl + maxPacket]byte
}

// put keeps a copy of p; false: there is no room.
func (b *inbox) put(p *packet) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := int(b.filled.Load())
	if n == inboxPackets {
		return false
	}
	slot := &b.ring[(b.first+n)%inboxPackets]
	if *slot == nil {
		*slot = new(held)
	}
	h := *slot
	rest := h.memory[:0]
	keep := func(src []byte) []byte {
		start := len(rest)
		rest = append(rest, src...)
		return rest[start:]
	}
	h.packet = packet{ip: keep(p.ip), zone: keep(p.zone), control: keep(p.control), data: keep(p.data), port: p.port, hops: p.hops}
	b.filled.Store(int32(n + 1))
	return true
}

// take fills ms with packets and hops with how often each was forwarded, and
// returns how many.
func (b *inbox) take(ms []ipv4.Message, hops []uint8) int {
	if b.filled.Load() == 0 {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	filled := int(b.filled.Load())
	n := min(filled, len(ms), len(hops))
	for i := range n {
		h := b.ring[b.first]
		h.message(&ms[i])
		hops[i] = h.hops
		b.first = (b.first + 1) % inboxPackets
	}
	b.filled.Store(int32(filled - n))
	return n
}
