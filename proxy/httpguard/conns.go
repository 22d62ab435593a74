package httpguard

import (
	"net"
	"net/http"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// mostConns bounds the open connections of an internal address. If the process has
	// few descriptors, the bound is their number divided by connsShare.
	mostConns  = 4096
	connsShare = 8
	// mostConnsOfOne bounds the connections of one client address; IPv6 addresses are
	// counted by /64. A host with many workers needs a few connections for each.
	mostConnsOfOne = 512
)

// Conns limits the connections of an internal HTTP server, in total and for each client
// address. Connections beyond the limits are closed at once. Safe for concurrent use.
type Conns struct {
	most, mostOfOne int

	mu   sync.Mutex
	open map[net.Conn]netip.Addr // guarded by mu
	of   map[netip.Addr]int      // no value is 0; guarded by mu
}

// NewConns returns a limit for one server.
func NewConns() *Conns {
	most := mostConns
	var files unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil && files.Cur/connsShare < mostConns {
		most = max(1, int(files.Cur/connsShare))
	}
	return &Conns{most: most, mostOfOne: min(mostConnsOfOne, most), open: make(map[net.Conn]netip.Addr), of: make(map[netip.Addr]int)}
}

// Follow is an http.Server's ConnState hook.
func (k *Conns) Follow(c net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		if !k.enter(c) {
			c.Close() // the server sees the close at its first read
		}
	case http.StateClosed, http.StateHijacked:
		k.leave(c)
	}
}

func (k *Conns) enter(c net.Conn) bool {
	from := addressOf(c)
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.open) >= k.most || k.of[from] >= k.mostOfOne {
		return false
	}
	k.open[c] = from
	k.of[from]++
	return true
}

func (k *Conns) leave(c net.Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	from, entered := k.open[c]
	if !entered {
		return
	}
	delete(k.open, c)
	if k.of[from]--; k.of[from] == 0 {
		delete(k.of, from)
	}
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
