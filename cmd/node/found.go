package node

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/discovery"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// FindEngines returns a registry of the engines of cfg and of those that its sources name in their
// first lists. Nothing probes the engines. Engines that register with a running proxy are not among
// them, because only that proxy has the socket. missing counts the sources without a list after
// engine.FirstList. log gets the problems of the sources.
func FindEngines(ctx context.Context, cfg *config.Config, log *slog.Logger) (r *engine.Registry, missing int, err error) {
	r = engine.New(engine.Options{
		Health: cfg.Health, Circuit: cfg.Circuit, Pairs: cfg.Pairs, Resolve: resolve, NewProbe: newProbe,
		Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
		NewClient: func(spec config.Engine) (upstream.Client, error) { return newClient(cfg, spec) },
		APIKey:    func(spec config.Engine) (string, error) { return config.ReadSecret(spec.APIKeyFile) },
		MoveAfter: func() time.Duration { return 0 },
	})
	if err := r.Apply(engine.SourceStatic, cfg.Instances(), 0); err != nil {
		return nil, 0, err
	}
	waiting := &firstLists{Registry: r}
	sources, err := discovery.New(cfg.Discovery, discovery.Options{
		Registry: waiting, Log: log, DrainFor: func() time.Duration { return 0 },
	})
	if err != nil {
		return nil, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, engine.FirstList)
	defer cancel()
	var running sync.WaitGroup
	running.Go(func() { sources.Run(ctx) }) // ends with ctx
	missing = waiting.wait(ctx)
	cancel()
	running.Wait()
	return r, missing, nil
}

// firstLists is a registry that counts the sources whose first list has not arrived.
type firstLists struct {
	*engine.Registry
	pending []chan struct{} // one for each source, closed when its list has arrived
}

func (f *firstLists) Expect(time.Duration) (arrived func()) {
	list := make(chan struct{})
	f.pending = append(f.pending, list)
	return sync.OnceFunc(func() { close(list) })
}

// wait waits for every list, and returns how many are missing when ctx has ended.
func (f *firstLists) wait(ctx context.Context) (missing int) {
	for _, list := range f.pending {
		select {
		case <-list:
			continue
		default:
		}
		select {
		case <-list:
		case <-ctx.Done():
			missing++
		}
	}
	return missing
}
