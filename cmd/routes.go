package cmd

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

// fleetRoutes is where TensorRT-LLM's fleet workers are served.
// nil: they are not.
type fleetRoutes struct {
	handler  *selectapi.Handler
	listener net.Listener    // fleet.listen
	served   net.Listener    // what of it is theirs
	queue    *access.Queue   // of served; nil: a coordinator lets in who comes to listener
	gate     *access.Gate    // of queue
	own      context.Context // ends when a successor serves them
	leave    context.CancelFunc
}

// retire leaves the workers to a successor.
func (r *fleetRoutes) retire() {
	if r != nil {
		r.leave()
	}
}

// opened is the listener, nil without one.
func (r *fleetRoutes) opened() net.Listener {
	if r == nil {
		return nil
	}
	return r.listener
}

// listenFleet opens fleet.listen, if there is one and given is not that.
func (n *Node) listenFleet(cfg *config.Config, a fleetAccess, given net.Listener) (err error) {
	if cfg.Fleet.Listen == "" {
		return nil
	}
	if given == nil {
		if given, err = listenAt(cfg.Fleet.Listen); err != nil {
			return err
		}
	}
	n.routes = &fleetRoutes{listener: given, handler: selectapi.New(selectapi.Options{
		Local: n.local, Registry: n.registry, Index: n.knowledge.state.Index, Fallback: n.metrics.Fallback,
		Token: a.token, PlainHTTP: cfg.Fleet.PlainHTTP, Address: given.Addr(), Hosts: cfg.Admin.InternalHosts(cfg.Fleet.Listen, cfg.Fleet.Advertise),
		Version: readVersion().Version, Log: n.log,
		Leading: func(do func()) bool {
			if n.leading != nil {
				return n.leading.office.Leading(do)
			}
			do()
			return true
		},
	})}
	if n.leading != nil { // whose workers come there too
		n.routes.served = n.leading.workers.Others(given.Addr())
	} else {
		n.routes.queue, n.routes.gate = access.NewQueue(), n.gate(a)
		n.routes.served = n.routes.queue.Listener(given.Addr())
	}
	n.routes.own, n.routes.leave = context.WithCancel(context.Background())
	return nil
}

// serveFleet serves fleet.listen until ctx ends or a successor does.
func (n *Node) serveFleet(ctx context.Context) {
	if n.routes == nil {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer n.routes.leave()
	stop := context.AfterFunc(n.routes.own, cancel)
	defer stop()
	if n.routes.queue != nil {
		var accepting sync.WaitGroup
		defer accepting.Wait()
		accepting.Go(func() { n.acceptFleet(ctx) })
	}
	if err := n.routes.handler.Serve(ctx, n.routes.served); err != nil {
		n.log.Error("TensorRT-LLM's fleet workers are not served any more", "error", err)
	}
}

// acceptFleet lets HTTP callers in, where no coordinator does, until ctx ends.
func (n *Node) acceptFleet(ctx context.Context) {
	err := access.Accept(ctx, n.routes.listener, n.log, func(nc net.Conn) {
		v := n.routes.gate.Receive(ctx, nc)
		switch {
		case v == nil:
		case v.HTTP:
			n.routes.queue.Offer(ctx, v)
		default:
			v.Refuse(access.ReasonProtocol, errNoWorkers)
		}
	})
	if err != nil {
		n.log.Error("TensorRT-LLM's fleet workers can no longer connect", "error", err)
	}
}

var errNoWorkers = errors.New("this process has no workers: fleet.workers is 0")

// FleetAddr is where TensorRT-LLM's fleet workers are served, nil if nowhere.
func (n *Node) FleetAddr() net.Addr {
	if n.routes == nil {
		return nil
	}
	return n.routes.listener.Addr()
}

// listenAt opens host:port or unix:path. A socket that was left behind, where
// nobody listens, is replaced.
func listenAt(address string) (net.Listener, error) {
	path, isUnix := strings.CutPrefix(address, "unix:")
	if !isUnix {
		return net.Listen("tcp", address)
	}
	if c, err := net.Dial("unix", path); err == nil {
		_ = c.Close() // it was only a question
	} else if errors.Is(err, syscall.ECONNREFUSED) {
		_ = os.Remove(path) // if that fails, to listen does too
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // a successor may have it
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}
