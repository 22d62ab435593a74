package cmd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/replica"
	"github.com/pdproxy/pdproxy/proxy/coordinator/standby"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// What a worker's report is about: its first byte.
const (
	reportEngines byte = iota // what it has learned of them, for engine.Registry.Learn
	reportIDs                 // a disaggid.Ask
	reportRequest             // a line of a recording
)

const (
	// settleEvery is how often a coordinator that starts looks whether it knows the
	// engines.
	settleEvery = 5 * time.Millisecond
	// settleLimit is how long its workers go on without it until it does.
	settleLimit = 5 * time.Second
)

// linkName is the socket of local workers in the fleet's directory.
const linkName = "fleet.sock"

// leading is a coordinator's side of its workers.
type leading struct {
	n         *Node
	access    fleetAccess
	workers   *coordinator.Server
	listeners []standby.Listener
	name      *socketName // of the socket of this host
	office    *standby.Office
	succeed   func() // leads by a higher epoch; nil: an election gives them
}

// lead makes the node a coordinator, and returns who places its own requests.
func (n *Node) lead(a fleetAccess) coordinator.Coordinator {
	l := &leading{n: n, access: a}
	l.workers = coordinator.NewServer(coordinator.ServerOptions{
		Gate: n.gate(a), Local: n.local, Log: n.log, Token: []byte(a.token), Standby: true,
		Homes: replica.NewSource(n.knowledge.state.Conversations, named{n.registry}.Name).Answer,
		OnWorker: func(w coordinator.WorkerRow, here bool) {
			if !here {
				n.registry.Unlearn(w.Number)
			}
		},
		OnReport: l.hear,
		OnOrphan: func(cleanup []byte) {
			if err := n.server.CleanUp(cleanup); err != nil {
				n.log.Warn("what a dead worker left on engines is not freed; their own time-out does it", "error", err)
			}
		},
		OnForget: func(k *coordinator.KeptTurn) {
			if err := n.server.ForgetTurn(k); err != nil {
				n.log.Warn("what a decode engine keeps of a turn is not freed; its own time-out does it", "engine", k.Holder.Name(), "error", err)
			}
		},
	})
	n.leading = l
	return withWorkers{n.local, l}
}

// withWorkers is ready when there are workers too, or would be there at once if it
// were to lead.
type withWorkers struct {
	*coordinator.Local
	leading *leading
}

// Ready implements coordinator.Coordinator.
func (w withWorkers) Ready() bool {
	if w.leading.office.Leads() {
		return w.Local.Ready() && len(w.leading.workers.Workers()) > 0
	}
	return w.Local.Ready() && w.leading.office.Ready()
}

// open opens the socket for workers of this host, beside that of fleet.listen,
// which is nil if there is none.
func (l *leading) open(cfg *config.Config, part Part, listener net.Listener) error {
	own, name, err := listenBeside(part.Dir, linkName)
	if err == nil {
		l.name, l.listeners = name, append(l.listeners, own)
	}
	if err == nil && listener != nil {
		public, ok := listener.(standby.Listener)
		if !ok {
			return errors.New("listen for workers: the socket of fleet.listen is of a kind that cannot be shared")
		}
		l.listeners = append(l.listeners, public)
	}
	if err == nil {
		err = l.stand(cfg, part)
	}
	if err != nil {
		return fmt.Errorf("listen for workers: %w", err)
	}
	return nil
}

// run serves the workers, or stands by, until ctx ends.
func (l *leading) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	l.settle(ctx)
	told := make(chan struct{})
	first := sync.OnceFunc(func() { close(told) })
	wg.Go(func() {
		defer first()
		l.n.registry.Export(ctx, func(part engine.Part, value []byte) {
			if l.workers.Publish(topics[part], value); part == engine.Loads { // the last of the first round
				first()
			}
		})
	})
	<-told // a worker that comes is told all at once
	wg.Go(func() { l.name.keep(ctx, l.office.Leads, l.regain) })
	if err := l.office.Run(ctx); err != nil {
		l.n.log.Error("workers can no longer connect", "error", err)
	}
	l.name.leave()
}

// topics is where the parts of a registry go.
var topics = [...]coordinator.Topic{
	engine.Members: coordinator.TopicMembership, engine.Loads: coordinator.TopicLoads, engine.Pairs: coordinator.TopicPairs,
}

// settle waits until the engines are known: workers would take what is not yet
// found for gone, and what is not yet asked for down. Who registers here by itself
// is given the whole time, where nobody has left word of who did before.
func (l *leading) settle(ctx context.Context) {
	limit := time.NewTimer(settleLimit)
	defer limit.Stop()
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	for l.n.awaitsRegistrations() || !l.n.discovery.Told() || !l.n.registry.Settled() {
		select {
		case <-ctx.Done():
			return
		case <-limit.C:
			return
		case <-tick.C:
		}
	}
}

// hear takes in what a worker reports.
func (l *leading) hear(worker int, report []byte) {
	var err error
	switch {
	case len(report) == 0:
		err = errors.New("it is empty")
	case report[0] == reportEngines:
		err = l.n.registry.Learn(worker, report[1:])
	case report[0] == reportIDs:
		err = l.grant(report[1:])
	case report[0] == reportRequest && l.n.recorder != nil:
		err = l.n.recorder.Add(report[1:])
	default:
		err = fmt.Errorf("it is of an unknown kind, %d", report[0])
	}
	if err != nil {
		l.n.log.Warn("a worker's report is not understood", "worker", worker, "error", err)
	}
}

// grant answers a worker that asks for ids. Where there are none now it asks again.
func (l *leading) grant(report []byte) error {
	ask, err := disaggid.ReadAsk(report)
	if err != nil {
		return err
	}
	if _, ok := l.n.ids.Grant(ask); ok {
		l.workers.Publish(coordinator.TopicIDs, l.n.ids.Table())
	}
	return nil
}
