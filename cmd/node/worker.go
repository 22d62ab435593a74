package node

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
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/coordinator/standby"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// askEvery is the interval at which a worker with few disagg ids requests more.
const askEvery = 50 * time.Millisecond

// workerSide has the parts of a worker that communicate with its coordinator.
type workerSide struct {
	log    *slog.Logger
	mirror *engine.Mirror
	client *fleet.Client
	finder *standby.Finder // finds the coordinator that leads; nil: the address is fixed
	ids    *disaggid.Source
}

// mirrorEngines makes the registry of a worker, which copies the coordinator's and probes
// no engine.
func (n *Node) mirrorEngines(cfg *config.Config) {
	o := n.engineOptions(cfg)
	forget := func(i *engine.Instance) { n.tokens.Forget(i.Spec.Name) }
	o.OnRestart, o.OnGone = forget, forget
	n.worker = &workerSide{log: n.log, mirror: engine.NewMirror(o, func() time.Duration {
		return time.Duration(n.cfg.Load().Server.DrainTimeout)
	})}
	n.registry = n.worker.mirror.Registry()
}

// connectWorker returns a client that requests placements from the coordinator. While the
// coordinator does not answer, the client uses the node's own Local.
func (n *Node) connectWorker(cfg *config.Config, a fleetAccess, ids *disaggid.Source) (coordinator.Coordinator, error) {
	w := n.worker
	w.ids = ids
	host, _ := os.Hostname() // may be empty: the name is only displayed
	dial, err := n.dialler(cfg, a.credentials.Dial)
	if err != nil {
		return nil, err
	}
	admin := sync.OnceValue(func() http.Handler { return n.server.AdminHandler() })
	w.client = fleet.NewClient(fleet.ClientOptions{
		Dial:     dial,
		Fallback: n.local, Mirror: w.mirror, OnTopic: w.receive,
		Admin: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { admin().ServeHTTP(rw, r) }),
		Slot:  n.options.Slot, Node: host, Token: []byte(a.token), Log: n.log, Observer: n.metrics,
		Patience: time.Duration(cfg.Fleet.Patience),
	})
	return selfReliant{w.client, ids}, nil
}

// dialler returns a function that connects to the coordinator: at the configured address,
// at that of the coordinator on this host, or at that of the coordinator that leads.
func (n *Node) dialler(cfg *config.Config, dial standby.Dialer) (func(context.Context) (net.Conn, error), error) {
	same, err := advertised(cfg)
	if err != nil {
		return nil, err
	}
	address := cfg.Fleet.Coordinator
	switch address {
	case "":
		address = "unix:" + n.options.Dir.SocketPath(linkName)
	case config.CoordinatorLeader:
		address, same = "", ""
	}
	if !cfg.Fleet.Elects() || address != "" && cfg.Fleet.Coordinator != "" {
		return func(ctx context.Context) (net.Conn, error) { return dial(ctx, address) }, nil
	}
	e, err := newElection(cfg, "", n)
	if err != nil {
		return nil, err
	}
	n.worker.finder = standby.NewFinder(e, dial, address, same)
	return n.worker.finder.Dial, nil
}

// selfReliant is ready when the worker could also place requests without its coordinator.
type selfReliant struct {
	*fleet.Client
	ids *disaggid.Source
}

// Ready implements coordinator.Coordinator.
func (s selfReliant) Ready() bool {
	granted, _ := s.ids.Ask()
	return granted.Taken > 0 && s.Client.Ready()
}

// receive processes the data that the coordinator publishes. An error means that the
// worker cannot read placements, because it does not know the coordinator's numbers of
// the engines.
func (w *workerSide) receive(topic fleet.Topic, value []byte) error {
	var err error
	switch topic {
	case fleet.TopicMembership:
		err = w.mirror.Import(engine.Members, value)
	case fleet.TopicLoads:
		err = w.mirror.Import(engine.Loads, value)
	case fleet.TopicPairs:
		err = w.mirror.Import(engine.Pairs, value)
	case fleet.TopicIDs:
		err = w.ids.ExtendBy(value)
	}
	if err != nil && topic == fleet.TopicMembership {
		return fmt.Errorf("read the membership of engines: %w", err)
	}
	if err != nil {
		w.log.Error("a message of the coordinator cannot be used", "error", err)
	}
	return nil
}

// run keeps the connection to the coordinator until ctx ends.
func (w *workerSide) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { w.client.Run(ctx) })
	if w.finder != nil {
		wg.Go(func() { w.finder.Run(ctx, w.client.Redial) })
	}
	wg.Go(func() {
		w.mirror.Run(ctx, func(report []byte) { w.client.Report(report) })
	})
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if ask, few := w.ids.Ask(); few {
			w.client.Report(fleetpb.Append(nil, &fleetpb.Report{Ids: ask.Message()}))
		}
	}
}
