package cmd

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/standby"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// askEvery is how often a worker that has few ids left asks for more.
const askEvery = 50 * time.Millisecond

// following is a worker's side of its coordinator.
type following struct {
	log    *slog.Logger
	mirror *engine.Mirror
	client *coordinator.Client
	finder *standby.Finder // of the coordinator that leads; nil: there is one address
	ids    *disaggid.Source
}

// mirrorEngines makes the registry of a worker, which probes nothing.
func (n *Node) mirrorEngines(cfg *config.Config) {
	o := n.engineOptions(cfg)
	forget := func(i *engine.Instance) { n.tokens.Forget(i.Spec.Name) }
	o.OnRestart, o.OnGone = forget, forget
	n.following = &following{log: n.log, mirror: engine.NewMirror(o, func() time.Duration {
		return time.Duration(n.cfg.Load().Server.DrainTimeout)
	})}
	n.registry = n.following.mirror.Registry()
}

// follow makes what asks the coordinator, and in its absence the node's own Local.
func (n *Node) follow(cfg *config.Config, a fleetAccess, ids *disaggid.Source) (coordinator.Coordinator, error) {
	f := n.following
	f.ids = ids
	host, _ := os.Hostname() // empty: it only shows
	dial, err := n.dialler(cfg, a.credentials.Dial)
	if err != nil {
		return nil, err
	}
	admin := sync.OnceValue(func() http.Handler { return n.server.AdminHandler() })
	f.client = coordinator.NewClient(coordinator.ClientOptions{
		Dial:     dial,
		Fallback: n.local, Mirror: f.mirror, OnTopic: f.hear,
		Admin: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { admin().ServeHTTP(w, r) }),
		Slot:  n.part.Slot, Node: host, Token: []byte(a.token), Log: n.log, Observer: n.metrics,
		Patience: time.Duration(cfg.Fleet.Patience),
	})
	return selfReliant{f.client, ids}, nil
}

// dialler is how the coordinator is dialled: at the address that the configuration
// has or that of this host's, or wherever the one is that leads.
func (n *Node) dialler(cfg *config.Config, dial standby.Dialer) (func(context.Context) (net.Conn, error), error) {
	address, same := cfg.Fleet.Coordinator, advertised(cfg)
	switch address {
	case "":
		address = "unix:" + n.part.Dir.SocketPath(linkName)
	case config.CoordinatorLeader:
		address, same = "", ""
	}
	if len(cfg.Fleet.Etcd.Endpoints) == 0 || address != "" && cfg.Fleet.Coordinator != "" {
		return func(ctx context.Context) (net.Conn, error) { return dial(ctx, address) }, nil
	}
	e, err := newElection(cfg, "", n)
	if err != nil {
		return nil, err
	}
	n.following.finder = standby.NewFinder(e, dial, address, same)
	return n.following.finder.Dial, nil
}

// selfReliant is ready when it could do without its coordinator too.
type selfReliant struct {
	*coordinator.Client
	ids *disaggid.Source
}

// Ready implements coordinator.Coordinator.
func (s selfReliant) Ready() bool {
	granted, _ := s.ids.Ask()
	return granted.Taken > 0 && s.Client.Ready()
}

// hear takes in what the coordinator publishes. Without the engines as it numbers
// them none of its placements could be read: that is an error.
func (f *following) hear(topic coordinator.Topic, value []byte) error {
	var err error
	switch topic {
	case coordinator.TopicMembership:
		err = f.mirror.Import(engine.Members, value)
	case coordinator.TopicLoads:
		err = f.mirror.Import(engine.Loads, value)
	case coordinator.TopicPairs:
		err = f.mirror.Import(engine.Pairs, value)
	case coordinator.TopicIDs:
		err = f.ids.ExtendBy(value)
	}
	if err != nil && topic == coordinator.TopicMembership {
		return fmt.Errorf("hear of the engines: %w", err)
	}
	if err != nil {
		f.log.Error("what the coordinator tells is not understood", "error", err)
	}
	return nil
}

// run keeps in touch with the coordinator until ctx ends.
func (f *following) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { f.client.Run(ctx) })
	if f.finder != nil {
		wg.Go(func() { f.finder.Run(ctx, f.client.Redial) })
	}
	wg.Go(func() {
		f.mirror.Run(ctx, func(report []byte) { f.client.Report(append([]byte{reportEngines}, report...)) })
	})
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if ask, few := f.ids.Ask(); few {
			f.client.Report(ask.Append([]byte{reportIDs}))
		}
	}
}
