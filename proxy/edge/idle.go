package edge

import "time"

// idleConns is the set of the connections that may be closed to make room. Its owner
// guards it. The zero value is empty.
type idleConns struct {
	ranks []chain[clientAddress] // at n: the addresses with n idle connections; at 0: none
	most  int                    // idle connections of the address with the most
}

// push adds an idle connection.
func (s *idleConns) push(k *connection) {
	k.address.idle.push(&k.node, k)
	s.rank(k.address, 1)
}

// remove removes an idle connection.
func (s *idleConns) remove(k *connection) {
	k.address.idle.remove(&k.node)
	s.rank(k.address, -1)
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
