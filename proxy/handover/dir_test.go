package handover

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestDefaultDir(t *testing.T) {
	base := t.TempDir()
	if err := os.Symlink(base, base+"-link"); err != nil {
		t.Fatal(err)
	}
	one, err := DefaultDir(filepath.Join(base, "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	for path, same := range map[string]bool{
		filepath.Join(base, "x", "..", "config.toml"): true,
		filepath.Join(base+"-link", "config.toml"):    true,
		filepath.Join(base, "other.toml"):             false,
	} {
		if other, err := DefaultDir(path); err != nil || (other == one) != same {
			t.Errorf("%s: %s, %v; the other is %s", path, other, err, one)
		}
	}
}

func TestOpenDir(t *testing.T) {
	base := t.TempDir()
	good := Dir(filepath.Join(base, "a", "b"))
	for range 2 {
		if err := good.Open(); err != nil {
			t.Error(err)
		}
	}
	wide, file, link := filepath.Join(base, "wide"), filepath.Join(base, "file"), filepath.Join(base, "link")
	if err := errors.Join(os.Mkdir(wide, 0o755), os.Chmod(wide, 0o755), os.WriteFile(file, nil, 0o600), os.Symlink(string(good), link)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		wide:                               "open to others",
		file:                               "no directory",
		link:                               "no directory",
		filepath.Join(base, "x", "y", "z"): "no such file",
	} {
		if err := Dir(path).Open(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}

func TestLock(t *testing.T) {
	d := openDir(t)
	if _, held, err := d.Look("a.lock"); held || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before there is one: %v, %v", held, err)
	}
	lock, err := d.TryLock("a.lock")
	if err != nil {
		t.Fatal(err)
	}
	if h, held, err := d.Look("a.lock"); !held || err != nil || h.PID != os.Getpid() || h.State != "" {
		t.Errorf("%+v, %v, %v", h, held, err)
	}
	for _, state := range []string{"starting", "ready", "a-state-of-20-letters", "two words"} {
		err := lock.Say(state)
		if bad := len(state) > maxState || strings.Contains(state, " "); bad != (err != nil) {
			t.Errorf("%q: %v", state, err)
		} else if h, held, _ := d.Look("a.lock"); !bad && (h.State != state || !held) {
			t.Errorf("%+v", h)
		}
	}
	var locked *LockedError
	if _, err := d.TryLock("a.lock"); !errors.As(err, &locked) || locked.Holder.PID != os.Getpid() || locked.Holder.State != "ready" {
		t.Errorf("a second one: %v", err)
	}
	lock.Unlock()
	if _, held, err := d.Look("a.lock"); held || err != nil {
		t.Errorf("after its end: %v, %v", held, err)
	}
	again, err := d.TryLock("a.lock")
	if err != nil {
		t.Fatal(err)
	}
	again.Unlock()
	if err := os.Symlink("elsewhere", d.Path("b.lock")); err != nil {
		t.Fatal(err)
	}
	if _, err := d.TryLock("b.lock"); err == nil {
		t.Error("a link is followed")
	}
	if _, held, err := d.Look("b.lock"); held || err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link: %v, %v", held, err)
	}
}

// TestRefresh: what is in use is not swept out as old, and nothing outside is touched.
func TestRefresh(t *testing.T) {
	d := openDir(t)
	lock, err := d.TryLock("a.lock")
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	outside := filepath.Join(t.TempDir(), "outside")
	if err := errors.Join(os.WriteFile(outside, nil, 0o600), os.WriteFile(d.Path("epoch"), nil, 0o600), os.Symlink(outside, d.Path("link"))); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-30 * 24 * time.Hour)
	for _, path := range []string{d.Path("a.lock"), d.Path("epoch"), outside} {
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Refresh(); err != nil {
		t.Fatal(err)
	}
	for path, renewed := range map[string]bool{d.Path("a.lock"): true, d.Path("epoch"): true, outside: false} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if age := time.Since(info.ModTime()); renewed != (age < time.Hour) {
			t.Errorf("%s is %v old", path, age)
		}
	}
	if h, held, err := d.Look("a.lock"); !held || err != nil || h.PID != os.Getpid() {
		t.Errorf("%+v, %v, %v", h, held, err)
	}
	if err := Dir(filepath.Join(string(d), "away")).Refresh(); err == nil {
		t.Error("what is not there is new")
	}
}

func FuzzParseHolder(f *testing.F) {
	f.Add([]byte("        12               ready                    3\n"))
	f.Add([]byte("12 - 3"))
	f.Add([]byte("-1 x 18446744073709551616"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h := parseHolder(b); h.PID < 0 || h.PID == 0 && h != (Holder{}) || len(h.State) > maxState {
			t.Errorf("%+v", h)
		}
	})
}
