package cmd

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"
)

const (
	// hungAfter is how long a child may show no sign of life.
	hungAfter = 10 * time.Second
	// The first restart comes at once, the next ones after a time that doubles;
	// who lived long enough begins anew.
	firstBackOff = 100 * time.Millisecond
	lastBackOff  = 5 * time.Second
	longLife     = 30 * time.Second
	// maxSlots bounds the processes of one role, those that have retired included.
	maxSlots = 256
)

// post is a place in the fleet that is to have a process.
type post struct {
	role     Role
	process  *process // nil: none now
	failures int      // in a row
	next     time.Time
}

// look learns how the processes are, and kills those that hang.
func (s *supervisor) look() {
	now := time.Now()
	s.each(func(p *process) {
		holder, held, err := s.dir.Look(slotName(p.role, p.slot, "lock"))
		if !p.known(err) {
			s.overlook(p, err, now)
			return
		}
		switch {
		case p.cmd == nil && (!held || holder.PID != p.pid): // an adopted one has ended
			p.gone = true
		case held && holder.PID == p.pid && holder.Beat != p.beat:
			p.state, p.beat, p.seen, p.overlooked = holder.State, holder.Beat, now, false
		case now.Sub(p.seen) > hungAfter && !p.killed:
			if err := s.succession.say(); err != nil { // nor could it say anything
				s.overlook(p, err, now)
				return
			}
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

// known reports whether what Look says, with that error, tells how the process is. A
// child that has just been started may not have come to its lock yet.
func (p *process) known(err error) bool {
	return err == nil || p.cmd != nil && p.beat == 0 && errors.Is(err, fs.ErrNotExist)
}

// overlook is for a process whose lock cannot be read, or written. That is no word
// against it: the supervisor's own children live until they have ended, and others as
// long as there is a process of that number.
func (s *supervisor) overlook(p *process, err error, now time.Time) {
	if p.cmd == nil && errors.Is(syscall.Kill(p.pid, 0), syscall.ESRCH) {
		p.gone = true
		return
	}
	p.seen = now
	if !p.overlooked {
		p.overlooked = true
		s.log.Error("it cannot be seen how a process is; it is left alone", "process", p.role, "slot", p.slot, "pid", p.pid, "error", err)
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
		_, held, err := s.dir.Look(slotName(role, slot, "lock"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("look for a slot: %w", err)
		}
		if held {
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
		childCommand, "--role", string(role), "--slot", strconv.Itoa(slot), "--dir", s.dir.Name(),
		"--log-level", s.app.logLevel, "--log-format", s.app.logFormat, path,
	}
}
