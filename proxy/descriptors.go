package proxy

import (
	"log/slog"
	"syscall"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// shares are how the process divides its descriptors.
type shares struct {
	clients   int // connections of clients; engines have as many
	both      int // connections of clients and of engines, in all
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
	return divide(uint64(limit.Cur)) //nolint:unconvert // signed on FreeBSD
}

// divide gives operators a sixteenth, and of the rest one half to clients: a client
// whose request runs takes at least one descriptor more, of an engine's connection.
func divide(descriptors uint64) shares {
	n := int(min(descriptors, 1<<30)) // of no limit at all, too
	s := shares{operators: min(max(n/16, 8), mostOperators)}
	s.both = max(n-ownDescriptors-s.operators, 2)
	s.clients = min(s.both/2, mostClients)
	return s
}

// sayTooMany warns of a limit of connections that leaves engines no descriptors.
func (s shares) sayTooMany(l *config.Limits, log *slog.Logger) {
	if l.MaxConnections > s.both {
		log.Warn("limits.max_connections is more than there are descriptors for; raise the hard limit (ulimit -n)",
			"max_connections", l.MaxConnections, "descriptors", s.both)
	}
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
		return all, max(all/4*3, 1)
	}
	return all, perAddress
}
