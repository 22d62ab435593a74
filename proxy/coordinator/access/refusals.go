package access

import (
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// quiet is how long further refusals of an address are counted and not logged.
	quiet = 10 * time.Minute
	// mostNoted bounds the addresses that are remembered. Refusals of more are not
	// logged.
	mostNoted = 1024
)

// refusals remembers which addresses have had their line in the log. Safe for
// concurrent use.
type refusals struct {
	mu    sync.Mutex
	noted map[netip.Addr]time.Time // guarded by mu
}

// first reports whether a refusal of an address is to be logged.
func (r *refusals) first(from netip.Addr, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, known := r.noted[from]; known && now.Sub(at) < quiet {
		return false
	}
	if len(r.noted) >= mostNoted {
		for a, at := range r.noted {
			if now.Sub(at) >= quiet {
				delete(r.noted, a)
			}
		}
	}
	if len(r.noted) >= mostNoted {
		return false
	}
	if r.noted == nil {
		r.noted = make(map[netip.Addr]time.Time)
	}
	r.noted[from] = now
	return true
}

// addressOf is whom a connection is counted for: the peer's IPv4 address or its IPv6
// network of 64 bits, which one host may have for itself. The zero address is that of
// all peers that do not come over TCP.
func addressOf(nc net.Conn) netip.Addr {
	tcp, ok := nc.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	ip := tcp.AddrPort().Addr().Unmap().WithZone("")
	if ip.Is6() {
		if p, err := ip.Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return ip
}
