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

// Lock is a file that one process holds until it ends, however it does, with what
// it says of itself inside.
type Lock struct {
	file *os.File
	beat uint64
}

// Holder is what the process that holds a lock says of itself.
type Holder struct {
	PID   int    // 0: it has said nothing yet
	State string // one word of its own choice; "" after TryLock
	Beat  uint64 // grows with every SetState
}

// LockedError is the error of TryLock for a lock that another process holds.
type LockedError struct {
	Name   string
	Holder Holder
}

func (e *LockedError) Error() string {
	return fmt.Sprintf("lock %s is held by process %d", e.Name, e.Holder.PID)
}

// lockPatience is how long TryLock waits for those who only look.
const lockPatience = 100 * time.Millisecond

// TryLock takes the lock of that name, or tells who has it.
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
		h, _ := readHolder(f) // zero: it cannot be told
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

// flock takes a lock, or fails with EWOULDBLOCK.
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
	// maxHolder is more than the longest of what a holder says.
	maxHolder = 256
)

// SetState writes a state, one word, beside the process id. Said again and again it
// shows others that the process is alive. One call at a time.
func (l *Lock) SetState(state string) error {
	if len(state) > maxState || strings.ContainsAny(state, " \n") {
		return fmt.Errorf("state %q is not a short word", state)
	}
	l.beat++
	if state == "" {
		state = "-"
	}
	// Always of one length, written at once: who reads it sees all of it.
	_, err := l.file.WriteAt(fmt.Appendf(nil, "%10d %20s %20d\n", os.Getpid(), state, l.beat), 0)
	return err
}

// Unlock gives the lock up. nil is allowed.
func (l *Lock) Unlock() {
	if l != nil {
		l.file.Close() // the lock is the descriptor's
	}
}

// LockHolder tells who holds the lock of that name; false when nobody does. An error says
// that nobody can tell. It is fs.ErrNotExist where there is no such file: then nobody
// has ever held the lock, or the file has been lost with who holds it.
func (d *Dir) LockHolder(name string) (h Holder, held bool, err error) {
	f, err := d.OpenFile(name, os.O_RDONLY)
	if err != nil {
		return Holder{}, false, err
	}
	defer f.Close() // and with it the lock, if nobody had it
	if err := flock(f, unix.LOCK_SH); !errors.Is(err, unix.EWOULDBLOCK) {
		return Holder{}, false, err
	}
	if h, err = readHolder(f); err != nil {
		return Holder{}, false, err
	}
	return h, true, nil
}

// readHolder reads a lock's file: what its last holder said.
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
