package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// holdLock holds the lock of a process's slot as the process would. beat writes a heartbeat.
func holdLock(t *testing.T, s *supervisor, p *process) (beat func(n uint64)) {
	t.Helper()
	f, err := os.Create(s.dir.Path(slotLock(p.role, p.slot)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	return func(n uint64) {
		if _, err := f.WriteAt(fmt.Appendf(nil, "%10d %20s %20d\n", p.pid, stateReady, n), 0); err != nil {
			t.Error(err)
		}
	}
}

// checkFor makes a supervisor check its children for d, as run does.
func checkFor(s *supervisor, d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(checkEvery) {
		s.checkProcesses()
	}
}

// TestLostDirectory: a process that runs but whose lock file cannot be read is neither killed nor
// counted as ended. When the file can be read again, the process has heartbeatLimit again.
func TestLostDirectory(t *testing.T) {
	s := newFleet(t, node.RoleWorker)
	p := s.positions[0].process
	beat := holdLock(t, s, p)
	here, away := s.dir.Name(), t.TempDir()
	move := func(from, to string) { // all files
		t.Helper()
		entries, err := os.ReadDir(from)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if err := os.Rename(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	well := func(when string) {
		t.Helper()
		if p != s.positions[0].process || p.killed {
			t.Fatalf("%s: %+v", when, p)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		p.since, p.heartbeatAt = time.Now(), time.Now()
		for round := range uint64(2) {
			beat(round + 1)
			s.checkProcesses()
			if p.state != stateReady {
				t.Fatalf("%+v", p)
			}
			move(here, away)
			checkFor(s, 15*time.Second)
			well("away")
			move(away, here)
			checkFor(s, heartbeatLimit/2)
			well("back")
		}
		checkFor(s, heartbeatLimit+time.Second)
		if !p.killed {
			t.Error("a process without heartbeat is not killed")
		}
	})
}

// TestFullDirectory: no process is killed for a missing heartbeat while no process can write.
func TestFullDirectory(t *testing.T) {
	s := newFleet(t, node.RoleWorker)
	p := s.positions[0].process
	holdLock(t, s, p)(1)
	lock, err := s.dir.TryLock(servingLock)
	if err != nil {
		t.Fatal(err)
	}
	s.takeover.lock = lock
	lock.Unlock() // nothing can be written any more
	synctest.Test(t, func(t *testing.T) {
		p.since, p.heartbeatAt = time.Now(), time.Now()
		checkFor(s, 3*heartbeatLimit)
		if p.killed || p.state != stateReady {
			t.Fatalf("%+v", p)
		}
		s.takeover.lock = nil
		checkFor(s, heartbeatLimit+time.Second)
		if !p.killed {
			t.Error("a process without heartbeat is not killed")
		}
	})
}

// TestNotYetLocked: a child that never creates its lock file is killed.
func TestNotYetLocked(t *testing.T) {
	s := newFleet(t, node.RoleWorker)
	p := s.positions[0].process
	synctest.Test(t, func(t *testing.T) {
		p.since, p.heartbeatAt = time.Now(), time.Now()
		checkFor(s, heartbeatLimit-time.Second)
		if p.killed {
			t.Fatal("the child was killed too soon")
		}
		checkFor(s, 2*time.Second)
		if !p.killed {
			t.Error("the child is not killed")
		}
	})
}

// TestChildWithoutLock: a child returns SlotTaken only if another process has the slot.
func TestChildWithoutLock(t *testing.T) {
	dir := privatedirtest.Open(t)
	lock, err := dir.TryLock(slotLock(node.RoleWorker, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	away := privatedirtest.Open(t)
	if err := os.RemoveAll(away.Name()); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		dir  *privatedir.Dir
		slot int
		code int
	}{{dir, 1, exit.SlotTaken}, {away, 1, exit.Failure}} {
		c := &child{options: node.Options{Role: node.RoleWorker, Slot: tt.slot, Dir: tt.dir}, log: slog.New(slog.DiscardHandler)}
		var f *exit.Error
		if err := c.run(); !errors.As(err, &f) || f.Code != tt.code {
			t.Errorf("in %s: %v, want code %d", tt.dir.Name(), err, tt.code)
		}
	}
}

// TestCrashWhileStarting: Go ends a process that crashes with the status 2. The supervisor
// starts another one. Only a child that cannot use the configuration ends a fleet that starts.
func TestCrashWhileStarting(t *testing.T) {
	for _, tt := range []struct {
		status string
		stops  bool
	}{{"2", false}, {strconv.Itoa(exit.Unusable), true}} {
		s := newFleet(t)
		c := exec.Command("sh", "-c", "exit "+tt.status)
		if err := c.Run(); c.ProcessState == nil {
			t.Fatal(err)
		}
		o := &position{role: node.RoleWorker, process: &process{role: node.RoleWorker, cmd: c, pid: c.Process.Pid, since: time.Now()}}
		s.positions = append(s.positions, o)
		s.childExited(exited{o.process})
		var f *exit.Error
		if s.stopping != tt.stops || tt.stops && (!errors.As(s.err, &f) || f.Code != exit.Usage) || !tt.stops && o.failures != 1 {
			t.Errorf("after status %s: stopping %v, %v, %+v", tt.status, s.stopping, s.err, o)
		}
	}
}

// TestStopWhileStarting: a child that SIGTERM ends before it handles signals has drained. Another
// signal is an error.
func TestStopWhileStarting(t *testing.T) {
	for signal, fails := range map[string]bool{"TERM": false, "KILL": true} {
		s := newFleet(t)
		c := exec.Command("sh", "-c", "kill -"+signal+" $$")
		if err := c.Run(); c.ProcessState == nil {
			t.Fatal(err)
		}
		s.stopping = true
		s.childExited(exited{&process{role: node.RoleWorker, cmd: c, pid: c.Process.Pid, since: time.Now()}})
		if (s.err != nil) != fails {
			t.Errorf("after %s: %v", signal, s.err)
		}
	}
}

// TestBackOff: after each failure of a child the next start waits longer, unless the slot
// was taken. After a start that failed it waits longer too.
func TestBackOff(t *testing.T) {
	s := newFleet(t, node.RoleWorker)
	o := s.positions[0]
	for n := range 5 {
		c := exec.Command("false")
		if err := c.Run(); c.ProcessState == nil {
			t.Fatal(err)
		}
		o.process = &process{role: node.RoleWorker, cmd: c, pid: c.Process.Pid, since: time.Now()}
		before := time.Now()
		s.childExited(exited{o.process})
		if o.process != nil || o.failures != n+1 || o.next.Before(before.Add(backOff(n))) {
			t.Errorf("after %d failures: %+v", n+1, o)
		}
	}
	s.dir.Close() // nothing can be read there any more
	if _, err := s.startInFreeSlot(node.RoleWorker); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("started: %v", err)
	}
	o.next = time.Time{}
	before := time.Now()
	s.startMissing()
	if o.process != nil || o.failures != 6 || o.next.Before(before.Add(backOff(6))) {
		t.Errorf("%+v", o)
	}
	s.startMissing()
	if o.failures != 6 {
		t.Error("the start is tried again at once")
	}
}
