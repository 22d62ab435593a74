package cmd

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/handover"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// succession is a process's place between its predecessor and its successor: it
// takes over from the one, and is taken over from by the other.
type succession struct {
	dir   *privatedir.Dir
	log   *slog.Logger
	taken *handover.Taken // nil: nobody was there to take over from

	mu      sync.Mutex
	lock    *privatedir.Lock // guarded by mu; nil: not in office
	serving bool             // the control socket is served; guarded by mu
	heir    *exec.Cmd        // the successor that SIGUSR2 started and that is not ready; guarded by mu
	retired *privatedir.Lock // held until the process ends; guarded by mu
}

// officeLock is held by the process that serves a configuration, alone or by its
// children.
const officeLock = "office.lock"

// refreshEvery is how often what is in the fleet's directory is made new: those who
// sweep temporary directories wait for days.
const refreshEvery = time.Hour

// errRetired is the end of a process that has a successor.
var errRetired = errors.New("a successor has taken over")

// fleetDir opens the folder in which the processes of a configuration file meet. The
// caller closes it.
func fleetDir(cfg *config.Config, path string) (*privatedir.Dir, error) {
	name := cfg.Fleet.Dir
	if name == "" {
		var err error
		if name, err = defaultFleetDir(path); err != nil {
			return nil, fmt.Errorf("fleet.dir: %w", err)
		}
	}
	dir, err := privatedir.Open(name)
	if err != nil {
		return nil, fmt.Errorf("fleet.dir: %w", err)
	}
	return dir, nil
}

// defaultFleetDir is the folder of a configuration file: the same for all processes of
// this user that name the same file, whatever path they use, and no other file's.
func defaultFleetDir(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		path = filepath.Join(real, filepath.Base(path))
	}
	h := fnv.New64a()
	h.Write([]byte(path))
	return filepath.Join(privatedir.Runtime(), fmt.Sprintf("%016x", h.Sum64())), nil
}

// begin takes the sockets of a predecessor if takeover is asked for, or else the
// office, which nobody may have.
func (s *succession) begin(takeover bool) error {
	if takeover {
		taken, err := handover.Take(context.Background(), s.dir)
		if err == nil {
			s.taken = taken
			s.log.Info("taking over", "predecessor", taken.Predecessor)
			return nil
		}
		if !errors.Is(err, handover.ErrNobody) {
			return fmt.Errorf("take over: %w", err)
		}
		s.log.Info("there is no process to take over from")
	}
	lock, err := s.dir.TryLock(officeLock)
	if err != nil {
		return err
	}
	s.lock = lock
	return nil
}

// sockets are what the predecessor has given.
func (s *succession) sockets() []handover.Socket {
	if s == nil || s.taken == nil {
		return nil
	}
	return s.taken.Sockets
}

// home is the folder of the process, nil for none.
func (s *succession) home() *privatedir.Dir {
	if s == nil {
		return nil
	}
	return s.dir
}

// abandon lets the predecessor go on.
func (s *succession) abandon() {
	if s != nil && s.taken != nil {
		_ = s.taken.Close() // it may have been before
	}
}

// close ends the part of this process: a predecessor that has not been told otherwise
// goes on.
func (s *succession) close() {
	if s != nil {
		s.abandon()
		s.dir.Close()
	}
}

// assume makes the predecessor stop accepting, and then waits for a successor,
// until ctx ends. offer is what it gets, release is called when it is ready. The
// error is errRetired after that, and nil when the process merely cannot be taken
// over from.
func (s *succession) assume(ctx context.Context, offer func() (handover.Offer, error), release func()) error {
	if s.taken != nil {
		err := s.taken.Ready()
		if errors.Is(err, handover.ErrWithdrawn) {
			return err
		}
		if err != nil {
			s.log.Warn("the predecessor may still accept", "predecessor", s.taken.Predecessor, "error", err)
		} else {
			s.log.Info("taken over", "predecessor", s.taken.Predecessor)
		}
	}
	for s.lock == nil {
		lock, err := s.dir.TryLock(officeLock)
		var locked *privatedir.LockedError
		if err != nil && !errors.As(err, &locked) {
			s.log.Warn("this process cannot be taken over from", "error", err)
			return nil
		}
		s.mu.Lock()
		s.lock = lock
		s.mu.Unlock()
		if lock == nil && !sleep(ctx, 20*time.Millisecond) {
			return nil
		}
	}
	refreshing, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end()
	wg.Go(func() { s.refresh(refreshing) })
	server, err := handover.Listen(s.dir, handover.Control, s.log)
	if err != nil {
		s.log.Warn("this process cannot be taken over from", "error", err)
		return nil
	}
	s.setServing(true)
	defer s.setServing(false)
	_, err = server.Serve(ctx, offer, func(successor int) { s.release(successor, release) })
	if err != nil {
		return nil
	}
	return errRetired
}

// refresh keeps what is in the directory from looking as if nobody used it.
func (s *succession) refresh(ctx context.Context) {
	for sleep(ctx, refreshEvery) {
		if err := s.dir.Refresh(); err != nil {
			s.log.Warn("files of fleet.dir may look unused, and be swept away", "error", err)
		}
	}
}

// say writes what the office's lock says once more. An error says that no process can
// write in the directory now.
func (s *succession) say() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock == nil {
		return nil
	}
	return s.lock.Say("")
}

func (s *succession) setServing(serving bool) {
	s.mu.Lock()
	s.serving = serving
	s.mu.Unlock()
}

// release makes room for the successor, which waits for the answer.
func (s *succession) release(successor int, stopAccepting func()) {
	s.log.Info("a successor has taken over; going on with what runs", "successor", successor)
	stopAccepting()
	retired, err := s.dir.TryLock(retiredName(os.Getpid()))
	if err != nil {
		s.log.Warn("the successor cannot end this process with itself", "error", err)
	}
	if err := notifySystemd("MAINPID=" + strconv.Itoa(successor)); err != nil {
		s.log.Warn("the service manager was not told of the successor", "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lock.Unlock()
	s.lock, s.heir, s.retired, s.serving = nil, nil, retired, false
}

// retiredName is the lock of a process that has been taken over from and still
// serves what it had.
func retiredName(pid int) string { return fmt.Sprintf("retired-%d.lock", pid) }

// forward sends a signal to the processes that still serve what they had when
// they were taken over from, and to the successor that is just starting.
func (s *succession) forward(sig os.Signal) {
	if s == nil {
		return
	}
	names, err := s.dir.Names("retired-", ".lock")
	if err != nil {
		s.log.Warn("no signal could be sent to processes that were taken over from", "error", err)
	}
	for _, name := range names {
		lock, err := s.dir.TryLock(name)
		if err == nil { // it has ended
			_ = s.dir.Remove(name)
			lock.Unlock()
			continue
		}
		var locked *privatedir.LockedError
		if errors.As(err, &locked) && locked.Holder.PID > 0 && locked.Holder.PID != os.Getpid() {
			s.signal(locked.Holder.PID, sig)
		}
	}
	s.mu.Lock()
	heir := s.heir
	s.mu.Unlock()
	if heir != nil {
		s.signal(heir.Process.Pid, sig)
	}
}

func (s *succession) signal(pid int, sig os.Signal) {
	p, err := os.FindProcess(pid)
	if err == nil {
		err = p.Signal(sig)
	}
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		s.log.Warn("no signal could be sent", "process", pid, "error", err)
	}
}

// startHeir starts the program, as it is now on disk, to take over.
func (s *succession) startHeir() {
	if s == nil {
		slog.Warn("nobody can take over from this process")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.heir != nil:
		s.log.Warn("a successor is already starting", "successor", s.heir.Process.Pid)
		return
	case !s.serving:
		s.log.Warn("nobody can take over from this process")
		return
	}
	args := os.Args[1:]
	if !slices.Contains(args, takeoverFlag) {
		args = append(slices.Clip(args), takeoverFlag)
	}
	heir := exec.Command(program(), args...)
	heir.Stdin, heir.Stdout, heir.Stderr = os.Stdin, os.Stdout, os.Stderr
	heir.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal's signals reach it through this process, once
	if err := heir.Start(); err != nil {
		s.log.Error("the successor cannot be started; this process goes on", "error", err)
		return
	}
	s.heir = heir
	s.log.Info("successor started", "successor", heir.Process.Pid, "program", heir.Path)
	go func() { // ends with the successor, or with this process
		err := heir.Wait()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.heir == heir {
			s.heir = nil
			s.log.Error("the successor has ended before it was ready; this process goes on", "error", err)
		}
	}()
}

// program is the path of what runs, by which a new version is found: through the
// symbolic link by which it was started, if it was.
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

// sleep waits, or returns false when ctx ends first.
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
