package cmd

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// TestRefresh: the office's lock is made new from time to time.
func TestRefresh(t *testing.T) {
	dir := privatedirtest.Open(t)
	lock, err := dir.TryLock(officeLock)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	synctest.Test(t, func(t *testing.T) {
		s := &succession{dir: dir, log: slog.New(slog.DiscardHandler), lock: lock}
		ctx, cancel := context.WithCancel(t.Context())
		var refreshing sync.WaitGroup
		refreshing.Go(func() { s.refresh(ctx) })
		for range 3 {
			time.Sleep(refreshEvery + refreshEvery/4)
			synctest.Wait()
			info, err := os.Stat(dir.Path(officeLock))
			if err != nil {
				t.Fatal(err)
			}
			if age := time.Since(info.ModTime()); age < 0 || age >= refreshEvery {
				t.Errorf("it is %v old", age)
			}
		}
		cancel()
		refreshing.Wait()
	})
}

func TestDefaultFleetDir(t *testing.T) {
	base := t.TempDir()
	if err := os.Symlink(base, base+"-link"); err != nil {
		t.Fatal(err)
	}
	one, err := defaultFleetDir(filepath.Join(base, "config.toml"))
	if err != nil {
		t.Fatal(err)
	}
	for path, same := range map[string]bool{
		filepath.Join(base, "x", "..", "config.toml"): true,
		filepath.Join(base+"-link", "config.toml"):    true,
		filepath.Join(base, "other.toml"):             false,
	} {
		if other, err := defaultFleetDir(path); err != nil || (other == one) != same {
			t.Errorf("%s: %s, %v; the other is %s", path, other, err, one)
		}
	}
}
