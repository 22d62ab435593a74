package node

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/edge"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// Serve runs the node until ctx ends and the node has drained, or until a successor has
// taken over and the node has served its remaining requests. Call it once. Serve closes
// the sockets and ends the plugins before it returns.
func (n *Node) Serve(ctx context.Context) error {
	background, stop := context.WithCancel(context.Background())
	defer context.AfterFunc(ctx, func() { n.leaving.Store(true) })()
	var wg sync.WaitGroup
	wg.Go(func() { n.registry.Run(background) })
	wg.Go(func() { n.plugins.Run(background) })
	wg.Go(func() { n.local.Run(background) })
	wg.Go(func() { n.runObjects(background) })
	warming, stopWarming := context.WithCancel(ctx)
	if n.options.Role != RoleWorker {
		wg.Go(func() { n.discovery.Run(background) })
		wg.Go(func() { n.knowledge.run(background) })
		wg.Go(func() { n.loads.Run(background) })
		wg.Go(func() { n.sleep.Run(background) })
		wg.Go(func() { n.serveFleet(background) })
		wg.Go(func() { n.scrapes.run(background) })
		wg.Go(func() { n.server.Warm(warming) })
	}
	stopLeading := func() {}
	switch {
	case n.leader != nil:
		stopLeading = startUntil(n.leader.run)
	case n.worker != nil:
		wg.Go(func() { n.worker.run(background) })
	}
	if n.ids != nil {
		wg.Go(func() { n.ids.Run(background) })
	}
	for _, certs := range []*edge.Certs{n.certs, n.eppCerts} {
		if certs != nil {
			wg.Go(func() { certs.Run(background) })
		}
	}
	wg.Go(func() { n.reportReadiness(background) })
	wg.Go(func() { n.keepToken(background) })
	wg.Go(func() { giveMemoryBack(background, n.plugins.Shrink) })
	err := n.serveFront(ctx)
	stopWarming()
	stopLeading() // stopLeading also frees the resources that the workers left on engines
	n.server.Wait()
	stop()
	wg.Wait()
	n.registry.Close()
	n.ledger.Close()
	_ = n.access.Close() // never fails; it writes the lines that wait
	if cerr := n.token.Close(); cerr != nil {
		n.log.Warn("the file of the admin token was not removed", "error", cerr)
	}
	flush, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if cerr := n.plugins.Close(flush); cerr != nil {
		n.log.Warn("a plugin did not end cleanly", "error", cerr)
	}
	if n.recorder != nil {
		if cerr := n.recorder.Close(); cerr != nil {
			n.log.Warn("the recording is incomplete", "error", cerr)
		}
	}
	if cerr := n.pusher.Close(flush); cerr != nil {
		n.log.Warn("metrics were not exported", "error", cerr)
	}
	if cerr := n.tracer.Close(flush); cerr != nil {
		n.log.Warn("spans were lost", "error", cerr)
	}
	return err
}

// startUntil starts run. stop ends the context of run and waits for its return.
func startUntil(run func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { run(ctx) })
	return func() {
		cancel()
		wg.Wait()
	}
}

// serveFront accepts connections at the public and the admin address. When a successor
// comes, serveFront leaves the sockets to it.
func (n *Node) serveFront(ctx context.Context) error {
	if err := n.awaitReady(ctx); err != nil || ctx.Err() != nil {
		n.front.Close()
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	if n.options.Role == RoleCoordinator { // another coordinator takes its place
		wg.Go(func() {
			<-ctx.Done()
			n.leaveRegistrations()
		})
	}
	if n.options.Takeover != nil {
		wg.Go(func() {
			if err := n.options.Takeover.Run(ctx, n.offer, n.leaveSockets); err != nil {
				cancel(err)
			}
		})
	}
	takeover := func() time.Duration { return time.Duration(n.cfg.Load().Server.TakeoverTimeout) }
	sockets, left := n.lingering(ctx)
	wg.Go(func() {
		if err := n.picker.run(sockets, left, takeover); err != nil {
			cancel(err)
		}
	})
	if n.options.OnServing != nil {
		n.options.OnServing()
	}
	err := n.front.Serve(sockets, edge.Limits{Drain: left, Remaining: takeover})
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		err = errors.Join(cause, err)
	}
	cancel(nil)
	wg.Wait()
	return err
}

// leaveSockets leaves all sockets of the node to its successor. Running requests
// continue.
func (n *Node) leaveSockets() {
	n.leaving.Store(true)
	n.front.StopAccepting()
	n.fleet.retire()
	n.scrapes.retire()
	n.picker.retire()
	n.leaveRegistrations()
}

// StopAccepting stops accepting connections at the public and the admin address, which
// other processes now serve. Serve returns when the remaining requests have ended.
func (n *Node) StopAccepting() {
	n.leaving.Store(true)
	n.front.StopAccepting()
}

// awaitReady waits before a worker or a successor accepts connections, because other
// processes accept them in the meantime. It waits until the node can serve requests for every
// model whose engines answer, or until the first probes had their time. It returns an error only
// if the predecessor could serve requests and this node still cannot.
func (n *Node) awaitReady(ctx context.Context) error {
	succeeds := n.options.Takeover != nil && n.options.Takeover.PredecessorReady()
	if !succeeds && n.options.Role != RoleWorker {
		return nil
	}
	h := n.cfg.Load().Health
	deadline := time.Now().Add(time.Duration(h.Interval) + time.Duration(h.Timeout))
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !n.server.Ready() {
		switch {
		case time.Now().Before(deadline), !n.registry.Settled(): // both end
		case succeeds:
			n.listMissing()
			return errors.New("take over: no request could be served here, but the predecessor serves")
		default:
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
	return nil
}

// offer returns copies of the open sockets for a successor.
func (n *Node) offer() (takeover.Offer, error) {
	opened, o := n.front.Opened(), takeover.Offer{Ready: n.server.Ready()}
	sockets := map[string]net.Listener{publicSocket(n.started): opened.Public, adminSocket(n.started): opened.Admin, fleetSocket(n.started): n.fleet.opened(), eppSocket(n.started): n.picker.opened(), metricsSocket(n.started): n.scrapes.opened()}
	if n.registrar != nil {
		sockets[moriioSocket(n.started)] = n.registrar.Listener()
	}
	if n.storage != nil {
		sockets[storageSocket(n.started)] = n.storage.Listener()
	}
	for name, l := range sockets {
		if l == nil {
			continue
		}
		s, err := takeover.FromListener(name, l)
		if err != nil {
			takeover.CloseAll(o.Sockets)
			return takeover.Offer{}, err
		}
		o.Sockets = append(o.Sockets, s)
	}
	return o, nil
}

// reportReadiness logs when the node can serve requests. If it cannot after the first
// probes had their time, reportReadiness logs which engines are not ready.
func (n *Node) reportReadiness(ctx context.Context) {
	h := n.cfg.Load().Health
	patience := time.After(time.Duration(h.Interval) + time.Duration(h.Timeout))
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !n.server.Ready() {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-patience:
			n.listMissing()
		}
	}
	n.log.Info("ready to serve", "url", n.loggedURL())
	if n.options.OnReady != nil {
		n.options.OnReady()
	}
}

// Ready reports whether the node can serve a request.
func (n *Node) Ready() bool { return n.server.Ready() }

// FollowsPredecessor reports whether the node is a coordinator that does not lead yet,
// because the coordinator of the process that it replaces leads. A standby of an election by
// etcd follows no predecessor.
func (n *Node) FollowsPredecessor() bool {
	return n.leader != nil && n.leader.raiseEpoch != nil && !n.leader.member.Leads()
}

// DrainTimeout returns the present value of server.drain_timeout.
func (n *Node) DrainTimeout() time.Duration { return time.Duration(n.cfg.Load().Server.DrainTimeout) }

// listMissing logs why no request can be served, and the engines that are not ready.
func (n *Node) listMissing() {
	instances := n.registry.Snapshot().Instances
	missing := slices.DeleteFunc(slices.Clone(instances), func(i *engine.Instance) bool { return i.State() == engine.Ready })
	n.log.Warn("no request can be served now; clients get 503 "+until(len(instances), len(missing)), "url", n.loggedURL())
	for _, i := range missing {
		n.log.Warn("engine is not ready", "engine", i.Spec.Name, "url", i.Spec.URL,
			"role", i.Role.String(), "connector", i.Spec.Connector, "state", i.State().String())
	}
}

// until says what must change before a proxy with so many engines can serve. missing is
// the number of those that are not ready.
func until(engines, missing int) string {
	switch {
	case engines == 0:
		return "until an engine is added"
	case missing == 0:
		return "until two engines can pair, although all engines are ready: GET /v1/pairs of the admin address lists the pairs"
	}
	return "until the engines below are ready"
}
