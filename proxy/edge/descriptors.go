package edge

import (
	"log/slog"
	"syscall"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// shares is the division of the process's descriptors.
type shares struct {
	clients   int // connections of clients; engines have as many
	both      int // connections of clients and of engines together
	operators int // connections of the admin address
}

const (
	// ownDescriptors is the number of descriptors that belong to no connection of a
	// client or leg: listening sockets, files, logs, links to other processes, probes
	// of engines.
	ownDescriptors = 48
	// maxOperators is the largest number of connections at the admin address.
	maxOperators = 256
	// maxClients bounds the memory of idle connections if descriptors do not. One
	// connection takes up to 17 KiB.
	maxClients = 65536
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

// divide gives operators a sixteenth, and clients half of the rest, because the running
// request of a client needs at least one more descriptor, for an engine's connection.
func divide(descriptors uint64) shares {
	n := int(min(descriptors, 1<<30)) // the limit may be infinite
	s := shares{operators: min(max(n/16, 8), maxOperators)}
	s.both = max(n-ownDescriptors-s.operators, 2)
	s.clients = min(s.both/2, maxClients)
	return s
}

// warnTooMany warns about a limit of connections that leaves no descriptors for engines.
func (s shares) warnTooMany(l *config.Limits, log *slog.Logger) {
	if l.MaxConnections > s.both {
		log.Warn("limits.max_connections is more than there are descriptors for; raise the hard limit (ulimit -n)",
			"max_connections", l.MaxConnections, "descriptors", s.both)
	}
}

// connectionLimits returns how many connections clients may have: in total, and from one
// address, where 0 means no limit.
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
