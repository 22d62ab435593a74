package cmd

import (
	"context"
	"errors"
	"net"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/engine/moriio"
)

// findEngines builds what finds engines, and opens the socket where they
// register.
func (n *Node) findEngines(cfg *config.Config) (err error) {
	o := discovery.Options{
		Registry: n.registry, Log: n.log, DrainFor: func() time.Duration { return time.Duration(n.cfg.Load().Server.DrainTimeout) },
	}
	if endpoint := cfg.Discovery.MoRIIO.Listen; endpoint != "" {
		if n.registrar, err = moriio.Listen(endpoint, n.log); err != nil {
			return failed(err)
		}
		o.More = append(o.More, registrations{n.registrar, n})
	}
	if n.discovery, err = discovery.New(cfg.Discovery, o); err != nil {
		return errors.Join(err, n.closeRegistrar())
	}
	return nil
}

// closeRegistrar closes the socket of a node that never serves.
func (n *Node) closeRegistrar() error {
	if n.registrar == nil {
		return nil
	}
	return n.registrar.Close()
}

// registrations are the engines that register, less those that the configuration
// names too: they stay as they are there.
type registrations struct {
	*moriio.Registrar
	n *Node
}

// Run implements discovery.Source.
func (r registrations) Run(ctx context.Context, found func([]config.Engine)) {
	r.Registrar.Run(ctx, func(list []config.Engine) {
		configured := r.n.cfg.Load().Engines
		found(slices.DeleteFunc(list, func(e config.Engine) bool {
			return slices.ContainsFunc(configured, func(o config.Engine) bool { return o.URL == e.URL })
		}))
	})
}

// RegistrationAddr is where engines register, nil when they cannot.
func (n *Node) RegistrationAddr() net.Addr {
	if n.registrar == nil {
		return nil
	}
	return n.registrar.Addr()
}
