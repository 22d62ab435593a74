package cmd

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

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/handover"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

const (
	// lookEvery is how often the supervisor looks at its children.
	lookEvery = 50 * time.Millisecond
	// startLimit is how long the processes of a successor may take to be ready.
	startLimit = time.Minute
	// stopMargin is what a process may take to end beyond its own limits.
	stopMargin = 15 * time.Second
)

// supervisor starts the processes of a fleet and keeps them running. It serves
// nobody itself, and when it dies they go on: the next one adopts them.
type supervisor struct {
	app        *app
	path       string // of the configuration
	log        *slog.Logger
	dir        *privatedir.Dir
	succession *succession
	sockets    []handover.Socket // that children inherit
	posts      []*post
	others     []*process // that run and have no post: retired, or one too many
	exits      chan exited
	calls      chan func() // for run to do

	cfg      *config.Config
	starting bool // the predecessor still serves
	serving  bool // all have served once
	settled  bool // all have been ready once
	stopping bool
	retired  bool
	err      error // why it stops
}

// supervise runs a fleet until a signal, or a successor, ends it.
func (a *app) supervise(cfg *config.Config, path string, takeover bool, log *slog.Logger) error {
	dir, err := fleetDir(cfg, path)
	if err != nil {
		return failed(err)
	}
	defer dir.Close()
	s := &supervisor{
		app: a, path: path, log: log.With("role", "supervisor"), dir: dir, cfg: cfg,
		exits: make(chan exited), calls: make(chan func()),
	}
	s.succession = &succession{dir: dir, log: s.log}
	if err := s.succession.begin(takeover); err != nil {
		var locked *privatedir.LockedError
		if errors.As(err, &locked) {
			err = fmt.Errorf("process %d runs this configuration; pdproxy run %s replaces it", locked.Holder.PID, takeoverFlag)
		}
		return failed(err)
	}
	defer s.succession.abandon()
	s.starting = s.succession.taken != nil
	for range cfg.Fleet.Workers {
		s.posts = append(s.posts, &post{role: RoleWorker})
	}
	if cfg.Fleet.Coordinator == "" {
		s.posts = append(s.posts, &post{role: RoleCoordinator})
	} else if cfg.Fleet.Workers == 0 {
		s.posts = append(s.posts, &post{role: RoleWorker})
	}
	if !s.starting {
		if err := s.adopt(); err != nil {
			return failed(err)
		}
	}
	if err := s.open(); err != nil {
		return failed(err)
	}
	return s.run()
}

// run keeps the posts filled until nothing runs any more.
func (s *supervisor) run() error {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR2)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	assumed := make(chan error, 1)
	assume := func() {
		wg.Go(func() {
			assumed <- s.succession.assume(ctx, func() (o handover.Offer, err error) {
				if !s.do(ctx, func() { o, err = s.offer() }) {
					err = context.Cause(ctx)
				}
				return o, err
			}, func() { s.do(ctx, s.leaveAll) })
		})
	}
	if !s.starting {
		assume()
	}
	began := time.Now()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		s.look()
		s.fill()
		switch {
		case s.over():
			cancel()
			wg.Wait()
			s.closeSockets()
			return s.err
		case s.starting && !s.stopping && s.equal():
			s.starting = false
			s.release() // before the predecessor goes: from here on they outlive this process
			assume()
		case s.starting && !s.stopping && time.Since(began) > startLimit:
			s.stop(failed(errors.New("take over: not all processes were ready in time")))
		}
		select {
		case e := <-s.exits:
			s.ended(e)
		case err := <-assumed:
			if err != nil && !errors.Is(err, errRetired) {
				s.stop(failed(err))
			}
		case call := <-s.calls:
			call()
		case sig := <-signals:
			s.signalled(sig)
		case <-tick.C:
		}
	}
}

func (s *supervisor) signalled(sig os.Signal) {
	switch {
	case sig == syscall.SIGHUP:
		s.reload()
	case sig == syscall.SIGUSR2:
		s.succession.startHeir()
	case s.stopping:
		s.log.Warn("stopping at once", "signal", sig.String())
		s.succession.forward(sig)
		s.each(func(p *process) { p.end(s.log, syscall.SIGINT, stopMargin/5) })
		if s.err == nil {
			s.err = failed(errors.New("stopped by a second signal"))
		}
	default:
		s.log.Info("draining", "signal", sig.String(), "limit", s.cfg.Server.DrainTimeout.String())
		s.succession.forward(sig)
		if err := notifySystemd("STOPPING=1"); err != nil {
			s.log.Warn("the service manager was not told", "error", err)
		}
		s.stop(nil)
	}
}

// reload makes the children read the file again, if it can be used.
func (s *supervisor) reload() {
	next, err := loadConfig(s.path)
	if err != nil {
		for _, p := range asProblems(err) {
			s.log.Error("reload refused; the old configuration stays", "problem", p.String())
		}
		return
	}
	if next.Fleet.Workers != s.cfg.Fleet.Workers {
		s.log.Warn("this key is read at start only; it stays until a takeover", "key", "fleet.workers")
	}
	s.cfg = next
	s.each(func(p *process) { p.signal(s.log, syscall.SIGHUP) })
}

// stop drains the fleet: the workers first, for their exchanges may need the
// coordinator.
func (s *supervisor) stop(why error) {
	if s.err == nil {
		s.err = why
	}
	if s.stopping {
		return
	}
	s.stopping = true
	if s.starting {
		s.succession.abandon() // the predecessor goes on
	}
	s.each(func(p *process) {
		if p.role == RoleWorker {
			p.end(s.log, syscall.SIGTERM, s.drainLimit())
		}
	})
}

// drainLimit is what a process may need to drain: it waits for its exchanges and
// for its clean-ups, for timeouts.cleanup each.
func (s *supervisor) drainLimit() time.Duration {
	return time.Duration(s.cfg.Server.DrainTimeout) + 2*time.Duration(s.cfg.Timeouts.Cleanup) + stopMargin
}

// each calls f for all processes that run.
func (s *supervisor) each(f func(*process)) {
	for _, o := range s.posts {
		if o.process != nil {
			f(o.process)
		}
	}
	for _, p := range s.others {
		f(p)
	}
}

// over reports whether the supervisor's work is done. Of a stopping fleet it ends
// the coordinator when the workers have gone, and kills what has been told to end
// and does not.
func (s *supervisor) over() bool {
	if !s.stopping && !s.retired {
		return false
	}
	running, workers := 0, 0
	s.each(func(p *process) {
		running++
		if p.role == RoleWorker {
			workers++
		}
	})
	if running > 0 && s.stopping {
		now := time.Now()
		s.each(func(p *process) {
			switch {
			case !p.due.IsZero() && now.After(p.due) && !p.killed:
				s.log.Error("a process does not end; it is killed", "process", p.role, "slot", p.slot, "pid", p.pid)
				p.kill(s.log)
			case workers == 0 && p.role == RoleCoordinator && p.due.IsZero():
				p.end(s.log, syscall.SIGTERM, s.drainLimit())
			}
		})
	}
	return running == 0
}

// do has run call f, and reports whether it did: not after ctx has ended.
func (s *supervisor) do(ctx context.Context, f func()) bool {
	done := make(chan struct{})
	select {
	case s.calls <- func() { f(); close(done) }:
		<-done
		return true
	case <-ctx.Done():
		return false
	}
}

// equal reports whether the fleet can do what the predecessor's could.
func (s *supervisor) equal() bool {
	for _, o := range s.posts {
		switch {
		case o.process == nil || o.process.state == "" || o.process.state == stateStarting:
			return false
		case s.succession.taken.Offer.Ready && o.process.state != stateReady:
			return false
		}
	}
	return true
}

// release lets the processes go on without this one.
func (s *supervisor) release() {
	s.each(func(p *process) { p.unleash(s.log) })
}
