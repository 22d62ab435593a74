package cmd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/handover"
)

// takeoverFlag is the flag by which SIGUSR2 starts the next process.
const takeoverFlag = "--takeover"

func (a *app) runCommand() *cobra.Command {
	takeover := false
	c := &cobra.Command{
		Use:   "run config.toml",
		Short: "Serve until SIGINT or SIGTERM, then drain; SIGHUP reloads, SIGUSR2 hands over to the program as it is now on disk",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			log, err := a.logger()
			if err != nil {
				return err
			}
			return a.run(args[0], takeover, log)
		},
	}
	c.Flags().BoolVar(&takeover, takeoverFlag[2:], false, "take the sockets of the process that runs this configuration, which then serves only what it has")
	return c
}

// run serves a configuration file until a signal ends it, or a successor has
// taken over and what runs has ended.
func (a *app) run(path string, takeover bool, log *slog.Logger) error {
	cfg, err := loadConfig(path)
	if err != nil {
		return err
	}
	for _, w := range cfg.Warnings() {
		log.Warn(w.String())
	}
	if cfg.Fleet.Workers > 0 || cfg.Fleet.Coordinator != "" {
		return a.supervise(cfg, path, takeover, log)
	}
	s, err := newSuccession(cfg, path, takeover, log)
	if err != nil {
		return failed(err)
	}
	defer s.close()
	part := Part{Dir: s.home()}
	err = part.open(cfg, s.sockets())
	handover.CloseAll(s.sockets())
	if err != nil {
		return failed(fmt.Errorf("take over: %w", err))
	}
	node, err := NewNode(cfg, log, part)
	if err != nil {
		part.close()
		return err
	}
	node.succession = s
	node.serving = func() { node.notify("READY=1") }
	return node.serveUntilSignal(func() error {
		next, err := loadConfig(path)
		if err != nil {
			return err
		}
		return node.Reload(next)
	})
}

// newSuccession finds the place of a process that does everything. nil is one
// that nobody can take over from: that alone keeps no process from serving.
func newSuccession(cfg *config.Config, path string, takeover bool, log *slog.Logger) (*succession, error) {
	dir, err := fleetDir(cfg, path)
	s := &succession{dir: dir, log: log}
	if err == nil {
		err = s.begin(takeover)
	}
	if err == nil {
		return s, nil
	}
	s.close()
	if takeover {
		return nil, err
	}
	log.Warn("this process works without fleet.dir: it cannot be taken over from, and keeps no files", "error", err)
	return nil, nil
}

// serveUntilSignal runs the node. SIGHUP calls reload, SIGUSR2 starts a
// successor; the first SIGINT or SIGTERM drains, the second stops at once.
func (n *Node) serveUntilSignal(reload func() error) error {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR2)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- n.Serve(ctx) }()
	stopping := false
	for {
		select {
		case err := <-done:
			return failed(err)
		case s := <-signals:
			switch {
			case s == syscall.SIGHUP:
				n.logReload(reload())
			case s == syscall.SIGUSR2:
				n.succession.startHeir()
			case stopping:
				n.succession.forward(s)
				return failed(errors.New("stopped by a second signal"))
			default:
				stopping = true
				n.log.Info("draining", "signal", s.String(), "limit", n.cfg.Load().Server.DrainTimeout.String())
				n.succession.forward(s)
				n.notify("STOPPING=1")
				cancel()
			}
		}
	}
}

// notify tells the service manager, if there is one.
func (n *Node) notify(state string) {
	if err := notifySystemd(state); err != nil {
		n.log.Warn("the service manager was not told", "state", state, "error", err)
	}
}

func (n *Node) logReload(err error) {
	if err != nil {
		for _, p := range asProblems(err) {
			n.log.Error("reload refused; the old configuration stays", "problem", p.String())
		}
		return
	}
	n.log.Info("configuration reloaded")
}

// Serve runs everything that belongs to the node until ctx ends and the drain
// is over, or a successor has taken over and what the node had is served. Call it
// once.
func (n *Node) Serve(ctx context.Context) error {
	background, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { n.registry.Run(background) })
	wg.Go(func() { n.plugins.Run(background) })
	wg.Go(func() { n.local.Run(background) })
	warming, stopWarming := context.WithCancel(ctx)
	if n.part.Role != RoleWorker {
		wg.Go(func() { n.discovery.Run(background) })
		wg.Go(func() { n.knowledge.run(background) })
		wg.Go(func() { n.loads.Run(background) })
		wg.Go(func() { n.serveFleet(background) })
		wg.Go(func() { n.server.WarmPairs(warming) })
	}
	stepDown := func() {}
	switch {
	case n.leading != nil:
		stepDown = runUntil(n.leading.run)
	case n.following != nil:
		wg.Go(func() { n.following.run(background) })
	}
	if n.ids != nil {
		wg.Go(func() { n.ids.Run(background) })
	}
	if n.certs != nil {
		wg.Go(func() { n.certs.Run(background) })
	}
	wg.Go(func() { n.sayWhatIsMissing(background) })
	wg.Go(func() { n.keepToken(background) })
	err := n.serveFront(ctx)
	stopWarming()
	stepDown() // which has what its workers leave freed
	n.server.Wait()
	stop()
	wg.Wait()
	n.registry.Close()
	if cerr := n.token.Close(); cerr != nil {
		n.log.Warn("the file of the admin token was not removed", "error", cerr)
	}
	flush, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if cerr := n.plugins.Close(flush); cerr != nil {
		n.log.Warn("a plugin did not end well", "error", cerr)
	}
	if n.recorder != nil {
		if cerr := n.recorder.Close(); cerr != nil {
			n.log.Warn("the recording is not whole", "error", cerr)
		}
	}
	if cerr := n.tracer.Close(flush); cerr != nil {
		n.log.Warn("spans were lost", "error", cerr)
	}
	return err
}

// runUntil starts run; stop ends it and waits for that.
func runUntil(run func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { run(ctx) })
	return func() {
		cancel()
		wg.Wait()
	}
}

// serveFront opens the front, and makes room for a successor when there is one.
func (n *Node) serveFront(ctx context.Context) error {
	if err := n.awaitReady(ctx); err != nil || ctx.Err() != nil {
		n.front.Close()
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	if n.part.Role == RoleCoordinator { // that another takes the place of
		wg.Go(func() {
			<-ctx.Done()
			n.leaveRegistrations()
		})
	}
	if n.succession != nil {
		wg.Go(func() {
			if err := n.succession.assume(ctx, n.offer, func() { n.front.Retire(); n.routes.retire(); n.leaveRegistrations() }); err != nil && !errors.Is(err, errRetired) {
				cancel(err)
			}
		})
	}
	if n.serving != nil {
		n.serving()
	}
	err := n.front.Serve(ctx, proxy.Limits{
		Drain:  func() time.Duration { return time.Duration(n.cfg.Load().Server.DrainTimeout) },
		Retire: func() time.Duration { return time.Duration(n.cfg.Load().Server.TakeoverTimeout) },
	})
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		err = errors.Join(cause, err)
	}
	cancel(nil)
	wg.Wait()
	return err
}

// awaitReady is done before connections are accepted where others accept them
// meanwhile: of a worker they wait until it can serve a request, if that is not
// long. A successor has to be able to, if its predecessor is.
func (n *Node) awaitReady(ctx context.Context) error {
	succeeds := n.succession != nil && n.succession.taken != nil && n.succession.taken.Offer.Ready
	if !succeeds && n.part.Role != RoleWorker {
		return nil
	}
	h := n.cfg.Load().Health
	deadline := time.Now().Add(time.Duration(h.Interval) + time.Duration(h.Timeout))
	for !n.server.Ready() {
		switch {
		case time.Now().Before(deadline):
		case succeeds:
			n.listMissing()
			return errors.New("take over: no request could be served here, but the predecessor serves")
		default:
			return nil
		}
		if !sleep(ctx, 5*time.Millisecond) {
			return nil
		}
	}
	return nil
}

// offer is what a successor is given.
func (n *Node) offer() (handover.Offer, error) {
	opened, o := n.front.Opened(), handover.Offer{Ready: n.server.Ready()}
	sockets := map[string]net.Listener{publicSocket(n.started): opened.Public, adminSocket(n.started): opened.Admin, fleetSocket(n.started): n.routes.opened()}
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
		s, err := handover.FromListener(name, l)
		if err != nil {
			handover.CloseAll(o.Sockets)
			return handover.Offer{}, err
		}
		o.Sockets = append(o.Sockets, s)
	}
	return o, nil
}

// sayWhatIsMissing tells, once the first probes have had their time, which
// engines do not answer and how that shows to clients.
func (n *Node) sayWhatIsMissing(ctx context.Context) {
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
	n.log.Info("ready to serve", "url", n.where())
	if n.ready != nil {
		n.ready()
	}
}

func (n *Node) listMissing() {
	n.log.Warn("no request could be served now; clients get 503 until the engines below answer", "url", n.where())
	for _, i := range n.registry.Snapshot().Instances {
		if i.State() != engine.Ready {
			n.log.Warn("engine does not answer", "engine", i.Spec.Name, "url", i.Spec.URL,
				"role", i.Role.String(), "connector", i.Spec.Connector, "state", i.State().String())
		}
	}
}
