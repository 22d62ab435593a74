package supervisor

import (
	"context"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
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

// The end of a process removes what the next start does not need, unless another process uses it.
func TestRemoveFiles(t *testing.T) {
	kept := []string{"epoch", "ids.json", "quic.key", "registered-zmq", "tenants-1"}
	dead := []string{"balance-1", "coordinator-0.lock", "fleet.sock", "fleet.sock.1.00ff", "lane-3.lock", "lane-3.sock", "retired-7.lock", "worker-1.lock"}
	for _, tt := range []struct {
		name            string
		retired, office bool // this process has a successor; the successor serves
		worker          bool // a worker runs
		want            []string
	}{
		{name: "alone", want: kept},
		{name: "a worker runs", worker: true, want: append([]string{"balance-1", "fleet.sock", "fleet.sock.1.00ff", "worker-0.lock"}, kept...)},
		{name: "the successor serves", retired: true, office: true, want: append([]string{servingLock}, append(dead, kept...)...)},
		{name: "the successor has ended", retired: true, want: append(append([]string{}, dead...), kept...)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := privatedirtest.Open(t)
			for _, name := range append(dead, kept...) {
				if err := dir.WriteFile(name, nil); err != nil {
					t.Fatal(err)
				}
			}
			lock := func(name string) *privatedir.Lock {
				l, err := dir.TryLock(name)
				if err != nil {
					t.Fatal(err)
				}
				return l
			}
			own, err := privatedir.Open(dir.Name())
			if err != nil {
				t.Fatal(err)
			}
			c := &takeoverControl{dir: own, log: slog.New(slog.DiscardHandler)}
			if tt.retired {
				c.retiredLock, err = own.TryLock(retiredLock(1))
			} else {
				c.lock, err = own.TryLock(servingLock)
			}
			if err != nil {
				t.Fatal(err)
			}
			if tt.office {
				defer lock(servingLock).Unlock()
			}
			if tt.worker {
				defer lock("worker-0.lock").Unlock()
			}
			c.close()
			got, err := dir.Names("", "")
			slices.Sort(tt.want)
			if err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("got %q, %v\nwant %q", got, err, tt.want)
			}
		})
	}
}
