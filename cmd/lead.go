package cmd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
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
	workers   *coordinator.Server
	listeners []net.Listener
}

// lead makes the node a coordinator, and returns who places its own requests.
func (n *Node) lead(token string) coordinator.Coordinator {
	l := &leading{n: n}
	l.workers = coordinator.NewServer(coordinator.ServerOptions{
		Local: n.local, Log: n.log, Token: []byte(token),
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
	})
	n.leading = l
	return withWorkers{n.local, l.workers}
}

// withWorkers is ready when there are workers too.
type withWorkers struct {
	*coordinator.Local
	workers *coordinator.Server
}

// Ready implements coordinator.Coordinator.
func (w withWorkers) Ready() bool { return w.Local.Ready() && len(w.workers.Workers()) > 0 }

// open opens the socket for workers of this host, beside that of fleet.listen,
// which is nil if there is none.
func (l *leading) open(part Part, listener net.Listener) error {
	own, err := listenUnix(part.Dir.Path(linkName))
	if err != nil {
		return fmt.Errorf("listen for workers: %w", err)
	}
	if l.listeners = append(l.listeners, own); listener != nil {
		l.listeners = append(l.listeners, listener)
	}
	return nil
}

// listenUnix opens a socket in the place of that of a process which has ended, or
// of which this is the successor: who dials finds either.
func listenUnix(path string) (net.Listener, error) {
	aside := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.Remove(aside); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	s, err := net.ListenUnix("unix", &net.UnixAddr{Name: aside, Net: "unix"})
	if err != nil {
		return nil, err
	}
	s.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(aside, 0o600), os.Rename(aside, path)); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// run serves the workers until ctx ends.
func (l *leading) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	l.settle(ctx)
	wg.Go(func() {
		l.n.registry.Export(ctx, func(part engine.Part, value []byte) { l.workers.Publish(topics[part], value) })
	})
	for _, s := range l.listeners {
		wg.Go(func() {
			if err := l.workers.Serve(ctx, s); err != nil {
				l.n.log.Error("workers can no longer connect", "address", s.Addr().String(), "error", err)
			}
		})
	}
}

// topics is where the parts of a registry go.
var topics = [...]coordinator.Topic{
	engine.Members: coordinator.TopicMembership, engine.Loads: coordinator.TopicLoads, engine.Pairs: coordinator.TopicPairs,
}

// settle waits until the engines are known: workers would take what is not yet
// found for gone, and what is not yet asked for down. Who registers here by itself
// is given the whole time.
func (l *leading) settle(ctx context.Context) {
	limit := time.NewTimer(settleLimit)
	defer limit.Stop()
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	for waits := l.n.registrar != nil || l.n.storage != nil; waits || !l.n.discovery.Told() || !l.n.registry.Settled(); {
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
