package privatedir

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

func TestLock(t *testing.T) {
	d := openDir(t)
	if _, held, err := d.LockHolder("a.lock"); held || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("LockHolder before the lock exists: %v, %v", held, err)
	}
	lock, err := d.TryLock("a.lock")
	if err != nil {
		t.Fatal(err)
	}
	if h, held, err := d.LockHolder("a.lock"); !held || err != nil || h.PID != os.Getpid() || h.State != "" {
		t.Errorf(`d.LockHolder("a.lock") = %+v, %v, %v`, h, held, err)
	}
	for _, state := range []string{"starting", "ready", "a-state-of-20-letters", "two words"} {
		err := lock.SetState(state)
		if bad := len(state) > maxState || strings.Contains(state, " "); bad != (err != nil) {
			t.Errorf("%q: %v", state, err)
		} else if h, held, _ := d.LockHolder("a.lock"); !bad && (h.State != state || !held) {
			t.Errorf("%+v", h)
		}
	}
	var locked *LockedError
	if _, err := d.TryLock("a.lock"); !errors.As(err, &locked) || locked.Holder.PID != os.Getpid() || locked.Holder.State != "ready" {
		t.Errorf("a second one: %v", err)
	}
	lock.Unlock()
	if _, held, err := d.LockHolder("a.lock"); held || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("LockHolder after Unlock: %v, %v", held, err)
	}
	again, err := d.TryLock("a.lock")
	if err != nil {
		t.Fatal(err)
	}
	again.Unlock()
	if err := d.Symlink("elsewhere", "b.lock"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.TryLock("b.lock"); err == nil {
		t.Error("a link is followed")
	}
	if _, held, err := d.LockHolder("b.lock"); held || err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link: %v, %v", held, err)
	}
}

func FuzzParseHolder(f *testing.F) {
	f.Add([]byte("        12               ready                    3\n"))
	f.Add([]byte("12 - 3"))
	f.Add([]byte("-1 x 18446744073709551616"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h := parseHolder(b); h.PID < 0 || h.PID == 0 && h != (Holder{}) || len(h.State) > maxState {
			t.Errorf("parseHolder(b) = %+v", h)
		}
	})
}

// A lock has one holder at a time, although each holder removes the file.
func TestLockRemoved(t *testing.T) {
	d := openDir(t)
	var holders atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for held := 0; held < 40; {
				f, err := d.LockFile("a.lock")
				if errors.Is(err, unix.EWOULDBLOCK) {
					runtime.Gosched()
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				held++
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d processes hold the lock", n)
				}
				runtime.Gosched()
				holders.Add(-1)
				if err := d.UnlockFile("a.lock", f); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if names, err := d.Names("", ""); len(names) > 0 || err != nil {
		t.Errorf("the folder has %q, %v", names, err)
	}
}

// Unlock leaves the file of another holder, and Close leaves its own.
func TestUnlockOfRemovedFile(t *testing.T) {
	d := openDir(t)
	first, err := d.TryLock("a.lock")
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Remove("a.lock"); err != nil { // as a program does that removes old files
		t.Fatal(err)
	}
	second, err := d.TryLock("a.lock")
	if err != nil {
		t.Fatal(err)
	}
	first.Unlock()
	if _, held, err := d.LockHolder("a.lock"); !held || err != nil {
		t.Errorf("the second holder: %v, %v", held, err)
	}
	second.Close()
	if _, held, err := d.LockHolder("a.lock"); held || err != nil {
		t.Errorf("after Close: %v, %v", held, err)
	}
}
