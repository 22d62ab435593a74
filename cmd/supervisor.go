package cmd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/handover"
)

const (
	// lookEvery is how often the supervisor looks at its children.
	lookEvery = 50 * time.Millisecond
	// hungAfter is how long a child may show no sign of life.
	hungAfter = 10 * time.Second
	// The first restart comes at once, the next ones after a time that doubles;
	// who lived long enough begins anew.
	firstBackOff = 100 * time.Millisecond
	lastBackOff  = 5 * time.Second
	longLife     = 30 * time.Second
	// startLimit is how long the processes of a successor may take to be ready.
	startLimit = time.Minute
	// stopMargin is what a process may take to end beyond its own limits.
	stopMargin = 15 * time.Second
	// maxSlots bounds the processes of one role, those that have retired included.
	maxSlots = 256
)

// supervisor starts the processes of a fleet and keeps them running. It serves
// nobody itself, and when it dies they go on: the next one adopts them.
type supervisor struct {
	app        *app
	path       string // of the configuration
	log        *slog.Logger
	dir        handover.Dir
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
	deadline time.Time // of stopping
	err      error     // why it stops
}

// post is a place in the fleet that is to have a process.
type post struct {
	role     Role
	process  *process // nil: none now
	failures int      // in a row
	next     time.Time
}

// supervise runs a fleet until a signal, or a successor, ends it.
func (a *app) supervise(cfg *config.Config, path string, takeover bool, log *slog.Logger) error {
	dir, err := fleetDir(cfg, path)
	if err != nil {
		return failed(err)
	}
	s := &supervisor{
		app: a, path: path, log: log.With("role", "supervisor"), dir: dir, cfg: cfg,
		exits: make(chan exited), calls: make(chan func()),
	}
	s.succession = &succession{dir: dir, log: s.log}
	if err := s.succession.begin(takeover); err != nil {
		var locked *handover.LockedError
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
		s.adopt()
	}
	if err := s.open(); err != nil {
		return failed(err)
	}
	return s.run()
}

// adopt gives posts to the processes that a dead supervisor has left.
func (s *supervisor) adopt() {
	for _, role := range []Role{RoleCoordinator, RoleWorker} {
		for slot := range maxSlots {
			holder, held := s.dir.Look(slotName(role, slot, "lock"))
			if !held || holder.PID == 0 {
				continue
			}
			p := &process{role: role, slot: slot, pid: holder.PID, since: time.Now(), seen: time.Now()}
			i := slices.IndexFunc(s.posts, func(o *post) bool { return o.role == role && o.process == nil })
			if holder.State == stateRetired || i < 0 || !s.share(p) {
				s.others = append(s.others, p)
				s.leave(p)
				continue
			}
			s.log.Info("a process of the last supervisor goes on", "process", role, "slot", slot, "pid", p.pid)
			s.posts[i].process = p
		}
	}
}

// share takes over the sockets of an adopted process, and reports whether they are
// those that the configuration wants.
func (s *supervisor) share(p *process) bool {
	o, err := handover.Copy(context.Background(), s.dir, slotName(p.role, p.slot, "sock"))
	if err != nil {
		s.log.Warn("a process of the last supervisor does not share its sockets", "process", p.role, "slot", p.slot, "pid", p.pid, "error", err)
		return false
	}
	names := s.wanted()
	if len(s.sockets) == 0 && len(o.Sockets) == len(names) && !slices.ContainsFunc(o.Sockets, func(o handover.Socket) bool { return !slices.Contains(names, o.Name) }) {
		s.sockets = o.Sockets
		return true
	}
	handover.CloseAll(o.Sockets)
	return len(o.Sockets) == len(names) && len(s.sockets) > 0
}

// wanted are the sockets of the configuration.
func (s *supervisor) wanted() []string {
	names := []string{publicSocket(s.cfg)}
	if s.cfg.Fleet.Coordinator == "" {
		names = append(names, adminSocket(s.cfg))
	}
	if listen := s.cfg.Fleet.Listen; listen != "" && !strings.HasPrefix(listen, "unix:") { // that is the coordinator's
		names = append(names, fleetSocket(s.cfg))
	}
	return names
}

// open takes the predecessor's sockets and opens those that are missing.
func (s *supervisor) open() error {
	given := s.succession.sockets()
	wanted := s.wanted()
	for _, socket := range given {
		if slices.Contains(wanted, socket.Name) {
			s.sockets = append(s.sockets, socket)
		} else {
			socket.File.Close()
		}
	}
	for _, name := range wanted {
		if slices.ContainsFunc(s.sockets, func(o handover.Socket) bool { return o.Name == name }) {
			continue
		}
		key, address, _ := strings.Cut(name, " ")
		l, err := listenShared(context.Background(), address)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		socket, err := handover.FromListener(name, l)
		if err = errors.Join(err, l.Close()); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		s.sockets = append(s.sockets, socket)
	}
	return nil
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
		s.each(func(p *process) { p.signal(s.log, syscall.SIGINT) })
		s.deadline = time.Now().Add(stopMargin / 5)
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
	s.deadline = time.Now().Add(s.drainLimit())
	s.each(func(p *process) {
		if p.role == RoleWorker {
			p.signal(s.log, syscall.SIGTERM)
		}
	})
}

// drainLimit is what a process may need to drain.
func (s *supervisor) drainLimit() time.Duration {
	return time.Duration(s.cfg.Server.DrainTimeout) + time.Duration(s.cfg.Timeouts.Cleanup) + stopMargin
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
// the coordinator when the workers have gone, and what does not end.
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
		late := time.Now().After(s.deadline)
		s.each(func(p *process) {
			switch {
			case late && !p.killed:
				s.log.Error("a process does not end; it is killed", "process", p.role, "slot", p.slot, "pid", p.pid)
				p.kill(s.log)
			case workers == 0 && p.role == RoleCoordinator && !p.told:
				p.told = true
				s.deadline = time.Now().Add(s.drainLimit())
				p.signal(s.log, syscall.SIGTERM)
			}
		})
	}
	return running == 0
}

// offer is what a successor is given.
func (s *supervisor) offer() (handover.Offer, error) {
	o, err := copies(s.sockets)
	o.Ready = s.settled
	return o, err
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

// leaveAll leaves the sockets to the successor's processes.
func (s *supervisor) leaveAll() {
	s.retired = true
	s.each(s.leave)
	s.closeSockets()
}

// leave makes a process leave the sockets to others. A worker goes on with what it
// has, and finds the coordinator that is there.
func (s *supervisor) leave(p *process) {
	switch {
	case p.state == stateRetired:
	case p.role == RoleWorker:
		p.signal(s.log, syscall.SIGUSR1)
	default:
		p.signal(s.log, syscall.SIGTERM)
	}
}

func (s *supervisor) closeSockets() {
	handover.CloseAll(s.sockets)
	s.sockets = nil
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

// look learns how the processes are, and kills those that hang.
func (s *supervisor) look() {
	now := time.Now()
	s.each(func(p *process) {
		holder, held := s.dir.Look(slotName(p.role, p.slot, "lock"))
		switch {
		case p.cmd == nil && (!held || holder.PID != p.pid): // an adopted one has ended
			p.gone = true
		case held && holder.PID == p.pid && holder.Beat != p.beat:
			p.state, p.beat, p.seen = holder.State, holder.Beat, now
		case now.Sub(p.seen) > hungAfter && !p.killed:
			s.log.Error("a process shows no sign of life; it is killed", "process", p.role, "slot", p.slot, "pid", p.pid)
			p.kill(s.log)
		}
	})
	serving, ready := true, true
	for _, o := range s.posts {
		ready = ready && o.process != nil && o.process.state == stateReady
		serving = serving && o.process != nil && (o.process.state == stateReady || o.process.state == stateServing)
		if o.process != nil && o.process.gone {
			s.vacate(o, "it was another supervisor's child")
		}
	}
	s.others = slices.DeleteFunc(s.others, func(p *process) bool { return p.gone })
	if ready && !s.settled {
		s.settled = true
		s.log.Info("all processes are ready", "workers", s.cfg.Fleet.Workers)
	}
	if serving && !s.serving {
		s.serving = true
		if err := notifySystemd("READY=1"); err != nil {
			s.log.Warn("the service manager was not told", "error", err)
		}
	}
}

// vacate notes that the process of a post has ended, and when the next one starts.
func (s *supervisor) vacate(o *post, how string) {
	p := o.process
	o.process = nil
	if s.stopping || s.retired {
		return
	}
	if time.Since(p.since) >= longLife {
		o.failures = 0
	}
	wait := backOff(o.failures)
	o.failures++
	o.next = time.Now().Add(wait)
	s.log.Error("a process has ended; another takes its place", "process", p.role, "slot", p.slot, "pid", p.pid, "how", how, "after", wait.String())
}

// backOff is how long after so many failures in a row the next start waits.
func backOff(failures int) time.Duration {
	if failures == 0 {
		return 0
	}
	return min(lastBackOff, firstBackOff<<min(failures-1, 10))
}

// ended notes the end of a child.
func (s *supervisor) ended(e exited) {
	code := e.process.cmd.ProcessState.ExitCode()
	how := e.process.cmd.ProcessState.String()
	e.process.unleash(s.log)
	s.others = slices.DeleteFunc(s.others, func(p *process) bool { return p == e.process })
	i := slices.IndexFunc(s.posts, func(o *post) bool { return o.process == e.process })
	if code != 0 && (s.stopping || s.retired) && s.err == nil {
		s.err = failed(fmt.Errorf("%s %d: %s", e.process.role, e.process.slot, how))
	}
	if i < 0 {
		return
	}
	switch {
	case code == exitSlotTaken:
		s.posts[i].process = nil // the next one takes another
	case code == exitUsage && !s.settled && e.process.state != stateReady:
		s.posts[i].process = nil
		s.stop(&failure{exitUsage, fmt.Errorf("%s %d does not start", e.process.role, e.process.slot)})
	default:
		s.vacate(s.posts[i], how)
	}
}

// fill starts the processes that are missing.
func (s *supervisor) fill() {
	if s.stopping || s.retired {
		return
	}
	for _, o := range s.posts {
		if o.process != nil || time.Now().Before(o.next) || o.role == RoleWorker && !s.settled && !s.led() {
			continue
		}
		p, err := s.start(o.role)
		if err != nil {
			wait := backOff(o.failures + 1)
			o.failures++
			o.next = time.Now().Add(wait)
			s.log.Error("a process cannot be started", "process", o.role, "error", err, "again_after", wait.String())
			continue
		}
		o.process = p
	}
}

// led reports whether the fleet's coordinator can be reached: the first workers
// would find that of the predecessor.
func (s *supervisor) led() bool {
	for _, o := range s.posts {
		if o.role == RoleCoordinator {
			return o.process != nil && (o.process.state == stateServing || o.process.state == stateReady)
		}
	}
	return true
}

// start starts a process in the lowest slot that nobody has.
func (s *supervisor) start(role Role) (*process, error) {
	taken := map[int]bool{}
	s.each(func(p *process) { taken[p.slot] = taken[p.slot] || p.role == role })
	for slot := range maxSlots {
		if taken[slot] {
			continue
		}
		if _, held := s.dir.Look(slotName(role, slot, "lock")); held {
			continue
		}
		p, err := startProcess(s, role, slot)
		if err != nil {
			return nil, err
		}
		if !s.starting {
			p.unleash(s.log)
		}
		return p, nil
	}
	return nil, fmt.Errorf("all %d slots are taken", maxSlots)
}

// childArgs is the command line of a child.
func (s *supervisor) childArgs(role Role, slot int) []string {
	path := s.path
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	return []string{
		childCommand, "--role", string(role), "--slot", strconv.Itoa(slot), "--dir", string(s.dir),
		"--log-level", s.app.logLevel, "--log-format", s.app.logFormat, path,
	}
}
