package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/fleet"
	"github.com/pdproxy/pdproxy/proxy/coordinator/replica"
	"github.com/pdproxy/pdproxy/proxy/coordinator/standby"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// maxReportRecords bounds the records of a report; see fleetpb.Unmarshal.
const maxReportRecords = 1 << 16

const (
	// settleEvery is the interval at which a starting coordinator checks whether it has the state
	// of all engines.
	settleEvery = 5 * time.Millisecond
	// settleLimit is how long a coordinator waits for that before it serves workers.
	// The workers place requests themselves in the meantime.
	settleLimit = 5 * time.Second
)

// linkName is the name of the socket for workers of this host in the fleet's directory.
const linkName = "fleet.sock"

// leaderSide has the parts of a coordinator that serve its workers.
type leaderSide struct {
	n          *Node
	access     fleetAccess
	workers    *fleet.Server
	listeners  []standby.Listener
	name       *socketName     // of the socket for workers of this host
	member     *standby.Member // takes part in the election of the leader
	raiseEpoch func()          // leads on with a higher epoch; nil: an election assigns epochs
}

// newLeaderSide makes the node a coordinator. It returns the coordinator that places
// the requests which this process receives itself.
func (n *Node) newLeaderSide(a fleetAccess) coordinator.Coordinator {
	l := &leaderSide{n: n, access: a}
	l.workers = fleet.NewServer(fleet.ServerOptions{
		Gate: n.newGate(a), Local: n.local, Log: n.log, Token: []byte(a.token), Standby: true, Budgets: n.ledger,
		Homes: replica.NewSource(n.knowledge.state.Conversations, engineNames{n.registry}.Name).Answer,
		OnWorker: func(w fleet.WorkerRow, here bool) {
			if !here {
				n.registry.Unlearn(w.Number)
			}
		},
		OnReport: l.receive,
		OnOrphan: func(cleanup []byte) {
			if err := n.server.CleanUp(cleanup); err != nil {
				n.log.Warn("KV blocks that a dead worker left on engines are not freed; the engines free them after their own time-out", "error", err)
			}
		},
		Retain: n.plugins.Retain, Turns: n.metrics,
		OnForget: func(k *fleet.RetainedKV) {
			if err := n.server.ForgetTurn(k); err != nil {
				n.log.Warn("KV that a decode engine keeps of a turn is not freed; the engine frees it after its own time-out", "engine", k.Holder.Name(), "error", err)
			}
		},
	})
	n.leader = l
	return withWorkers{n.local, l}
}

// withWorkers is ready when the coordinator has the state of the engines and has workers. A
// coordinator that does not lead is ready when it has all data of the leader.
type withWorkers struct {
	*coordinator.Local
	leader *leaderSide
}

// Ready implements coordinator.Coordinator.
func (w withWorkers) Ready() bool {
	if w.leader.member.Leads() {
		return w.Local.Ready() && len(w.leader.workers.Workers()) > 0
	}
	return w.Local.Ready() && w.leader.member.Ready()
}

// open opens the socket for workers of this host and joins the election. listener is
// that of fleet.listen, nil for none.
func (l *leaderSide) open(cfg *config.Config, listener net.Listener) error {
	own, name, err := listenUnderOwnName(l.n.options.Dir, linkName)
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
		err = l.joinElection(cfg)
	}
	if err != nil {
		return fmt.Errorf("listen for workers: %w", err)
	}
	return nil
}

// run serves the workers, or follows the leader as a standby, until ctx ends.
func (l *leaderSide) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	l.settle(ctx)
	exported := make(chan struct{})
	first := sync.OnceFunc(func() { close(exported) })
	wg.Go(func() {
		defer first()
		l.n.registry.Export(ctx, func(part engine.Part, value []byte) {
			if l.workers.Publish(topics[part], value); part == engine.Loads { // the last of the first round
				first()
			}
		})
	})
	<-exported // a worker that connects receives everything at once
	wg.Go(func() { l.name.keep(ctx, l.member.Leads, l.reclaim) })
	if err := l.member.Run(ctx); err != nil {
		l.n.log.Error("workers can no longer connect", "error", err)
	}
	l.name.remove()
}

// topics are the topics on which the parts of a registry are published.
var topics = [...]fleet.Topic{
	engine.Members: fleet.TopicMembership, engine.Loads: fleet.TopicLoads, engine.Pairs: fleet.TopicPairs,
}

// settle waits until the state of all engines is known. Otherwise workers would remove an
// engine that is not found yet, and would regard an engine that is not probed yet as
// down. If no file lists the engines that were registered before, settle waits for
// settleLimit, because the proxy does not know when engines register.
func (l *leaderSide) settle(ctx context.Context) {
	limit := time.NewTimer(settleLimit)
	defer limit.Stop()
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	for l.n.awaitsRegistrations() || !l.n.registry.Settled() {
		select {
		case <-ctx.Done():
			return
		case <-limit.C:
			return
		case <-tick.C:
		}
	}
}

// receive processes the report of a worker. It ignores the contents of later versions.
func (l *leaderSide) receive(worker int, report []byte) {
	var m fleetpb.Report
	err := fleetpb.Unmarshal(report, &m, maxReportRecords)
	switch {
	case err != nil:
	case m.Observations != nil:
		err = l.n.registry.Learn(worker, m.Observations)
	case m.Ids != nil:
		l.grantIDs(m.Ids)
	case len(m.Recorded) > 0 && l.n.recorder != nil:
		err = l.n.recorder.Add(m.Recorded)
	}
	if err != nil {
		l.n.log.Warn("the report of a worker cannot be used", "worker", worker, "error", err)
	}
}

// grantIDs answers a worker's request for disagg ids. If no ids are available now, the
// worker repeats the request later.
func (l *leaderSide) grantIDs(ask *fleetpb.IDAsk) {
	if _, ok := l.n.ids.Grant(disaggid.AskOf(ask)); ok {
		l.workers.Publish(fleet.TopicIDs, l.n.ids.Table())
	}
}
