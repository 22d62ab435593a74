package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/balance"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// takeoverControl connects a process with its predecessor, from which it takes the sockets, and
// with its successor, to which it gives them. It implements node.Takeover.
type takeoverControl struct {
	dir   *privatedir.Dir
	log   *slog.Logger
	flag  string          // command-line flag by which a successor is started
	taken *takeover.Taken // received from the predecessor; nil without one

	mu          sync.Mutex
	lock        *privatedir.Lock // servingLock, nil until this process has it; guarded by mu
	serving     bool             // the control socket is served; guarded by mu
	successor   *exec.Cmd        // started by SIGUSR2 and not ready yet; guarded by mu
	retiredLock *privatedir.Lock // held from the takeover until the process ends; guarded by mu
}

// noSuccessor is logged when SIGUSR2 comes to a process that no successor can replace.
const noSuccessor = "no process can take over from this one"

// refreshEvery is how often the files in the fleet's directory get a new modification
// time. Programs that clean temporary directories remove files that are days old.
const refreshEvery = time.Hour

// begin takes the sockets of the predecessor, if replace is set and there is one.
// Otherwise it takes servingLock, and returns *privatedir.LockedError if another process
// has the lock.
func (t *takeoverControl) begin(replace bool) error {
	if replace {
		taken, err := takeover.Take(context.Background(), t.dir)
		if err == nil {
			t.taken = taken
			t.log.Info("taking over", "predecessor", taken.Predecessor)
			return nil
		}
		if !errors.Is(err, takeover.ErrNoPredecessor) {
			return fmt.Errorf("take over: %w", err)
		}
		t.log.Info("there is no process to take over from")
	}
	lock, err := t.dir.TryLock(servingLock)
	if err != nil {
		return err
	}
	t.lock = lock
	return nil
}

// sockets returns the sockets of the predecessor.
func (t *takeoverControl) sockets() []takeover.Socket {
	if t.taken == nil {
		return nil
	}
	return t.taken.Sockets
}

// PredecessorReady implements node.Takeover.
func (t *takeoverControl) PredecessorReady() bool { return t.taken != nil && t.taken.Offer.Ready }

// abandon lets the predecessor continue, unless the predecessor has already stopped
// accepting.
func (t *takeoverControl) abandon() {
	if t.taken != nil {
		_ = t.taken.Close() // may be closed already
	}
}

// close abandons the predecessor and closes the directory. A process without a successor removes
// the files that the next start does not need. A process with a successor leaves them: if it took
// servingLock for the removal, it could take the lock from a successor of its successor.
func (t *takeoverControl) close() {
	t.abandon()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.retiredLock.Unlock()
	if t.lock != nil {
		t.removeFiles()
	}
	t.lock.Unlock()
	t.lock, t.retiredLock = nil, nil
	t.dir.Close()
}

// removeFiles removes the locks that no process holds, with the sockets that they protect
// (lane-*.sock of HTTP/3). The children leave locks, and processes that were killed leave both.
// If no process is left, it also
// removes the file in which workers count their connections, and the sockets of coordinators that
// were killed. ids.json, epoch, tenants-1,
// registered-* and quic.key stay for the next start. If an operation fails, a useless file
// stays. The caller holds servingLock.
func (t *takeoverControl) removeFiles() {
	const suffix = ".lock"
	names, err := t.dir.Names("", suffix)
	alone := err == nil
	for _, name := range names {
		if name == servingLock {
			continue
		}
		lock, err := t.dir.TryLock(name)
		if err != nil {
			alone = false // a process with a successor serves its remaining requests
			continue
		}
		_ = t.dir.Remove(strings.TrimSuffix(name, suffix) + ".sock") // most have none
		lock.Unlock()
	}
	if alone {
		_ = balance.Remove(t.dir) // only workers of a fleet make it
		node.RemoveCoordinatorSockets(t.dir)
	}
}

// Run implements node.Takeover. It also returns nil when the process serves but no
// successor can take over from it; the log has the reason.
func (t *takeoverControl) Run(ctx context.Context, offer func() (takeover.Offer, error), stopAccepting func()) error {
	if t.taken != nil {
		err := t.taken.Ready()
		if errors.Is(err, takeover.ErrWithdrawn) {
			return err
		}
		if err != nil {
			t.log.Warn("the predecessor may still accept", "predecessor", t.taken.Predecessor, "error", err)
		} else {
			t.log.Info("taken over", "predecessor", t.taken.Predecessor)
		}
	}
	for t.lock == nil {
		lock, err := t.dir.TryLock(servingLock)
		var locked *privatedir.LockedError
		if err != nil && !errors.As(err, &locked) {
			t.log.Warn("this process cannot be taken over from", "error", err)
			return nil
		}
		t.mu.Lock()
		t.lock = lock
		t.mu.Unlock()
		if lock == nil && !sleep(ctx, 20*time.Millisecond) {
			return nil
		}
	}
	refreshing, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end()
	wg.Go(func() { t.refresh(refreshing) })
	server, err := takeover.Listen(t.dir, t.log)
	if err != nil {
		t.log.Warn("this process cannot be taken over from", "error", err)
		return nil
	}
	t.setServing(true)
	defer t.setServing(false)
	_, _ = server.Serve(ctx, offer, func(successor int) { t.release(successor, stopAccepting) }) // fails only when ctx ends
	return nil
}

// refresh renews the files in the directory until ctx ends.
func (t *takeoverControl) refresh(ctx context.Context) {
	for sleep(ctx, refreshEvery) {
		if err := t.dir.Refresh(); err != nil {
			t.log.Warn("files of fleet.dir may look unused and be removed", "error", err)
		}
	}
}

// testWrite writes the state in servingLock again. An error means that at present no
// process can write in the directory.
func (t *takeoverControl) testWrite() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lock == nil {
		return nil
	}
	return t.lock.SetState("")
}

func (t *takeoverControl) setServing(serving bool) {
	t.mu.Lock()
	t.serving = serving
	t.mu.Unlock()
}

// release leaves the sockets and servingLock to the successor, which waits for the answer.
func (t *takeoverControl) release(successor int, stopAccepting func()) {
	t.log.Info("a successor has taken over; the remaining requests continue", "successor", successor)
	stopAccepting()
	retired, err := t.dir.TryLock(retiredLock(os.Getpid()))
	if err != nil {
		t.log.Warn("a signal that ends the successor will not end this process", "error", err)
	}
	if err := notifySystemd("MAINPID=" + strconv.Itoa(successor)); err != nil {
		t.log.Warn("cannot report the successor to the service manager", "error", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lock.Unlock()
	t.lock, t.successor, t.retiredLock, t.serving = nil, nil, retired, false
}

// forward sends a signal to the processes that have a successor and still serve their
// remaining requests, and to the successor that is starting. A nil t has neither.
func (t *takeoverControl) forward(sig os.Signal) {
	if t == nil {
		return
	}
	names, err := t.dir.Names("retired-", ".lock")
	if err != nil {
		t.log.Warn("no signal could be sent to the former processes", "error", err)
	}
	for _, name := range names {
		lock, err := t.dir.TryLock(name)
		if err == nil { // the process was killed
			lock.Unlock()
			continue
		}
		var locked *privatedir.LockedError
		if errors.As(err, &locked) && locked.Holder.PID > 0 && locked.Holder.PID != os.Getpid() {
			t.signal(locked.Holder.PID, sig)
		}
	}
	t.mu.Lock()
	successor := t.successor
	t.mu.Unlock()
	if successor != nil {
		t.signal(successor.Process.Pid, sig)
	}
}

func (t *takeoverControl) signal(pid int, sig os.Signal) {
	p, err := os.FindProcess(pid)
	if err == nil {
		err = p.Signal(sig)
	}
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.log.Warn("no signal could be sent", "process", pid, "error", err)
	}
}

// startSuccessor starts the program, as it is on disk now, as the successor.
func (t *takeoverControl) startSuccessor() {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.successor != nil:
		t.log.Warn("a successor is already starting", "successor", t.successor.Process.Pid)
		return
	case !t.serving:
		t.log.Warn(noSuccessor)
		return
	}
	args := os.Args[1:]
	if !slices.Contains(args, t.flag) {
		args = append(slices.Clip(args), t.flag)
	}
	successor := exec.Command(program(), args...)
	successor.Stdin, successor.Stdout, successor.Stderr = os.Stdin, os.Stdout, os.Stderr
	successor.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // signals of the terminal reach the successor only through this process
	if err := successor.Start(); err != nil {
		t.log.Error("the successor cannot be started; this process continues", "error", err)
		return
	}
	t.successor = successor
	t.log.Info("successor started", "successor", successor.Process.Pid, "program", successor.Path)
	go func() { // ends with the successor, or with this process
		err := successor.Wait()
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.successor == successor {
			t.successor = nil
			t.log.Error("the successor has ended before it was ready; this process continues", "error", err)
		}
	}()
}

// program returns the path of the running program. If the program was started through a
// symbolic link, the path is that of the link, which may lead to a new version by now.
func program() string {
	if filepath.IsAbs(os.Args[0]) {
		return os.Args[0]
	}
	if path, err := exec.LookPath(os.Args[0]); err == nil {
		if path, err = filepath.Abs(path); err == nil {
			return path
		}
	}
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return path
}

// sleep waits for d. It returns false if ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
