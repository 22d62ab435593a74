package supervisor

import (
	"log/slog"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// newFleet is a supervisor whose posts are filled with processes that only wait.
func newFleet(t *testing.T, roles ...node.Role) *supervisor {
	t.Helper()
	cfg := config.Default()
	log, dir := slog.New(slog.DiscardHandler), privatedirtest.Open(t)
	s := &supervisor{log: log, dir: dir, takeover: &takeover{dir: dir, log: log}, cfg: &cfg, exits: make(chan exited)}
	for slot, role := range roles {
		s.positions = append(s.positions, &position{role: role, process: waiting(t, role, slot)})
	}
	return s
}

// waiting is a child that waits for a signal. Nobody awaits it before the test's end,
// so that its number stays its own.
func waiting(t *testing.T, role node.Role, slot int) *process {
	t.Helper()
	c := exec.Command("sleep", "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()         // it says how
	})
	return &process{role: role, slot: slot, pid: c.Process.Pid, cmd: c, since: time.Now(), heartbeatAt: time.Now()}
}

// ended waits for the end of a process's run, and says which signal it was by.
func ended(t *testing.T, p *process) syscall.Signal {
	t.Helper()
	_ = p.cmd.Wait() // ProcessState says it
	return p.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal()
}

// TestLateWorker: of a fleet that stops, a worker that does not end is killed alone.
// The coordinator is told to end when no worker is left, and is given a time of its own.
func TestLateWorker(t *testing.T) {
	s := newFleet(t, node.RoleWorker, node.RoleCoordinator)
	worker, coordinator := s.positions[0].process, s.positions[1].process
	before := time.Now()
	s.stop(nil)
	if worker.deadline.Before(before.Add(s.drainLimit())) || !coordinator.deadline.IsZero() {
		t.Fatalf("due at %v and %v", worker.deadline, coordinator.deadline)
	}
	if s.finished() || worker.killed || coordinator.killed || !coordinator.deadline.IsZero() {
		t.Fatal("a worker that drains has not been left alone")
	}
	worker.deadline = time.Now().Add(-time.Second)
	if s.finished() || !worker.killed || coordinator.killed || !coordinator.deadline.IsZero() {
		t.Fatalf("the worker killed: %v, the coordinator killed: %v, told: %v", worker.killed, coordinator.killed, !coordinator.deadline.IsZero())
	}
	ended(t, worker)
	s.childExited(exited{worker})
	before = time.Now()
	if s.finished() || coordinator.killed || coordinator.deadline.Before(before.Add(s.drainLimit())) {
		t.Fatalf("the coordinator killed: %v, due at %v", coordinator.killed, coordinator.deadline)
	}
	due := coordinator.deadline
	if s.finished() || coordinator.killed || coordinator.deadline != due {
		t.Fatal("the coordinator is told once, and has its time")
	}
	if by := ended(t, coordinator); by != syscall.SIGTERM {
		t.Errorf("it was told by %v", by)
	}
	s.childExited(exited{coordinator})
	if !s.finished() {
		t.Error("nothing runs")
	}
}

// TestLateCoordinator: one that was told and does not end is killed too.
func TestLateCoordinator(t *testing.T) {
	s := newFleet(t, node.RoleCoordinator)
	p := s.positions[0].process
	s.stop(nil)
	p.deadline = time.Now().Add(-time.Second)
	if s.finished() || !p.killed {
		t.Fatal("it is waited for without end")
	}
	if by := ended(t, p); by != syscall.SIGKILL {
		t.Errorf("it ended by %v", by)
	}
}

// TestSecondSignal: all are stopped at once, and killed soon.
func TestSecondSignal(t *testing.T) {
	s := newFleet(t, node.RoleWorker, node.RoleCoordinator)
	s.stop(nil)
	s.handleSignal(syscall.SIGTERM)
	for _, o := range s.positions {
		if p := o.process; p.deadline.IsZero() || time.Until(p.deadline) > stopMargin/5 {
			t.Errorf("%s is due at %v", p.role, p.deadline)
		}
	}
	if by := ended(t, s.positions[1].process); by != syscall.SIGINT {
		t.Errorf("the coordinator was told by %v", by)
	}
	if s.err == nil {
		t.Error("a clean end")
	}
}
