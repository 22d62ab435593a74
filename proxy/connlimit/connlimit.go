// Package connlimit limits the open connections of an internal address: all except the public
// address and the admin address, which package edge limits.
//
// The decisions behind this package are in docs/design/edge.md.
package connlimit

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxConns bounds the open connections of an internal address. If the process has
	// few descriptors, the bound is their number divided by connsShare.
	maxConns   = 4096
	connsShare = 8
	// maxConnsOfOne bounds the connections of one client address; IPv6 addresses are
	// counted by /64. A host with many workers needs a few connections for each.
	maxConnsOfOne = 512
)

// Limit limits the connections of one listener, in total and for each client address. At the
// limit of an address, the connection of this address that has been idle for the longest time
// makes room for a new one. At the limit of all, it is such a connection of the address with
// the most idle connections: a flood of one address closes no connection of an address with
// fewer. If all connections are busy, the new one is refused. Safe for concurrent use.
type Limit struct {
	most, maxOfOne int

	mu   sync.Mutex
	open map[*Place]struct{}        // guarded by mu
	of   map[netip.Addr]*peerTotals // addresses with connections; guarded by mu
}

// peerTotals counts the connections of one client address. Limit.mu guards it.
type peerTotals struct {
	open int
	idle int // valid during one search for a victim
}

// New returns a limit for one listener.
func New() *Limit {
	most := maxConns
	var files unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil && files.Cur/connsShare < maxConns {
		most = max(1, int(files.Cur/connsShare))
	}
	return &Limit{most: most, maxOfOne: min(maxConnsOfOne, most), open: make(map[*Place]struct{}), of: make(map[netip.Addr]*peerTotals)}
}

// Place is the place of one open connection. It is idle until Begin, and again after as many
// calls of End. The methods are safe for concurrent use.
type Place struct {
	limit  *Limit
	conn   net.Conn
	from   netip.Addr
	busy   atomic.Int64 // requests that run
	rested atomic.Int64 // when the connection became idle, in nanoseconds since epoch
}

// epoch is the start of a monotonic clock.
var epoch = time.Now()

// Enter gives a new connection a place. It may close an idle connection to make room. It
// returns nil if all places are busy; the caller then closes c. The owner of c calls Leave when
// c is closed.
func (l *Limit) Enter(c net.Conn) *Place {
	p := &Place{limit: l, conn: c, from: addressOf(c)}
	p.rested.Store(int64(time.Since(epoch)))
	l.mu.Lock()
	defer l.mu.Unlock()
	var victim *Place
	switch totals := l.of[p.from]; {
	case totals != nil && totals.open >= l.maxOfOne:
		victim = l.longestIdle(p.from)
	case len(l.open) >= l.most:
		victim = l.longestIdle(l.maxIdle())
	default:
		l.add(p)
		return p
	}
	if victim == nil {
		return nil
	}
	l.remove(victim)
	go victim.conn.Close() // the close of a TLS connection may wait 5 s for a peer that does not read
	l.add(p)
	return p
}

// maxIdle returns the address with the most idle connections. The caller holds mu.
func (l *Limit) maxIdle() (address netip.Addr) {
	for _, t := range l.of {
		t.idle = 0
	}
	most := 0
	for p := range l.open {
		if p.busy.Load() > 0 {
			continue
		}
		t := l.of[p.from]
		if t.idle++; t.idle > most {
			most, address = t.idle, p.from
		}
	}
	return address
}

// longestIdle returns the connection of an address that has been idle for the longest time, nil
// if all are busy. The caller holds mu.
func (l *Limit) longestIdle(from netip.Addr) (longest *Place) {
	for p := range l.open {
		if p.from == from && p.busy.Load() <= 0 && (longest == nil || p.rested.Load() < longest.rested.Load()) {
			longest = p
		}
	}
	return longest
}

// add counts p. The caller holds mu.
func (l *Limit) add(p *Place) {
	l.open[p] = struct{}{}
	if l.of[p.from] == nil {
		l.of[p.from] = new(peerTotals)
	}
	l.of[p.from].open++
}

// remove stops counting p. The caller holds mu.
func (l *Limit) remove(p *Place) {
	if _, entered := l.open[p]; !entered {
		return
	}
	delete(l.open, p)
	if t := l.of[p.from]; t.open > 1 {
		t.open--
	} else {
		delete(l.of, p.from)
	}
}

// Len returns the number of open connections.
func (l *Limit) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open)
}

// Begin records that a request of the connection runs: the connection is not idle.
func (p *Place) Begin() { p.busy.Add(1) }

// End records the end of a request.
func (p *Place) End() {
	p.Touch()
	p.busy.Add(-1)
}

// Touch restarts the time for which the connection has been idle.
func (p *Place) Touch() { p.rested.Store(int64(time.Since(epoch))) }

// Leave gives the place back. It may be called more than once.
func (p *Place) Leave() {
	p.limit.mu.Lock()
	defer p.limit.mu.Unlock()
	p.limit.remove(p)
}

// addressOf returns the address of the peer. Peers without an address share the zero
// address.
func addressOf(c net.Conn) netip.Addr {
	from, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return netip.Addr{}
	}
	ip := from.Addr().Unmap().WithZone("")
	if ip.Is6() && !ip.IsLoopback() {
		if network, err := ip.Prefix(64); err == nil {
			return network.Addr()
		}
	}
	return ip
}
