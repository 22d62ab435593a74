package handover

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Dir is the directory in which the processes of one configuration meet. Only
// its owner may look into it.
type Dir string

// DefaultDir is the directory of a configuration file: the same for all who name
// the same file, whatever path they use, and for nobody else.
func DefaultDir(config string) (Dir, error) {
	path, err := filepath.Abs(config)
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		path = filepath.Join(real, filepath.Base(path))
	}
	h := fnv.New64a()
	h.Write([]byte(path))
	return Dir(filepath.Join(os.TempDir(), "pdproxy-"+strconv.Itoa(os.Geteuid()), fmt.Sprintf("%016x", h.Sum64()))), nil
}

// Open makes the directory and the one above it, if they are missing, and checks
// that nobody else may write to either.
func (d Dir) Open() error {
	for _, path := range []string{filepath.Dir(string(d)), string(d)} {
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	info, err := os.Lstat(string(d))
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.IsDir():
		return fmt.Errorf("%s is no directory", d)
	case ok && int(stat.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to user %d, not %d", d, stat.Uid, os.Geteuid())
	case info.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s is open to others (mode %04o): it must be 0700", d, info.Mode().Perm())
	}
	return nil
}

// Path is that of a file in the directory.
func (d Dir) Path(name string) string { return filepath.Join(string(d), name) }

// Lock is a file that one process holds until it ends, however it does, with its
// id inside.
type Lock struct {
	file *os.File
}

// LockedError is the error of TryLock for a lock that another process holds.
type LockedError struct {
	Name string
	PID  int // 0: it has not written it yet
}

func (e *LockedError) Error() string {
	return fmt.Sprintf("lock %s is held by process %d", e.Name, e.PID)
}

// TryLock takes the lock of that name, or tells who has it.
func (d Dir) TryLock(name string) (*Lock, error) {
	return d.lock(name, syscall.LOCK_EX|syscall.LOCK_NB)
}

// Lock waits for the lock of that name; there is no other end to that than the
// holder's.
func (d Dir) Lock(name string) (*Lock, error) { return d.lock(name, syscall.LOCK_EX) }

func (d Dir) lock(name string, how int) (*Lock, error) {
	f, err := os.OpenFile(d.Path(name), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = flock(f, how)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		f.Close()
		return nil, &LockedError{Name: name, PID: d.Holder(name)}
	}
	if err == nil {
		err = errors.Join(f.Truncate(0), write(f))
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
	return &Lock{f}, nil
}

func write(f *os.File) error {
	_, err := f.WriteAt(strconv.AppendInt(nil, int64(os.Getpid()), 10), 0)
	return err
}

// flock is done on the raw descriptor: the file stays out of the poller.
func flock(f *os.File, how int) error {
	return syscall.Flock(int(f.Fd()), how)
}

// Holder is the process that a lock's file names, 0 for none. It may have ended:
// only TryLock tells.
func (d Dir) Holder(name string) int {
	b, err := os.ReadFile(d.Path(name))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid < 1 {
		return 0
	}
	return pid
}

// Unlock gives the lock up. nil is allowed.
func (l *Lock) Unlock() {
	if l != nil {
		l.file.Close() // the lock is the descriptor's
	}
}
