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

// newFleet returns a supervisor with processes in all positions. The processes only wait.
func newFleet(t *testing.T, roles ...node.Role) *supervisor {
	t.Helper()
	cfg := config.Default()
	log, dir := slog.New(slog.DiscardHandler), privatedirtest.Open(t)
	s := &supervisor{log: log, dir: dir, takeover: &takeoverControl{dir: dir, log: log}, cfg: &cfg, exits: make(chan exited)}
	for slot, role := range roles {
		s.positions = append(s.positions, &position{role: role, process: waiting(t, role, slot)})
	}
	return s
}

// waiting returns a child that waits for a signal. Its process id stays in use until the
// end of the test, because only the test's clean-up waits for its end.
func waiting(t *testing.T, role node.Role, slot int) *process {
	t.Helper()
	c := exec.Command("sleep", "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill() // the child may have ended
		_ = c.Wait()         // the error contains the exit status
	})
	return &process{role: role, slot: slot, pid: c.Process.Pid, cmd: c, since: time.Now(), heartbeatAt: time.Now()}
}

// ended waits for the end of a process and returns the signal that ended it.
func ended(t *testing.T, p *process) syscall.Signal {
	t.Helper()
	_ = p.cmd.Wait() // the result is in ProcessState
	return p.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal()
}

// TestLateWorker: when a fleet stops, only the worker that does not end is killed. The
// coordinator gets the signal when no worker is left, and has a separate time limit.
func TestLateWorker(t *testing.T) {
	s := newFleet(t, node.RoleWorker, node.RoleCoordinator)
	worker, coordinator := s.positions[0].process, s.positions[1].process
	before := time.Now()
	s.stop(nil)
	if worker.deadline.Before(before.Add(s.drainLimit())) || !coordinator.deadline.IsZero() {
		t.Fatalf("due at %v and %v", worker.deadline, coordinator.deadline)
	}
	if s.finished() || worker.killed || coordinator.killed || !coordinator.deadline.IsZero() {
		t.Fatal("a worker that drains was disturbed")
	}
	worker.deadline = time.Now().Add(-time.Second)
	if s.finished() || !worker.killed || coordinator.killed || !coordinator.deadline.IsZero() {
		t.Fatalf("the worker was killed: %v, the coordinator was killed: %v, the coordinator was signalled: %v", worker.killed, coordinator.killed, !coordinator.deadline.IsZero())
	}
	ended(t, worker)
	s.childExited(exited{worker})
	before = time.Now()
	if s.finished() || coordinator.killed || coordinator.deadline.Before(before.Add(s.drainLimit())) {
		t.Fatalf("the coordinator killed: %v, due at %v", coordinator.killed, coordinator.deadline)
	}
	due := coordinator.deadline
	if s.finished() || coordinator.killed || coordinator.deadline != due {
		t.Fatal("the coordinator was signalled twice, or killed before its deadline")
	}
	if by := ended(t, coordinator); by != syscall.SIGTERM {
		t.Errorf("the coordinator ended by signal %v", by)
	}
	s.childExited(exited{coordinator})
	if !s.finished() {
		t.Error("not finished, although no process runs")
	}
}

// TestLateCoordinator: a coordinator that does not end after the signal is killed.
func TestLateCoordinator(t *testing.T) {
	s := newFleet(t, node.RoleCoordinator)
	p := s.positions[0].process
	s.stop(nil)
	p.deadline = time.Now().Add(-time.Second)
	if s.finished() || !p.killed {
		t.Fatal("the coordinator is not killed")
	}
	if by := ended(t, p); by != syscall.SIGKILL {
		t.Errorf("the coordinator ended by %v", by)
	}
}

// TestSecondSignal: all processes are stopped at once, and killed soon after.
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
		t.Errorf("the coordinator ended by signal %v", by)
	}
	if s.err == nil {
		t.Error("the supervisor ends without error")
	}
}

// TestReloadOfAStartingProcess: SIGHUP would end a process that does not handle the signal
// yet, so the process gets the signal when it has reported its first state.
func TestReloadOfAStartingProcess(t *testing.T) {
	s := newFleet(t, node.RoleWorker)
	s.options.Load = func() (*config.Config, error) { return s.cfg, nil }
	worker := s.positions[0].process
	beat := holdLock(t, s, worker)
	s.reload()
	s.checkProcesses()
	if !worker.reloadLater {
		t.Fatal("the process got the signal before it reported a state")
	}
	beat(1)
	s.checkProcesses()
	if got := ended(t, worker); got != syscall.SIGHUP || worker.reloadLater {
		t.Errorf("ended by %v, reloadLater %t", got, worker.reloadLater)
	}
}
