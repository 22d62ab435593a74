package proxy

import (
	"syscall"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// shares are how the process divides its descriptors.
type shares struct {
	clients   int // connections of clients; engines have as many
	operators int // connections of the admin address
}

const (
	// ownDescriptors are those that belong to no connection: listening sockets,
	// files, logs, links to other processes, probes of engines.
	ownDescriptors = 48
	// mostOperators is how many connections the admin address takes at most.
	mostOperators = 256
	// mostClients bounds the memory of idle connections where descriptors do not:
	// one takes up to 17 KiB.
	mostClients = 65536
)

// descriptorShares divides the soft limit of descriptors, which Go raises to the hard
// limit at the start of every program.
func descriptorShares() shares {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return divide(1024)
	}
	return divide(uint64(limit.Cur))
}

// divide gives operators a sixteenth, and of the rest one half to clients: a client
// whose request runs takes at least one descriptor more, of an engine's connection.
func divide(descriptors uint64) shares {
	n := int(min(descriptors, 4*mostClients))
	s := shares{operators: min(max(n/16, 8), mostOperators)}
	s.clients = min(max((n-ownDescriptors-s.operators)/2, 1), mostClients)
	return s
}

// connectionLimits are how many connections clients may have, in all and from one
// address, 0: no cap.
func connectionLimits(l *config.Limits, s shares) (all, perAddress int) {
	all = l.MaxConnections
	if all == 0 {
		all = s.clients
	}
	switch perAddress = l.MaxConnectionsPerAddress; {
	case perAddress < 0:
		return all, 0
	case perAddress == 0:
		return all, max(all/4, 1)
	}
	return all, perAddress
}
