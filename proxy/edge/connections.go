package edge

import (
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/inflight"
)

// transport is the protocol below a client's connection.
type transport uint8

const (
	carriedByTCP transport = iota
	carriedByQUIC
	transports // the number of transports
)

// Reasons to refuse a connection: labels of pdproxy_connections_refused_total.
const (
	refusedAll     = "max_connections"
	refusedAddress = "max_connections_per_address"
)

// settleTime is how long a QUIC connection must have had no request before the proxy may
// close it to make room, in a takeover or in a drain. Its last answer must have arrived by
// then, because closing drops unacknowledged bytes. On a TCP connection the kernel delivers
// them after the close.
const settleTime = time.Second

// connections counts open connections, in total and by address, and makes room for new
// ones. At the limit of an address it closes the connection of this address that has had no
// request for the longest time. At the limit of all it does so for the address with the most
// connections without a request: a flood of one client closes no connection of another. If
// all connections are busy it refuses the new one. Safe for concurrent use.
type connections struct {
	// limits returns how many connections may be open in total, and how many from one
	// address, where 0 means no limit. It is called with mu held.
	limits func() (all, perAddress int)

	mu      sync.Mutex
	open    [transports]int                 // guarded by mu
	from    map[netip.Prefix]*clientAddress // addresses with connections; guarded by mu
	idle    idleConns                       // guarded by mu
	tcp     map[*tcpConn]struct{}           // guarded by mu
	refused map[string]uint64               // by reason; guarded by mu
	evicted uint64                          // closed to make room; guarded by mu

	sockets inflight.Group  // open TCP connections, also those that a handler has taken over
	tick    atomic.Int64    // the coarse clock of cutStalled
	balance *balance.Worker // is notified of each connection; may be nil
}

func newConnections(limits func() (all, perAddress int)) *connections {
	c := &connections{
		limits: limits, from: make(map[netip.Prefix]*clientAddress), tcp: make(map[*tcpConn]struct{}),
		refused: map[string]uint64{refusedAll: 0, refusedAddress: 0},
	}
	c.tick.Store(1)
	return c
}

// connection is one counted connection. Safe for concurrent use.
type connection struct {
	all      *connections
	over     transport
	prefix   netip.Prefix   // invalid: the address is unknown
	address  *clientAddress // of prefix; all unknown addresses count as one, without a limit
	end      func()         // closes the connection; nil until ready, and then it is not idle; guarded by all.mu
	requests int            // of QUIC: running streams; guarded by all.mu
	rested   time.Time      // of QUIC: end of the last stream; guarded by all.mu
	idle     bool           // the connection is in all.idle; guarded by all.mu
	gone     bool           // the place has been given back; guarded by all.mu
	node     node[connection]
}

// take counts a new connection of a client. It returns nil if there is no place for it.
func (c *connections) take(client net.Addr, over transport) *connection {
	k := &connection{all: c, over: over, prefix: prefixOf(client)}
	c.mu.Lock()
	victims, reason := c.makeRoom(k.prefix)
	if reason == "" {
		c.add(k)
	} else {
		c.refused[reason]++
	}
	c.mu.Unlock()
	for _, v := range victims {
		v()
	}
	if reason != "" {
		return nil
	}
	return k
}

// makeRoom removes the idle connections whose places a new connection takes. It returns
// functions that close them, or the reason to refuse the new one. c.mu is held.
func (c *connections) makeRoom(prefix netip.Prefix) (ends []func(), reason string) {
	all, perAddress := c.limits()
	if a := c.from[prefix]; a != nil && prefix.IsValid() && perAddress > 0 && a.open >= perAddress {
		v := a.longest()
		if v == nil {
			return nil, refusedAddress
		}
		ends = append(ends, c.evict(v))
	}
	if c.count() >= all {
		v := c.idle.victim()
		if v == nil {
			return ends, refusedAll
		}
		ends = append(ends, c.evict(v))
	}
	return ends, ""
}

// evict removes a connection and returns the function that closes it. c.mu is held. The
// function of a TCP connection returns when its descriptor is free. Otherwise the
// descriptors of closing connections would add up in a flood, until none is left.
func (c *connections) evict(v *connection) func() {
	c.evicted++
	end := v.end
	c.remove(v)
	if v.over == carriedByQUIC { // has no descriptor; the close waits for the connection's goroutine
		return func() { go end() }
	}
	return end
}

// spare closes an idle connection as at the limit of all. It returns false if no
// connection is idle.
func (c *connections) spare() bool {
	c.mu.Lock()
	v := c.idle.victim()
	var end func()
	if v != nil {
		end = c.evict(v)
	}
	c.mu.Unlock()
	if end == nil {
		return false
	}
	end()
	return true
}

// count returns how many connections are open. c.mu is held.
func (c *connections) count() int { return c.open[carriedByTCP] + c.open[carriedByQUIC] }

// maxUnproven bounds the running QUIC handshakes of clients that have not proven their
// address.
const maxUnproven = 64

// unproven returns how many QUIC handshakes may run whose clients have not proven their
// address.
func (c *connections) unproven() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	all, perAddress := c.limits()
	if perAddress > 0 {
		all = perAddress
	}
	return min(all/2, maxUnproven)
}

// add counts k. c.mu is held.
func (c *connections) add(k *connection) {
	c.open[k.over]++
	if c.balance != nil {
		c.balance.Connection(1)
	}
	k.address = c.from[k.prefix]
	if k.address == nil {
		k.address = new(clientAddress)
		c.from[k.prefix] = k.address
	}
	k.address.open++
}

// remove gives the place of k back. c.mu is held.
func (c *connections) remove(k *connection) {
	if k.gone {
		return
	}
	k.gone = true
	k.unlist()
	c.open[k.over]--
	if c.balance != nil {
		c.balance.Connection(-1)
	}
	if k.address.open--; k.address.open == 0 {
		delete(c.from, k.prefix)
	}
}

// leave gives the place back. It may be called more than once.
func (k *connection) leave() {
	k.all.mu.Lock()
	defer k.all.mu.Unlock()
	k.all.remove(k)
}

// ready sets the function that closes the connection. From now on the connection may be
// closed to make room while it has no request.
func (k *connection) ready(end func()) {
	k.all.mu.Lock()
	defer k.all.mu.Unlock()
	k.end, k.rested = end, time.Now()
	k.list()
}

// busy records that a request runs on a TCP connection.
func (k *connection) busy() {
	k.all.mu.Lock()
	defer k.all.mu.Unlock()
	k.unlist()
}

// rest records that no request runs on a TCP connection.
func (k *connection) rest() {
	k.all.mu.Lock()
	defer k.all.mu.Unlock()
	k.list()
}

// begin records a new stream of a QUIC connection.
func (k *connection) begin() {
	k.all.mu.Lock()
	defer k.all.mu.Unlock()
	k.requests++
	k.unlist()
}

// done records the end of a stream of a QUIC connection.
func (k *connection) done() {
	k.all.mu.Lock()
	defer k.all.mu.Unlock()
	if k.requests--; k.requests == 0 {
		k.rested = time.Now()
		k.list()
	}
}

// settled returns the earliest time at which the last answer of a QUIC connection has arrived. If a
// request runs, that is settleTime from now.
func (k *connection) settled() time.Time {
	k.all.mu.Lock()
	defer k.all.mu.Unlock()
	if k.requests > 0 {
		return time.Now().Add(settleTime)
	}
	return k.rested.Add(settleTime)
}

// list adds k to the idle connections. all.mu is held.
func (k *connection) list() {
	if k.idle || k.gone || k.end == nil {
		return
	}
	k.idle = true
	k.address.idle.push(&k.node, k)
	k.all.idle.rank(k.address, 1)
}

// unlist removes k from the idle connections. all.mu is held.
func (k *connection) unlist() {
	if !k.idle {
		return
	}
	k.idle = false
	k.address.idle.remove(&k.node)
	k.all.idle.rank(k.address, -1)
}

// prefixOf returns the network that counts as one client address: one IPv4 address, or the
// IPv6 /64 of one host. It is invalid for other kinds of addresses.
func prefixOf(a net.Addr) netip.Prefix {
	var ip netip.Addr
	switch a := a.(type) {
	case *net.TCPAddr:
		ip = a.AddrPort().Addr()
	case *net.UDPAddr:
		ip = a.AddrPort().Addr()
	}
	ip = ip.Unmap().WithZone("")
	bits := 64
	if ip.Is4() {
		bits = 32
	}
	p, _ := ip.Prefix(bits) // of an invalid address: invalid
	return p
}

// idleConns is the set of the connections that may be closed to make room. Its owner
// guards it. The zero value is empty.
type idleConns struct {
	ranks []chain[clientAddress] // at n: the addresses with n idle connections; at 0: none
	most  int                    // idle connections of the address with the most
}

// rank moves an address that has one idle connection more or less.
func (s *idleConns) rank(a *clientAddress, change int) {
	if a.idling > 0 {
		s.ranks[a.idling].remove(&a.node)
	}
	a.idling += change
	for len(s.ranks) <= a.idling {
		s.ranks = append(s.ranks, chain[clientAddress]{})
	}
	if a.idling > 0 {
		s.ranks[a.idling].push(&a.node, a)
	}
	s.most = max(s.most, a.idling)
	for s.most > 0 && s.ranks[s.most].first == nil {
		s.most--
	}
}

// victim returns the connection to close: of the address with the most idle connections,
// the one that has been idle for the longest time. It returns nil if none may be closed.
// Of addresses with equally many, the first is the one with this number for the longest
// time.
func (s *idleConns) victim() *connection {
	for n := s.most; n > 0; n-- {
		for a := s.ranks[n].first; a != nil; a = a.next {
			if k := a.of.longest(); k != nil {
				return k
			}
		}
	}
	return nil
}

// clientAddress counts the connections of one client address.
type clientAddress struct {
	open   int
	idling int                 // idle connections
	idle   chain[connection]   // the longest idle first
	node   node[clientAddress] // in the rank of idling
}

// longest returns the connection that has been idle for the longest time and may be
// closed, nil if there is none.
func (a *clientAddress) longest() *connection {
	for n := a.idle.first; n != nil; n = n.next {
		if k := n.of; k.over == carriedByTCP || time.Since(k.rested) >= settleTime {
			return k
		}
	}
	return nil
}

// chain is a list of nodes that are parts of their elements. The zero value is empty.
type chain[T any] struct{ first, last *node[T] }

// node is the place of an element in one chain.
type node[T any] struct {
	prev, next *node[T]
	of         *T // the element
}

// push adds the node of an element at the end.
func (c *chain[T]) push(n *node[T], of *T) {
	*n = node[T]{prev: c.last, of: of}
	if c.last != nil {
		c.last.next = n
	} else {
		c.first = n
	}
	c.last = n
}

func (c *chain[T]) remove(n *node[T]) {
	if n.prev != nil {
		n.prev.next = n.next
	} else {
		c.first = n.next
	}
	if n.next != nil {
		n.next.prev = n.prev
	} else {
		c.last = n.prev
	}
	*n = node[T]{}
}
