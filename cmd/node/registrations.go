package node

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/engine/moriio"
	"github.com/pdproxy/pdproxy/proxy/engine/registrations"
)

// findEngines builds the discovery of engines and opens the sockets at which engines
// register. token is the token of TensorRT-LLM's workers.
func (n *Node) findEngines(cfg *config.Config, token string) (err error) {
	o := discovery.Options{
		Registry: n.registry, Log: n.log, DrainFor: func() time.Duration { return time.Duration(n.cfg.Load().Server.DrainTimeout) },
	}
	if m := cfg.Discovery.MoRIIO; m.Listen != "" {
		password, err := config.ReadSecret(m.PasswordFile)
		if err != nil {
			return config.Problems{cfg.Problem("discovery.moriio.password_file", err.Error())}
		}
		if n.registrar, err = moriio.Listen(moriio.Options{
			Endpoint: m.Listen, Password: password, OwnHost: m.OwnHost,
			Listener: n.options.MoRIIO, Registrations: registrations.New(n.options.Dir, "zmq", n.log), Log: n.log,
		}); err != nil {
			return exit.Failed(err)
		}
		o.More = append(o.More, n.newRegistrations(n.registrar))
	}
	if address, served := discovery.StorageAddress(cfg.Discovery.TRTLLM); served {
		n.storage, err = discovery.ListenStorage(discovery.StorageOptions{
			Cluster: cfg.Discovery.TRTLLM, Listener: n.options.Storage, Token: token, Hosts: cfg.Admin.InternalHosts(address), Registrations: registrations.New(n.options.Dir, "trtllm", n.log), Log: n.log,
		})
		if err != nil {
			return errors.Join(exit.Failed(err), n.closeRegistrar())
		}
		o.More = append(o.More, n.newRegistrations(n.storage))
	}
	if n.discovery, err = discovery.New(cfg.Discovery, o); err != nil {
		return errors.Join(err, n.closeRegistrar())
	}
	return nil
}

// closeRegistrar closes the sockets of a node that never serves, except those of n.front.
func (n *Node) closeRegistrar() (err error) {
	if n.registrar != nil {
		err = n.registrar.Close()
	}
	if n.storage != nil {
		err = errors.Join(err, n.storage.Close())
	}
	if n.fleet != nil {
		err = errors.Join(err, n.fleet.listener.Close())
	}
	return err
}

// registrars returns the registrars of this process.
func (n *Node) registrars() (list []registrar) {
	if n.registrar != nil {
		list = append(list, n.registrar)
	}
	if n.storage != nil {
		list = append(list, n.storage)
	}
	return list
}

// registrar is a socket at which engines register. A process hands it to its successor.
type registrar interface {
	Complete() bool // the engines that registered with the predecessor are known
	Release()       // returns when another process has the socket
	Listener() net.Listener
}

// awaitsRegistrations reports whether engines may be running that did not register with
// this process yet.
func (n *Node) awaitsRegistrations() bool {
	return slices.ContainsFunc(n.registrars(), func(r registrar) bool { return !r.Complete() })
}

// leaveRegistrations leaves the registrars to another process, and returns when that
// process has them.
func (n *Node) leaveRegistrations() {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, r := range n.registrars() {
		wg.Go(r.Release)
	}
}

// registeredEngines is a source of engines that register. It leaves out engines that the
// configuration names too: for those the configuration applies.
type registeredEngines struct {
	discovery.Source
	n        *Node
	reloaded chan struct{} // receives after each reload; holds one value
}

// newRegistrations returns a source that is notified of each reload.
func (n *Node) newRegistrations(s discovery.Source) registeredEngines {
	r := registeredEngines{s, n, make(chan struct{}, 1)}
	n.reloaded = append(n.reloaded, r.reloaded)
	return r
}

// Run implements discovery.Source. It reports the registered engines again after each
// reload, because the new configuration may name some of them, or no longer name them.
func (r registeredEngines) Run(ctx context.Context, found func([]config.Engine)) {
	var (
		mu    sync.Mutex
		all   []config.Engine // guarded by mu
		known bool            // all has been set; guarded by mu
	)
	report := func() {
		if !known {
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
				report()
				mu.Unlock()
			}
		}
	})
	r.Source.Run(ctx, func(list []config.Engine) {
		mu.Lock()
		defer mu.Unlock()
		all, known = slices.Clone(list), true
		report()
	})
}

// reapplyRegistrations makes all registrations compare their engines with the present
// configuration.
func (n *Node) reapplyRegistrations() {
	for _, r := range n.reloaded {
		select {
		case r <- struct{}{}:
		default: // a reload is pending already
		}
	}
}

// StorageAddr returns the address at which TensorRT-LLM's workers register, nil without one.
func (n *Node) StorageAddr() net.Addr {
	if n.storage == nil {
		return nil
	}
	return n.storage.Addr()
}

// RegistrationAddr returns the address at which vLLM engines register, nil without one.
func (n *Node) RegistrationAddr() net.Addr {
	if n.registrar == nil {
		return nil
	}
	return n.registrar.Addr()
}
