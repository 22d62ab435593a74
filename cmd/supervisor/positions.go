package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
)

const (
	// heartbeatLimit is how long a child may go without a heartbeat.
	heartbeatLimit = 10 * time.Second
	// The first restart comes at once, the next ones after a time that doubles. After a
	// process that ran for longLife the first restart comes at once again.
	firstBackOff = 100 * time.Millisecond
	lastBackOff  = 5 * time.Second
	longLife     = 30 * time.Second
	// maxSlots limits the processes of one role, including those that have retired.
	maxSlots = 256
)

// position is a place in the fleet that a process must fill. A process of any slot number
// can fill it: while a retired process still has its slot, the new one has another.
type position struct {
	role     node.Role
	process  *process  // nil: none now
	failures int       // in a row
	next     time.Time // of the earliest restart
}

// checkProcesses reads the states of the processes and kills those without a heartbeat.
func (s *supervisor) checkProcesses() {
	now := time.Now()
	s.eachProcess(func(p *process) {
		holder, held, err := s.dir.LockHolder(slotLock(p.role, p.slot))
		if !p.lockReadable(err) {
			s.tolerate(p, err, now)
			return
		}
		switch {
		case held && holder.PID == p.pid && holder.Beat != p.heartbeat:
			p.state, p.heartbeat, p.heartbeatAt, p.tolerated = holder.State, holder.Beat, now, false
			if p.reloadLater {
				p.reload(s.log)
			}
		case now.Sub(p.heartbeatAt) > heartbeatLimit && !p.killed:
			if err := s.takeover.testWrite(); err != nil { // the process cannot write a heartbeat either
				s.tolerate(p, err, now)
				return
			}
			s.log.Error("a process has sent no heartbeat; the supervisor kills it", "process", p.role, "slot", p.slot, "pid", p.pid)
			p.kill(s.log)
		}
	})
	serving, ready := true, true
	for _, o := range s.positions {
		ready = ready && o.process != nil && o.process.isReady()
		serving = serving && o.process != nil && (o.process.isReady() || o.process.state == stateServing)
	}
	if ready && !s.wasReady {
		s.wasReady = true
		s.log.Info("all processes are ready", "workers", s.cfg.Fleet.Workers)
	}
	if serving && !s.wasServing {
		s.wasServing = true
		notify(s.log, "READY=1")
	}
}

// lockReadable reports whether the lock file shows the state of the process. err is the
// error from reading the file. A child that has just started may not have created the
// file yet.
func (p *process) lockReadable(err error) bool {
	return err == nil || p.heartbeat == 0 && errors.Is(err, fs.ErrNotExist)
}

// tolerate keeps a process whose lock file cannot be read or written, because the process
// may be healthy. A child has ended when the system reports its end.
func (s *supervisor) tolerate(p *process, err error, now time.Time) {
	p.heartbeatAt = now
	if !p.tolerated {
		p.tolerated = true
		s.log.Error("the state of a process cannot be read; the process continues", "process", p.role, "slot", p.slot, "pid", p.pid, "error", err)
	}
}

// scheduleRestart sets when the next process of a position starts, after one has ended.
func (s *supervisor) scheduleRestart(o *position, how string) {
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
	s.log.Error("a process has ended; the supervisor starts another", "process", p.role, "slot", p.slot, "pid", p.pid, "how", how, "after", wait.String())
}

// backOff returns how long the next start waits after that many failures in a row.
func backOff(failures int) time.Duration {
	if failures == 0 {
		return 0
	}
	return min(lastBackOff, firstBackOff<<min(failures-1, 10))
}

// childExited processes the end of a child.
func (s *supervisor) childExited(e exited) {
	code := e.process.cmd.ProcessState.ExitCode()
	how := e.process.cmd.ProcessState.String()
	e.process.parentPipe.Close()
	i := slices.IndexFunc(s.positions, func(o *position) bool { return o.process == e.process })
	status, _ := e.process.cmd.ProcessState.Sys().(syscall.WaitStatus)
	// A child that starts does not handle SIGTERM yet, and it serves nothing.
	endedWhileStarting := status.Signaled() && status.Signal() == syscall.SIGTERM
	if code != 0 && !endedWhileStarting && (s.stopping || s.retired) && s.err == nil {
		s.err = exit.Failed(fmt.Errorf("%s %d: %s", e.process.role, e.process.slot, how))
	}
	if i < 0 {
		return
	}
	switch {
	case code == exit.SlotTaken:
		s.positions[i].process = nil // the next process takes another slot
	case code == exit.Unusable && !s.wasReady && !e.process.isReady():
		s.positions[i].process = nil
		s.stop(&exit.Error{Code: exit.Usage, Err: fmt.Errorf("%s %d does not start", e.process.role, e.process.slot)})
	default:
		s.scheduleRestart(s.positions[i], how)
	}
}

// startMissing starts the processes that are missing.
func (s *supervisor) startMissing() {
	if s.stopping || s.retired {
		return
	}
	for _, o := range s.positions {
		if o.process != nil || time.Now().Before(o.next) || o.role == node.RoleWorker && !s.wasReady && !s.coordinatorServes() {
			continue
		}
		p, err := s.startInFreeSlot(o.role)
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

// coordinatorServes reports whether the fleet's coordinator accepts connections. Workers
// that start before would connect to the predecessor's coordinator.
func (s *supervisor) coordinatorServes() bool {
	for _, o := range s.positions {
		if o.role == node.RoleCoordinator {
			return o.process != nil && (o.process.state == stateServing || o.process.isReady())
		}
	}
	return true
}

// startInFreeSlot starts a process in the lowest slot that no process has.
func (s *supervisor) startInFreeSlot(role node.Role) (*process, error) {
	taken := map[int]bool{}
	s.eachProcess(func(p *process) { taken[p.slot] = taken[p.slot] || p.role == role })
	for slot := range maxSlots {
		if taken[slot] {
			continue
		}
		_, held, err := s.dir.LockHolder(slotLock(role, slot))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("look for a free slot: %w", err)
		}
		if held {
			continue
		}
		return startProcess(s, role, slot)
	}
	return nil, fmt.Errorf("all %d slots are taken", maxSlots)
}
