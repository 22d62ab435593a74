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
// contains the holder's state.
type Lock struct {
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
	f, err := d.OpenFile(name, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(lockPatience)
	for err = flock(f, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(deadline); err = flock(f, unix.LOCK_EX) {
		time.Sleep(lockPatience / 20)
	}
	l := &Lock{file: f}
	if errors.Is(err, unix.EWOULDBLOCK) {
		h, _ := readHolder(f) // zero if it cannot be read
		err = &LockedError{Name: name, Holder: h}
	} else if err == nil {
		err = l.SetState("")
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return l, nil
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

// Unlock releases the lock. nil is allowed.
func (l *Lock) Unlock() {
	if l != nil {
		l.file.Close() // the lock belongs to the descriptor
	}
}

// LockHolder returns the holder of the lock of that name; held is false if there is
// none. On an error the holder is unknown. The error is fs.ErrNotExist if there is no
// such file: the lock was never taken, or the file was removed while it was held.
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
