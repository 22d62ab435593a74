package supervisor

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// TestRefresh: the modification time of servingLock is renewed from time to time.
func TestRefresh(t *testing.T) {
	dir := privatedirtest.Open(t)
	lock, err := dir.TryLock(servingLock)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	synctest.Test(t, func(t *testing.T) {
		r := &takeoverControl{dir: dir, log: slog.New(slog.DiscardHandler), lock: lock}
		ctx, cancel := context.WithCancel(t.Context())
		var refreshing sync.WaitGroup
		refreshing.Go(func() { r.refresh(ctx) })
		for range 3 {
			time.Sleep(refreshEvery + refreshEvery/4)
			synctest.Wait()
			info, err := os.Stat(dir.Path(servingLock))
			if err != nil {
				t.Fatal(err)
			}
			if age := time.Since(info.ModTime()); age < 0 || age >= refreshEvery {
				t.Errorf("the lock file is %v old", age)
			}
		}
		cancel()
		refreshing.Wait()
	})
}
