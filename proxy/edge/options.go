package edge

import (
	"log/slog"
	"net"
	"time"

	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// Sockets are listeners that are already open. A process gets them from the process that
// has started it, or from its predecessor.
type Sockets struct {
	Public net.Listener // nil: Listen opens server.listen
	Admin  net.Listener // nil: Listen opens admin.listen
	// Only makes Listen open no TCP socket itself: a worker has no admin address, a
	// coordinator no public one.
	Only bool
}

// Options configure a Server. Sockets may be the zero value. The comment of a field states if
// another field may be nil.
type Options struct {
	Sockets Sockets
	Certs   *Certs // nil: no TLS
	// Limits returns the limits that are in force, for each new connection. Safe for
	// concurrent use.
	Limits func() *config.Limits
	// Running returns how many requests run. Safe for concurrent use.
	Running func() int
	// OnDrain is called when the server begins to drain.
	OnDrain func()
	// CutGrace is the time that handlers have to inform their clients when the drain's limit has
	// ended the contexts of the requests, with the cause downstream.ErrDraining.
	CutGrace time.Duration
	// QUICDir is the directory of the processes that share the UDP port of HTTP/3. nil:
	// this process has the port alone.
	QUICDir *privatedir.Dir
	// Balance is notified of each connection of a client. nil: no other worker has the public
	// socket.
	Balance *balance.Worker
	Log     *slog.Logger
}

// Limits bound how long Serve takes to return. They are functions because a reload may
// change them.
type Limits struct {
	Drain     func() time.Duration // after the context of Serve has ended
	Remaining func() time.Duration // after StopAccepting
}
