package cmd

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

const (
	// askEvery is how often a worker that has few ids left asks for more.
	askEvery = 50 * time.Millisecond
	// dialTimeout bounds one dial of the coordinator.
	dialTimeout = time.Second
)

// following is a worker's side of its coordinator.
type following struct {
	log    *slog.Logger
	mirror *engine.Mirror
	client *coordinator.Client
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
func (n *Node) follow(cfg *config.Config, token string, ids *disaggid.Source) coordinator.Coordinator {
	f := n.following
	f.ids = ids
	host, _ := os.Hostname() // empty: it only shows
	address := cfg.Fleet.Coordinator
	if address == "" {
		address = "unix:" + n.part.Dir.Path(linkName)
	}
	admin := sync.OnceValue(func() http.Handler { return n.server.AdminHandler() })
	f.client = coordinator.NewClient(coordinator.ClientOptions{
		Dial:     func(ctx context.Context) (net.Conn, error) { return dial(ctx, address) },
		Fallback: n.local, Mirror: f.mirror, OnTopic: f.hear,
		Admin: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { admin().ServeHTTP(w, r) }),
		Slot:  n.part.Slot, Node: host, Token: []byte(token), Log: n.log, Observer: n.metrics,
		Patience: time.Duration(cfg.Fleet.Patience),
	})
	return selfReliant{f.client, ids}
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

// dial connects to host:port or unix:path.
func dial(ctx context.Context, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	if path, isPath := strings.CutPrefix(address, "unix:"); isPath {
		return d.DialContext(ctx, "unix", path)
	}
	return d.DialContext(ctx, "tcp", address)
}

// hear takes in what the coordinator publishes.
func (f *following) hear(topic coordinator.Topic, value []byte) {
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
	if err != nil {
		f.log.Error("what the coordinator tells is not understood", "error", err)
	}
}

// run keeps in touch with the coordinator until ctx ends.
func (f *following) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { f.client.Run(ctx) })
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
