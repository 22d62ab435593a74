package privatedir

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Lock is a locked file that one process holds until its end, however it ends. The file
// contains the holder's state. It stays if the holder is killed.
type Lock struct {
	dir  *Dir
	name string
	file *os.File
	beat uint64
}

// Holder is the state of the process that holds a lock.
type Holder struct {
	PID   int    // 0: not written yet
	State string // one word, set by the holder; "" after TryLock
	Beat  uint64 // increases with every SetState
}

// LockedError is the error of TryLock for a lock that another process holds.
type LockedError struct {
	Name   string
	Holder Holder
}

func (e *LockedError) Error() string {
	return fmt.Sprintf("lock %s is held by process %d", e.Name, e.Holder.PID)
}

// lockPatience is how long TryLock waits for processes that only read the lock.
const lockPatience = 100 * time.Millisecond

// TryLock takes the lock of that name. The error is *LockedError if another process
// holds it.
func (d *Dir) TryLock(name string) (*Lock, error) {
	deadline := time.Now().Add(lockPatience)
	f, err := d.LockFile(name)
	for errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(deadline) {
		time.Sleep(lockPatience / 20)
		f, err = d.LockFile(name)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		h, _, _ := d.LockHolder(name) // zero if it cannot be read
		return nil, &LockedError{Name: name, Holder: h}
	}
	if err != nil {
		return nil, err
	}
	l := &Lock{dir: d, name: name, file: f}
	if err := l.SetState(""); err != nil {
		l.Unlock()
		return nil, err
	}
	return l, nil
}

// LockFile opens a file, makes it if it is missing, and locks it by flock. The error is
// EWOULDBLOCK if another process holds the lock. UnlockFile ends the lock.
func (d *Dir) LockFile(name string) (*os.File, error) {
	for {
		f, err := d.OpenFile(name, os.O_RDWR|os.O_CREATE)
		if err != nil {
			return nil, err
		}
		if err := flock(f, unix.LOCK_EX); err != nil {
			f.Close()
			return nil, err
		}
		if d.leadsTo(name, f) {
			return f, nil
		}
		f.Close() // the last holder has removed the file between OpenFile and flock
	}
}

// UnlockFile removes a file that LockFile has locked, and ends the lock. The folder may have
// another file of that name, because a program has removed the locked one; that file stays.
func (d *Dir) UnlockFile(name string, f *os.File) error {
	var err error
	if d.leadsTo(name, f) { // only the holder of the lock removes the file
		err = d.Remove(name)
	}
	return errors.Join(err, f.Close())
}

// leadsTo reports whether f is the file of that name.
func (d *Dir) leadsTo(name string, f *os.File) bool {
	var own, there unix.Stat_t
	if unix.Fstat(int(f.Fd()), &own) != nil {
		return false
	}
	err := d.do("stat", name, func(at int) error { return unix.Fstatat(at, name, &there, unix.AT_SYMLINK_NOFOLLOW) })
	return err == nil && own.Dev == there.Dev && own.Ino == there.Ino
}

// flock takes a lock. The error is EWOULDBLOCK if another process holds it.
func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

const (
	// maxState is the longest state.
	maxState = 20
	// maxHolder is larger than the longest content of a lock file.
	maxHolder = 256
)

// SetState writes a state, one word, with the process id. Repeated calls show other
// processes that this process is running. Calls must not be concurrent.
func (l *Lock) SetState(state string) error {
	if len(state) > maxState || strings.ContainsAny(state, " \n") {
		return fmt.Errorf("state %q is not a short word", state)
	}
	l.beat++
	if state == "" {
		state = "-"
	}
	// The length is constant and the text is written in one call, so that a reader sees
	// a complete text.
	_, err := l.file.WriteAt(fmt.Appendf(nil, "%10d %20s %20d\n", os.Getpid(), state, l.beat), 0)
	return err
}

// Close releases the lock and leaves the file, so that other processes see that the lock was
// released. nil is allowed.
func (l *Lock) Close() {
	if l != nil {
		l.file.Close() // the lock belongs to the descriptor
	}
}

// Unlock releases the lock and removes its file. nil is allowed.
func (l *Lock) Unlock() {
	if l != nil {
		_ = l.dir.UnlockFile(l.name, l.file) // if this fails, a useless file stays
	}
}

// LockHolder returns the holder of the lock of that name; held is false if there is
// none. On an error the holder is unknown. The error is fs.ErrNotExist if there is no
// such file: nobody holds the lock, or another program has removed the file of the holder.
func (d *Dir) LockHolder(name string) (h Holder, held bool, err error) {
	f, err := d.OpenFile(name, os.O_RDONLY)
	if err != nil {
		return Holder{}, false, err
	}
	defer f.Close() // also releases the lock if it was free
	if err := flock(f, unix.LOCK_SH); !errors.Is(err, unix.EWOULDBLOCK) {
		return Holder{}, false, err
	}
	if h, err = readHolder(f); err != nil {
		return Holder{}, false, err
	}
	return h, true, nil
}

// readHolder reads a lock file: the state that its last holder wrote.
func readHolder(f *os.File) (Holder, error) {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxHolder))
	return parseHolder(b), err
}

func parseHolder(b []byte) (h Holder) {
	words := strings.Fields(string(b))
	if len(words) != 3 || len(words[1]) > maxState {
		return Holder{}
	}
	pid, err := strconv.Atoi(words[0])
	if err != nil || pid < 1 {
		return Holder{}
	}
	beat, err := strconv.ParseUint(words[2], 10, 64)
	if err != nil {
		return Holder{}
	}
	return Holder{PID: pid, State: strings.TrimPrefix(words[1], "-"), Beat: beat}
}
