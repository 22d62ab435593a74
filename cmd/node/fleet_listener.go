package node

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/selectapi"
)

// fleetListener serves fleet.listen. TensorRT-LLM's fleet workers send HTTP requests
// there; a coordinator's own workers connect there too. nil: fleet.listen is empty.
type fleetListener struct {
	handler  *selectapi.Handler // of the HTTP requests
	listener net.Listener
	http     net.Listener    // the HTTP connections of listener
	queue    *access.Queue   // feeds http; nil in a coordinator, whose server of workers does it
	gate     *access.Gate    // authenticates connections before they enter queue
	serving  context.Context // ends when a successor serves fleet.listen
	stop     context.CancelFunc
}

// retire leaves the listener to a successor.
func (f *fleetListener) retire() {
	if f != nil {
		f.stop()
	}
}

// opened returns the listener, nil without one.
func (f *fleetListener) opened() net.Listener {
	if f == nil {
		return nil
	}
	return f.listener
}

// selectShare is the divisor of limits.buffer_memory that gives the memory for the bodies at
// fleet.listen. It is separate, so that no caller there takes the memory of clients.
const selectShare = 4

// listenFleet opens fleet.listen if it is configured and given is nil.
func (n *Node) listenFleet(cfg *config.Config, a fleetAccess, given net.Listener) (err error) {
	if cfg.Fleet.Listen == "" {
		return nil
	}
	if given == nil {
		if given, err = listenAt(cfg.Fleet.Listen); err != nil {
			return err
		}
	}
	n.fleet = &fleetListener{listener: given, handler: selectapi.New(selectapi.Options{
		Local: n.local, Registry: n.registry, Index: n.knowledge.state.Index, Fallback: n.metrics.Fallback,
		Token: a.token, PlainHTTP: cfg.Fleet.PlainHTTP, Address: given.Addr(), Hosts: cfg.Admin.InternalHosts(cfg.Fleet.Listen, cfg.Fleet.Advertise),
		Version: n.options.Version, Memory: bufferMemory(cfg) / selectShare, Log: n.log,
		Leading: func(do func()) bool {
			if n.leader != nil {
				return n.leader.member.Leading(do)
			}
			do()
			return true
		},
	})}
	if n.leader != nil { // its workers connect there too
		n.fleet.http = n.leader.workers.Others(given.Addr())
	} else {
		n.fleet.queue, n.fleet.gate = access.NewQueue(), n.newGate(a)
		n.fleet.http = n.fleet.queue.Listener(given.Addr())
	}
	n.fleet.serving, n.fleet.stop = context.WithCancel(context.Background())
	return nil
}

// serveFleet serves fleet.listen until ctx ends or a successor does.
func (n *Node) serveFleet(ctx context.Context) {
	if n.fleet == nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer n.fleet.stop()
	stop := context.AfterFunc(n.fleet.serving, cancel)
	defer stop()
	if n.fleet.queue != nil {
		var accepting sync.WaitGroup
		defer accepting.Wait()
		accepting.Go(func() { n.acceptFleet(ctx) })
	}
	if err := n.fleet.handler.Serve(ctx, n.fleet.http); err != nil {
		n.log.Error("requests of TensorRT-LLM's fleet workers are no longer served", "error", err)
	}
}

// acceptFleet accepts HTTP connections until ctx ends, in a process that is no
// coordinator.
func (n *Node) acceptFleet(ctx context.Context) {
	err := access.Accept(ctx, n.fleet.listener, n.log, func(nc net.Conn) {
		v := n.fleet.gate.Receive(ctx, nc)
		switch {
		case v == nil:
		case v.HTTP:
			n.fleet.queue.Offer(ctx, v)
		default:
			v.Refuse(access.ReasonProtocol, errNoWorkers)
		}
	})
	if err != nil {
		n.log.Error("TensorRT-LLM's fleet workers can no longer connect", "error", err)
	}
}

var errNoWorkers = errors.New("this process has no workers: fleet.workers is 0")

// FleetAddr returns the address of fleet.listen, nil without one.
func (n *Node) FleetAddr() net.Addr {
	if n.fleet == nil {
		return nil
	}
	return n.fleet.listener.Addr()
}

const unixPrefix = "unix:"

func isUnix(address string) bool { return strings.HasPrefix(address, unixPrefix) }

// listenAt opens host:port or unix:path. It replaces the socket of a dead process.
func listenAt(address string) (net.Listener, error) {
	if !isUnix(address) {
		return net.Listen("tcp", address)
	}
	path := strings.TrimPrefix(address, unixPrefix)
	if c, err := net.Dial("unix", path); err == nil {
		_ = c.Close() // the connection was only a test
	} else if errors.Is(err, syscall.ECONNREFUSED) {
		_ = os.Remove(path) // if this fails, Listen fails too
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // a successor may use the socket
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}
