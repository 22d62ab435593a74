package node

import (
	"context"
	"sync"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/poolobjects"
)

// followObjects makes the follower of the objects of epp.pool. Each process that serves requests
// follows them itself: the objects are few, and a worker that has lost its coordinator keeps them.
// The coordinator follows them for the status and for metrics. The process is not ready before the
// first objects have arrived, or engine.FirstList has passed.
func (n *Node) followObjects(cfg *config.Config) error {
	if cfg.EPP.Pool == "" {
		return nil
	}
	arrived := sync.OnceFunc(n.registry.Expect(engine.FirstList))
	var err error
	n.objects, err = poolobjects.New(poolobjects.Options{
		Config: cfg, Count: n.metrics.PoolObjects, Log: n.log,
		Apply: func(o *poolobjects.Objects) {
			n.server.SetObjects(o)
			arrived()
		},
		Writes: func() bool { return n.options.Role != RoleWorker && n.leads() },
	})
	return err
}

// runObjects follows the objects of epp.pool until ctx ends.
func (n *Node) runObjects(ctx context.Context) {
	if n.objects != nil {
		n.objects.Run(ctx)
	}
}
