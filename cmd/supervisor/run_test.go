package supervisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// TestRunTwice: a second process with the same file prints the process id of the first
// one, and the flag for a takeover.
func TestRunTwice(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	dir := privatedirtest.Open(t)
	lock, err := dir.TryLock(servingLock)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen, cfg.Fleet.Dir = taken.Addr().String(), "127.0.0.1:0", dir.Name()
	cfg.Policy.Runtime = "native"
	err = Run(Options{
		Path: "config.toml", Load: func() (*config.Config, error) { return &cfg, nil },
		TakeoverFlag: "--takeover", Log: slog.New(slog.DiscardHandler),
	})
	want := fmt.Sprintf("process %d already runs this file; pdproxy run --takeover replaces it: ", os.Getpid())
	var failed *exit.Error
	if !errors.As(err, &failed) || failed.Code != exit.Failure || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	if other := runsAlready(0, "--takeover", syscall.EADDRINUSE); other != syscall.EADDRINUSE {
		t.Errorf("without another process: %v", other)
	}
}

// TestSignalsWithoutDelay: SIGHUP does not end a process that starts; the reload comes after
// the start. SIGTERM drains while a reload waits, for example for the download of a plugin.
func TestSignalsWithoutDelay(t *testing.T) {
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen, cfg.Fleet.Dir = "127.0.0.1:0", "127.0.0.1:0", privatedirtest.Open(t).Name()
	cfg.Policy.Runtime = "native"
	first, reloading, release, done := true, make(chan struct{}), make(chan struct{}), make(chan error)
	defer close(release)
	go func() {
		done <- Run(Options{Path: "config.toml", TakeoverFlag: "--takeover", Log: slog.New(slog.DiscardHandler), Load: func() (*config.Config, error) {
			if first {
				first = false
				return &cfg, syscall.Kill(os.Getpid(), syscall.SIGHUP)
			}
			close(reloading)
			<-release
			return nil, errors.New("the reload ends after the process")
		}})
	}()
	limit := time.After(time.Minute)
	select {
	case <-reloading:
	case <-limit:
		t.Fatal("the reload does not begin")
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-limit:
		t.Error("SIGTERM waits for the reload")
	}
}

// TestReloads: requests during a reload cause one more reload.
func TestReloads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, end := 0, make(chan struct{})
		request, stop := startReloads(slog.New(slog.DiscardHandler), func() error {
			began++
			<-end
			return nil
		})
		for range 3 {
			request()
			synctest.Wait()
		}
		for want := range []int{1, 2} {
			if synctest.Wait(); began != want+1 {
				t.Fatalf("%d reloads, want %d", began, want+1)
			}
			end <- struct{}{}
		}
		if synctest.Wait(); began != 2 {
			t.Errorf("%d reloads, want 2", began)
		}
		stop()
	})
}

func TestLogStart(t *testing.T) {
	var text bytes.Buffer
	cfg := config.Default()
	cfg.Policy.Order = []string{"first/short"}
	cfg.Engines = make([]config.Engine, 3)
	logStart(Options{Path: "my.toml", Version: "1.2.3", Log: slog.New(slog.NewTextHandler(&text, nil))}, &cfg, "http://a:1", "http://b:2")
	want := "msg=\"pdproxy starts\" version=1.2.3 config=my.toml url=http://a:1 admin=http://b:2 plan=first/short,auto place=least_load mint=snowflake retain=likely plugins=0 engines=3 workers=0\n"
	if got := text.String(); !strings.HasSuffix(got, want) || strings.Count(got, "\n") != 1 {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestReloadRefused: the coordinator, whose metrics show that a reload was refused, learns
// of a bad file. The workers do not.
func TestReloadRefused(t *testing.T) {
	s := newFleet(t, node.RoleWorker, node.RoleCoordinator)
	s.options.Load = func() (*config.Config, error) { return nil, config.Problems{{Message: "bad"}} }
	worker, coordinator := s.positions[0].process, s.positions[1].process
	worker.state, coordinator.state = stateReady, stateReady
	s.reload()
	if by := ended(t, coordinator); by != syscall.SIGHUP {
		t.Errorf("the coordinator ended by %v", by)
	}
	if err := syscall.Kill(worker.pid, 0); err != nil || worker.reloadLater {
		t.Errorf("the worker received: %v", err)
	}
}

// TestOfferWaitsForTheLead: a successor receives the sockets when the coordinator leads. If
// the predecessor's coordinator leads on, the successor gets an error.
func TestOfferWaitsForTheLead(t *testing.T) {
	for _, leads := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			coordinator := &process{role: node.RoleCoordinator, state: stateStandby}
			s := &supervisor{positions: []*position{{process: coordinator}}, calls: make(chan func()), wasReady: true}
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				for {
					select {
					case call := <-s.calls:
						call()
					case <-ctx.Done():
						return
					}
				}
			}()
			if leads {
				time.AfterFunc(time.Second, func() { s.runInLoop(ctx, func() { coordinator.state = stateReady }) })
			}
			began := time.Now()
			o, err := s.offerWhenLeading(ctx)
			if leads && (err != nil || !o.Ready || time.Since(began) < time.Second) {
				t.Errorf("after %v: got %+v, %v", time.Since(began), o, err)
			}
			if !leads && (err == nil || !strings.Contains(err.Error(), "still leads")) {
				t.Errorf("after %v: got %v", time.Since(began), err)
			}
			cancel()
			synctest.Wait()
			if _, err := s.offerWhenLeading(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("after the end: got %v", err)
			}
		})
	}
}
