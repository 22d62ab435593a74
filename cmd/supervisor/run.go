// Package supervisor runs the processes that serve a configuration: one process that does
// everything, or a coordinator and workers that a supervisor starts and watches. It
// handles the signals, and hands the sockets over to a successor without refusing a
// connection.
//
// The decisions behind this package are in docs/design/fleet.md.
package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// Options configures Run. All fields except Takeover and Version are required.
type Options struct {
	Path string // of the configuration file
	// Load reads and checks the configuration file. It is called at the start and at each
	// reload.
	Load func() (*config.Config, error)
	// Takeover: Run takes over the sockets of the process that uses the same
	// configuration file. Without such a process Run starts as usual.
	Takeover bool
	// TakeoverFlag is the command-line flag that sets Takeover. SIGUSR2 starts the program
	// again with its present arguments and this flag.
	TakeoverFlag string
	// ChildArgs returns the command line, without the program's name, by which the program
	// starts as a child. It calls RunChild with the same values.
	ChildArgs func(role node.Role, slot int, dir string) []string
	Version   string // of the program
	Log       *slog.Logger
}

// Run serves the configuration until a signal ends it, or until a successor has taken over
// and the remaining requests have ended. An error of type *exit.Error is a failure at run
// time; any other error is a fault of the configuration.
func Run(o Options) error {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGUSR2) // without a handler they would end the process while it starts
	defer signal.Stop(signals)
	cfg, err := o.Load()
	if err != nil {
		return err
	}
	for _, w := range cfg.Warnings() {
		o.Log.Warn(w.String())
	}
	if cfg.Fleet.Workers > 0 || cfg.Fleet.Coordinator != "" {
		return runFleet(cfg, o, signals)
	}
	return runSingle(cfg, o, signals)
}

// runSingle serves everything in this process.
func runSingle(cfg *config.Config, o Options, signals chan os.Signal) error {
	t, holder, err := joinTakeover(cfg, o)
	if err != nil {
		return exit.Failed(err)
	}
	no := node.Options{Version: o.Version, OnServing: func() { notify(o.Log, "READY=1") }}
	if t != nil {
		defer t.close()
		no.Dir, no.Takeover = t.dir, t
		err = no.UseSockets(cfg, t.sockets())
		takeover.CloseAll(t.sockets())
		if err != nil {
			return exit.Failed(fmt.Errorf("take over: %w", err))
		}
	}
	n, err := node.New(cfg, o.Log, no)
	if err != nil {
		no.CloseSockets()
		return runsAlready(holder, o.TakeoverFlag, err)
	}
	if holder > 0 {
		o.Log.Warn("another process runs this file too; no process can take over from this one", "pid", holder)
	}
	logStart(o, cfg, n.URL(), n.AdminURL())
	return serveUntilSignal(n, t, o.Log, signals, func() error { return reload(n, o.Load) })
}

// joinTakeover returns the takeover of a process that does everything. It returns nil if
// no successor will be able to take over: the process serves nevertheless. holder is the
// process that runs the same file; 0 if there is none.
func joinTakeover(cfg *config.Config, o Options) (t *takeoverControl, holder int, err error) {
	dir, err := openFleetDir(cfg, o.Path)
	t = &takeoverControl{dir: dir, log: o.Log, flag: o.TakeoverFlag}
	if err == nil {
		err = t.begin(o.Takeover)
	}
	if err == nil {
		return t, 0, nil
	}
	t.close()
	if o.Takeover {
		return nil, 0, err
	}
	if locked := (*privatedir.LockedError)(nil); errors.As(err, &locked) && locked.Holder.PID > 0 {
		return nil, locked.Holder.PID, nil
	}
	o.Log.Warn("this process works without fleet.dir: no process can take over from it, and it stores no files", "error", err)
	return nil, 0, nil
}

// runsAlready explains an address in use by the process that runs the same file; 0 for
// none.
func runsAlready(holder int, takeoverFlag string, err error) error {
	if holder == 0 || !errors.Is(err, syscall.EADDRINUSE) {
		return err
	}
	return exit.Failed(fmt.Errorf("process %d already runs this file; pdproxy run %s replaces it: %w", holder, takeoverFlag, err))
}

// logStart logs what starts, in one line.
func logStart(o Options, cfg *config.Config, url, admin string) {
	plan := slices.Clone(cfg.Policy.Order)
	if !slices.Contains(plan, cfg.Policy.Plan) {
		plan = append(plan, cfg.Policy.Plan)
	}
	o.Log.Info("pdproxy starts", "version", o.Version, "config", o.Path, "url", url, "admin", admin,
		"plan", strings.Join(plan, ","), "place", cfg.Policy.Place, "mint", cfg.Policy.Mint, "retain", cfg.Policy.Retain,
		"plugins", len(cfg.Plugins), "engines", len(cfg.AllEngines()), "workers", cfg.Fleet.Workers)
}

// ServeUntilSignal runs a node that has no configuration file and no successor. SIGHUP
// calls reload and logs its error. The first SIGINT or SIGTERM drains the node, the second
// one stops it at once.
func ServeUntilSignal(n *node.Node, log *slog.Logger, reload func() error) error {
	return serveUntilSignal(n, nil, log, make(chan os.Signal, 4), reload)
}

// serveUntilSignal does the same for a node that may have a successor, which SIGUSR2
// starts. t may be nil. signals gets the signals.
func serveUntilSignal(n *node.Node, t *takeoverControl, log *slog.Logger, signals chan os.Signal, reload func() error) error {
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR2)
	defer signal.Stop(signals)
	requestReload, stopReloads := startReloads(log, reload)
	defer stopReloads()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- n.Serve(ctx) }()
	stopping := false
	for {
		select {
		case err := <-done:
			return exit.Failed(err)
		case s := <-signals:
			switch {
			case s == syscall.SIGHUP:
				requestReload()
			case s == syscall.SIGUSR2 && t == nil:
				log.Warn(noSuccessor)
			case s == syscall.SIGUSR2:
				t.startSuccessor()
			case stopping:
				t.forward(s)
				return exit.Failed(errors.New("stopped by a second signal"))
			default:
				stopping = true
				log.Info("draining", "signal", s.String(), "limit", n.DrainTimeout().String())
				t.forward(s)
				notify(log, "STOPPING=1")
				cancel()
			}
		}
	}
}

// startReloads calls reload after each request, and logs its error. A request during a reload
// causes another one after it. The caller does not wait for a reload, because a reload may
// wait for the download of a plugin. stop does not wait either.
func startReloads(log *slog.Logger, reload func() error) (request, stop func()) {
	wanted := make(chan struct{}, 1)
	go func() { // ends after stop, or with the process
		for range wanted {
			if err := reload(); err != nil {
				logRefused(log, err)
			}
		}
	}()
	request = func() {
		select {
		case wanted <- struct{}{}:
		default: // a reload that has not begun is requested already
		}
	}
	return request, func() { close(wanted) }
}

// reload makes a node use the configuration file as it is now.
func reload(n *node.Node, load func() (*config.Config, error)) error {
	next, err := load()
	if err != nil {
		n.ReloadRefused()
		return err
	}
	return n.Reload(next)
}

// logRefused logs the problems of an unusable configuration.
func logRefused(log *slog.Logger, err error) {
	for _, p := range config.AsProblems(err) {
		log.Error("reload refused; the old configuration stays", "problem", p.String())
	}
}
