package privatedir

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
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
	if _, held, err := d.LockHolder("a.lock"); held || err != nil {
		t.Errorf("LockHolder after the end of the holder: %v, %v", held, err)
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
