package cmd

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/engine/moriio"
	"github.com/pdproxy/pdproxy/proxy/engine/roster"
)

// findEngines builds what finds engines, and opens the sockets where they
// register; token is that of TensorRT-LLM's workers.
func (n *Node) findEngines(cfg *config.Config, token string) (err error) {
	o := discovery.Options{
		Registry: n.registry, Log: n.log, DrainFor: func() time.Duration { return time.Duration(n.cfg.Load().Server.DrainTimeout) },
	}
	if m := cfg.Discovery.MoRIIO; m.Listen != "" {
		password, err := readSecret(m.PasswordFile)
		if err != nil {
			return config.Problems{cfg.Problem("discovery.moriio.password_file", err.Error())}
		}
		if n.registrar, err = moriio.Listen(moriio.Options{
			Endpoint: m.Listen, Password: password, OwnHost: m.OwnHost,
			Listener: n.part.MoRIIO, Roster: roster.New(n.part.Dir, "zmq", n.log), Log: n.log,
		}); err != nil {
			return failed(err)
		}
		o.More = append(o.More, n.newRegistrations(n.registrar))
	}
	if address, served := discovery.StorageAddress(cfg.Discovery.TRTLLM); served {
		n.storage, err = discovery.ListenStorage(discovery.StorageOptions{
			Cluster: cfg.Discovery.TRTLLM, Listener: n.part.Storage, Token: token, Hosts: cfg.Admin.InternalHosts(address), Roster: roster.New(n.part.Dir, "trtllm", n.log), Log: n.log,
		})
		if err != nil {
			return errors.Join(failed(err), n.closeRegistrar())
		}
		o.More = append(o.More, n.newRegistrations(n.storage))
	}
	if n.discovery, err = discovery.New(cfg.Discovery, o); err != nil {
		return errors.Join(err, n.closeRegistrar())
	}
	return nil
}

// closeRegistrar closes the sockets of a node that never serves, but for its
// front's.
func (n *Node) closeRegistrar() (err error) {
	if n.registrar != nil {
		err = n.registrar.Close()
	}
	if n.storage != nil {
		err = errors.Join(err, n.storage.Close())
	}
	if n.routes != nil {
		err = errors.Join(err, n.routes.listener.Close())
	}
	return err
}

// registered are the ways to register that there are.
func (n *Node) registered() (list []registration) {
	if n.registrar != nil {
		list = append(list, n.registrar)
	}
	if n.storage != nil {
		list = append(list, n.storage)
	}
	return list
}

// registration is a way to register that is handed from one process to the next.
type registration interface {
	Known() bool // those who registered with the process before are
	Leave()
	Listener() net.Listener
}

// awaitsRegistrations reports whether engines may be there that nobody knows yet.
func (n *Node) awaitsRegistrations() bool {
	return slices.ContainsFunc(n.registered(), func(r registration) bool { return !r.Known() })
}

// leaveRegistrations leaves them to another process, and returns when it has.
func (n *Node) leaveRegistrations() {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, r := range n.registered() {
		wg.Go(r.Leave)
	}
}

// registrations are the engines that register, less those that the configuration
// names too: they stay as they are there.
type registrations struct {
	discovery.Source
	n        *Node
	reloaded chan struct{} // the configuration may name others now
}

// newRegistrations returns what Reload tells of another configuration.
func (n *Node) newRegistrations(s discovery.Source) registrations {
	r := registrations{s, n, make(chan struct{}, 1)}
	n.reloads = append(n.reloads, r.reloaded)
	return r
}

// Run implements discovery.Source. What has registered is told again when the
// configuration changes, because it may name those engines from now on, or no longer.
func (r registrations) Run(ctx context.Context, found func([]config.Engine)) {
	var (
		mu   sync.Mutex
		all  []config.Engine // guarded by mu
		told bool            // guarded by mu
	)
	tell := func() {
		if !told {
			return
		}
		configured := r.n.cfg.Load().AllEngines()
		found(slices.DeleteFunc(slices.Clone(all), func(e config.Engine) bool {
			return slices.ContainsFunc(configured, func(o config.Engine) bool { return o.URL == e.URL })
		}))
	}
	var again sync.WaitGroup
	defer again.Wait()
	ended, end := context.WithCancel(ctx)
	defer end()
	again.Go(func() {
		for {
			select {
			case <-ended.Done():
				return
			case <-r.reloaded:
				mu.Lock()
				tell()
				mu.Unlock()
			}
		}
	})
	r.Source.Run(ctx, func(list []config.Engine) {
		mu.Lock()
		defer mu.Unlock()
		all, told = slices.Clone(list), true
		tell()
	})
}

// tellRegistrations has those who registered judged by the present configuration.
func (n *Node) tellRegistrations() {
	for _, r := range n.reloads {
		select {
		case r <- struct{}{}:
		default: // it is about to be
		}
	}
}

// StorageAddr is where TensorRT-LLM's workers register, nil when they cannot.
func (n *Node) StorageAddr() net.Addr {
	if n.storage == nil {
		return nil
	}
	return n.storage.Addr()
}

// RegistrationAddr is where engines register, nil when they cannot.
func (n *Node) RegistrationAddr() net.Addr {
	if n.registrar == nil {
		return nil
	}
	return n.registrar.Addr()
}
