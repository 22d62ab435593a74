package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

const (
	// checkEvery is how often the supervisor checks its processes.
	checkEvery = 50 * time.Millisecond
	// startLimit is how long the processes of a successor may take to be ready.
	startLimit = time.Minute
	// leadLimit is how long a successor waits for the offer until the coordinator leads. It
	// is below the time that a successor waits for an answer (takeover.patience).
	leadLimit = 3 * time.Second
	// stopMargin is how long a process may take to end beyond its own limits.
	stopMargin = 15 * time.Second
)

// supervisor starts the processes of a fleet and keeps them running. It serves no
// requests. When the supervisor dies, its processes drain and end. All methods but runInLoop are called from run's goroutine alone.
type supervisor struct {
	options   Options
	log       *slog.Logger
	dir       *privatedir.Dir
	takeover  *takeoverControl
	sockets   []takeover.Socket // children receive copies
	positions []*position
	exits     chan exited
	calls     chan func() // run calls the functions

	cfg        *config.Config
	takingOver bool // the predecessor still serves
	wasServing bool // all positions have served at the same time
	wasReady   bool // all positions have been ready at the same time
	stopping   bool
	retired    bool  // a successor has the sockets
	err        error // why the supervisor stops
}

// runFleet runs a fleet until a signal or a successor ends it. signals gets the signals.
func runFleet(cfg *config.Config, o Options, signals chan os.Signal) error {
	dir, err := openFleetDir(cfg, o.Path)
	if err != nil {
		return exit.Failed(err)
	}
	s := &supervisor{
		options: o, log: o.Log.With("role", "supervisor"), dir: dir, cfg: cfg,
		exits: make(chan exited), calls: make(chan func()),
	}
	s.takeover = &takeoverControl{dir: dir, log: s.log, flag: o.TakeoverFlag}
	defer s.takeover.close()
	if err := s.takeover.begin(o.Takeover); err != nil {
		var locked *privatedir.LockedError
		if errors.As(err, &locked) {
			err = fmt.Errorf("process %d already runs this file; pdproxy run %s replaces it", locked.Holder.PID, o.TakeoverFlag)
		}
		return exit.Failed(err)
	}
	s.takingOver = s.takeover.taken != nil
	for range cfg.Fleet.Workers {
		s.positions = append(s.positions, &position{role: node.RoleWorker})
	}
	if cfg.Fleet.Coordinator == "" {
		s.positions = append(s.positions, &position{role: node.RoleCoordinator})
	} else if cfg.Fleet.Workers == 0 {
		s.positions = append(s.positions, &position{role: node.RoleWorker})
	}
	if err := s.openSockets(); err != nil {
		return exit.Failed(err)
	}
	logStart(o, cfg, cfg.Server.Listen, cfg.Admin.Listen)
	return s.run(signals)
}

// run keeps a process in each position until no process runs any more.
func (s *supervisor) run(signals chan os.Signal) error {
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR2)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	takeoverEnded := make(chan error, 1)
	awaitSuccessor := func() {
		wg.Go(func() {
			takeoverEnded <- s.takeover.Run(ctx, func() (takeover.Offer, error) { return s.offerWhenLeading(ctx) },
				func() { s.runInLoop(ctx, s.retireAll) })
		})
	}
	if !s.takingOver {
		awaitSuccessor()
	}
	began := time.Now()
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		s.checkProcesses()
		s.startMissing()
		switch {
		case s.finished():
			cancel()
			wg.Wait()
			s.closeSockets()
			return s.err
		case s.takingOver && !s.stopping && s.matchesPredecessor():
			s.takingOver = false
			awaitSuccessor()
		case s.takingOver && !s.stopping && time.Since(began) > startLimit:
			s.stop(exit.Failed(errors.New("take over: not all processes were ready in time")))
		}
		select {
		case e := <-s.exits:
			s.childExited(e)
		case err := <-takeoverEnded:
			if err != nil {
				s.stop(exit.Failed(err))
			}
		case call := <-s.calls:
			call()
		case sig := <-signals:
			s.handleSignal(sig)
		case <-tick.C:
		}
	}
}

func (s *supervisor) handleSignal(sig os.Signal) {
	switch {
	case sig == syscall.SIGHUP:
		s.reload()
	case sig == syscall.SIGUSR2:
		s.takeover.startSuccessor()
	case s.stopping:
		s.log.Warn("stopping at once", "signal", sig.String())
		s.takeover.forward(sig)
		s.eachProcess(func(p *process) { p.end(s.log, syscall.SIGINT, stopMargin/5) })
		if s.err == nil {
			s.err = exit.Failed(errors.New("stopped by a second signal"))
		}
	default:
		s.log.Info("draining", "signal", sig.String(), "limit", s.cfg.Server.DrainTimeout.String())
		s.takeover.forward(sig)
		notify(s.log, "STOPPING=1")
		s.stop(nil)
	}
}

// reload checks the configuration file and makes the children read it again.
func (s *supervisor) reload() {
	next, err := s.options.Load()
	if err != nil {
		logRefused(s.log, err)
		s.eachProcess(func(p *process) {
			if p.role == node.RoleCoordinator { // its metrics show that the reload was refused
				p.reload(s.log)
			}
		})
		return
	}
	if next.Fleet.Workers != s.cfg.Fleet.Workers {
		s.log.Warn("this key is read only at the start; the old value stays until a takeover", "key", "fleet.workers")
	}
	s.cfg = next
	s.eachProcess(func(p *process) { p.reload(s.log) })
}

// stop drains the fleet. It ends the workers first, because their requests may need the
// coordinator; finished ends the coordinator later.
func (s *supervisor) stop(why error) {
	if s.err == nil {
		s.err = why
	}
	if s.stopping {
		return
	}
	s.stopping = true
	if s.takingOver {
		s.takeover.abandon() // the predecessor continues to serve
	}
	s.eachProcess(func(p *process) {
		if p.role == node.RoleWorker {
			p.end(s.log, syscall.SIGTERM, s.drainLimit())
		}
	})
}

// drainLimit returns how long a process may take to drain. The process waits for its
// requests, and then for two clean-ups of timeouts.cleanup each.
func (s *supervisor) drainLimit() time.Duration {
	return time.Duration(s.cfg.Server.DrainTimeout) + 2*time.Duration(s.cfg.Timeouts.Cleanup) + stopMargin
}

// eachProcess calls f for all processes that run.
func (s *supervisor) eachProcess(f func(*process)) {
	for _, o := range s.positions {
		if o.process != nil {
			f(o.process)
		}
	}
}

// finished reports whether the supervisor stops or has retired, and no process runs. While
// it stops, finished ends the coordinator when no worker is left, and kills each process
// whose deadline has passed.
func (s *supervisor) finished() bool {
	if !s.stopping && !s.retired {
		return false
	}
	running, workers := 0, 0
	s.eachProcess(func(p *process) {
		running++
		if p.role == node.RoleWorker {
			workers++
		}
	})
	if running > 0 && s.stopping {
		now := time.Now()
		s.eachProcess(func(p *process) {
			switch {
			case !p.deadline.IsZero() && now.After(p.deadline) && !p.killed:
				s.log.Error("a process does not end; the supervisor kills it", "process", p.role, "slot", p.slot, "pid", p.pid)
				p.kill(s.log)
			case workers == 0 && p.role == node.RoleCoordinator && p.deadline.IsZero():
				p.end(s.log, syscall.SIGTERM, s.drainLimit())
			}
		})
	}
	return running == 0
}

// runInLoop makes run call f, and returns true after the call. It returns false if ctx
// ends before.
func (s *supervisor) runInLoop(ctx context.Context, f func()) bool {
	done := make(chan struct{})
	select {
	case s.calls <- func() { f(); close(done) }:
		<-done
		return true
	case <-ctx.Done():
		return false
	}
}

// matchesPredecessor reports whether every position serves, and is ready if the
// predecessor's fleet was ready.
func (s *supervisor) matchesPredecessor() bool {
	for _, o := range s.positions {
		switch {
		case o.process == nil || o.process.state == "" || o.process.state == stateStarting:
			return false
		case s.takeover.taken.Offer.Ready && !o.process.isReady():
			return false
		}
	}
	return true
}
