package quicshare

import (
	"sync"
	"sync/atomic"

	"golang.org/x/net/ipv4"
)

// inboxPackets is the maximum number of forwarded packets that wait for the reader.
// Further packets are dropped, as at a full socket buffer.
const inboxPackets = 512

// inbox holds the packets from other members that the reader has not read yet. One
// goroutine calls put, another calls take.
type inbox struct {
	filled atomic.Int32 // packets in ring; may be read without mu
	mu     sync.Mutex
	ring   [inboxPackets]*storedPacket // slots are allocated on first use; guarded by mu
	first  int                         // guarded by mu
}

// storedPacket is a packet with its own memory.
type storedPacket struct {
	packet
	memory [16 + maxZone + maxControl + maxPacket]byte
}

// put stores a copy of p. It returns false if the inbox is full.
func (b *inbox) put(p *packet) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := int(b.filled.Load())
	if n == inboxPackets {
		return false
	}
	slot := &b.ring[(b.first+n)%inboxPackets]
	if *slot == nil {
		*slot = new(storedPacket)
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

// take fills ms with packets, and hops with how often each packet was forwarded. It
// returns the number of packets.
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
