package cmd

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

func (a *app) runCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "run config.toml",
		Short: "Serve until SIGINT or SIGTERM, then drain; SIGHUP reloads",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			log, err := a.logger()
			if err != nil {
				return err
			}
			return a.run(args[0], log)
		},
	}
}

// run serves a configuration file until a signal ends it.
func (a *app) run(path string, log *slog.Logger) error {
	cfg, err := loadConfig(path)
	if err != nil {
		return err
	}
	for _, w := range cfg.Warnings() {
		log.Warn(w.String())
	}
	node, err := NewNode(cfg, log)
	if err != nil {
		return err
	}
	return node.serveUntilSignal(func() error {
		next, err := loadConfig(path)
		if err != nil {
			return err
		}
		return node.Reload(next)
	})
}

// serveUntilSignal runs the node. SIGHUP calls reload; the first SIGINT or
// SIGTERM drains, the second stops at once.
func (n *Node) serveUntilSignal(reload func() error) error {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
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
			case stopping:
				return failed(errors.New("stopped by a second signal"))
			default:
				stopping = true
				n.log.Info("draining", "signal", s.String(), "limit", n.cfg.Load().Server.DrainTimeout.String())
				cancel()
			}
		}
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
// is over. Call it once.
func (n *Node) Serve(ctx context.Context) error {
	background, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { n.registry.Run(background) })
	wg.Go(func() { n.discovery.Run(background) })
	wg.Go(func() { n.plugins.Run(background) })
	wg.Go(func() { n.knowledge.run(background) })
	wg.Go(func() { n.coordinator.Run(background) })
	wg.Go(func() { n.loads.Run(background) })
	if n.ids != nil {
		wg.Go(func() { n.ids.Run(background) })
	}
	wg.Go(func() { n.server.WarmPairs(ctx) })
	if n.certs != nil {
		wg.Go(func() { n.certs.Run(background) })
	}
	wg.Go(func() { n.sayWhatIsMissing(background) })
	err := n.front.Serve(ctx, func() time.Duration { return time.Duration(n.cfg.Load().Server.DrainTimeout) })
	stop()
	wg.Wait()
	n.registry.Close()
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
	n.log.Info("ready to serve", "url", n.URL())
	if n.ready != nil {
		n.ready()
	}
}

func (n *Node) listMissing() {
	n.log.Warn("no request could be served now; clients get 503 until the engines below answer", "url", n.URL())
	for _, i := range n.registry.Snapshot().Instances {
		if i.State() != engine.Ready {
			n.log.Warn("engine does not answer", "engine", i.Spec.Name, "url", i.Spec.URL,
				"role", i.Role.String(), "connector", i.Spec.Connector, "state", i.State().String())
		}
	}
}
