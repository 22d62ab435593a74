package node

import (
	"cmp"
	"context"
	"net"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/engine/moriio"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// Options defines the role of one process, and holds the open sockets that the process
// received from its supervisor or from its predecessor. The zero value is a process that
// does everything and opens its own sockets.
type Options struct {
	Role    Role
	Slot    int    // number of the process among those of its role
	Version string // of the program, for GET /version
	// Dir is the folder in which the processes of a fleet meet; nil for none. The
	// caller closes it after Serve has returned.
	Dir *privatedir.Dir

	// Open sockets of the public and the admin address.
	Sockets edge.Sockets
	// Open sockets of other addresses. The node opens a socket for each configured address whose
	// field is nil.
	Fleet   net.Listener // fleet.listen
	Metrics net.Listener // metrics.listen
	EPP     net.Listener // epp.listen
	MoRIIO  net.Listener // discovery.moriio.listen
	Storage net.Listener // discovery.trtllm.cluster_uri, if that is http

	Takeover  Takeover // nil: the node has no predecessor and no process can replace it
	OnServing func()   // called once, when the node accepts connections; may be nil
	OnReady   func()   // called once, when the node can serve a request for the first time; may be nil
}

// Takeover connects a node with its predecessor and its successor. The predecessor is
// the process whose sockets the node received. The successor receives the sockets of
// the node.
type Takeover interface {
	// PredecessorReady reports whether the node has a predecessor that could serve
	// requests when it handed over its sockets.
	PredecessorReady() bool
	// Run makes the predecessor stop accepting connections. Then it waits for a successor until ctx
	// ends. It sends the result of offer to the successor, and calls stopAccepting when the
	// successor accepts connections. An error means that the node must stop, because the
	// predecessor continues to serve.
	Run(ctx context.Context, offer func() (takeover.Offer, error), stopAccepting func()) error
}

// Role is the role of a process in a fleet.
type Role string

// The roles of a process.
const (
	RoleSingle      Role = ""            // everything in one process
	RoleCoordinator Role = "coordinator" // places requests, finds engines, serves operators
	RoleWorker      Role = "worker"      // serves clients
)

// Socket is an address on which the processes of a fleet accept connections.
type Socket struct {
	// Name consists of the configuration key and the configured address, with a space
	// between them. A successor with another address in its configuration does not use
	// the socket.
	Name string
	// Exclusive: only one process may accept on the socket. Engines register there, and
	// each of two processes would learn of a part of the engines.
	Exclusive bool
}

// FleetSockets returns the sockets that the supervisor of a fleet opens for its
// processes. A unix socket of fleet.listen is not one of them: the coordinator opens it.
func FleetSockets(cfg *config.Config) []Socket {
	sockets := []Socket{{Name: publicSocket(cfg)}}
	if cfg.EPP.Listen != "" {
		sockets = append(sockets, Socket{Name: eppSocket(cfg)})
	}
	if cfg.Fleet.Coordinator == "" {
		sockets = append(sockets, Socket{Name: adminSocket(cfg)})
		if cfg.Metrics.Listen != "" {
			sockets = append(sockets, Socket{Name: metricsSocket(cfg)})
		}
		for _, name := range []string{moriioSocket(cfg), storageSocket(cfg)} {
			if name != "" {
				sockets = append(sockets, Socket{Name: name, Exclusive: true})
			}
		}
	}
	if cfg.Fleet.Listen != "" && !isUnix(cfg.Fleet.Listen) {
		sockets = append(sockets, Socket{Name: fleetSocket(cfg)})
	}
	return sockets
}

func publicSocket(cfg *config.Config) string  { return "server.listen " + cfg.Server.Listen }
func adminSocket(cfg *config.Config) string   { return "admin.listen " + cfg.Admin.Listen }
func metricsSocket(cfg *config.Config) string { return "metrics.listen " + cfg.Metrics.Listen }
func eppSocket(cfg *config.Config) string     { return "epp.listen " + cfg.EPP.Listen }
func fleetSocket(cfg *config.Config) string   { return "fleet.listen " + cfg.Fleet.Listen }

// moriioSocket returns "" if no engine can register.
func moriioSocket(cfg *config.Config) string {
	address, err := moriio.Address(cfg.Discovery.MoRIIO.Listen)
	if err != nil {
		return ""
	}
	return "discovery.moriio.listen " + address
}

// storageSocket returns "" if no TensorRT-LLM worker can register.
func storageSocket(cfg *config.Config) string {
	address, served := discovery.StorageAddress(cfg.Discovery.TRTLLM)
	if !served {
		return ""
	}
	return "discovery.trtllm.cluster_uri " + address
}

// UseSockets opens a listener for each of the given sockets that the role needs, and
// stores it in o. The listeners are copies: the caller still closes the given sockets.
// After an error o holds no open listener.
//
// A process of a fleet gets the sockets that its supervisor opened. They fit by their key
// alone: the file may have other addresses by now, which apply after a restart of the fleet.
func (o *Options) UseSockets(cfg *config.Config, given []takeover.Socket) error {
	wanted := map[string]*net.Listener{}
	name := func(socket string) string {
		if o.Role == RoleSingle {
			return socket
		}
		key, _, _ := strings.Cut(socket, " ")
		return key
	}
	if o.Role != RoleCoordinator {
		wanted[name(publicSocket(cfg))] = &o.Sockets.Public
		wanted[name(eppSocket(cfg))] = &o.EPP
	}
	if o.Role != RoleWorker {
		wanted[name(adminSocket(cfg))] = &o.Sockets.Admin
		wanted[name(fleetSocket(cfg))] = &o.Fleet
		wanted[name(metricsSocket(cfg))] = &o.Metrics
		wanted[name(moriioSocket(cfg))] = &o.MoRIIO
		wanted[name(storageSocket(cfg))] = &o.Storage
	}
	o.Sockets.Only = o.Role != RoleSingle
	for _, socket := range given {
		field := wanted[name(socket.Name)]
		if field == nil {
			continue
		}
		l, err := socket.Listener()
		if err != nil {
			o.CloseSockets()
			return err
		}
		*field = l
	}
	return nil
}

// CloseSockets closes the listeners of a node that never serves.
func (o *Options) CloseSockets() {
	for _, l := range []net.Listener{o.Sockets.Public, o.Sockets.Admin, o.Fleet, o.Metrics, o.EPP, o.MoRIIO, o.Storage} {
		if l != nil {
			l.Close()
		}
	}
}

// share returns the configuration that this process uses if the host has that many
// workers. limits.max_exchanges, limits.max_reading, limits.queue and
// limits.buffer_memory are divided by the number of workers. The other limits apply to
// one client or one request, and the retry budget is a share of the requests of one
// process.
func (o *Options) share(cfg *config.Config, workers int) *config.Config {
	if o.Role != RoleWorker {
		return cfg
	}
	own := *cfg
	own.Limits = cfg.Limits.Share(workers, config.ByteSize(max(1, bufferMemory(cfg)/int64(max(1, workers)))))
	return &own
}

// bufferMemory returns limits.buffer_memory or its default, in bytes.
func bufferMemory(cfg *config.Config) int64 {
	return cmp.Or(int64(cfg.Limits.BufferMemory), buffer.DefaultLimit())
}

// shareEngine divides the max_conns of an engine in the same way.
func (o *Options) shareEngine(spec config.Engine, workers int) config.Engine {
	if o.Role == RoleWorker {
		spec.MaxConns = config.Divide(spec.MaxConns, workers)
	}
	return spec
}
