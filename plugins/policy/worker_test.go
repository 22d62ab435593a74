package policy

import (
	"bytes"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/policy/policytest"
)

// gated is a world whose foreign functions wait. A guest that calls one stays
// in the call until the test releases it, and nothing can interrupt it there.
type gated struct {
	world
	entered, release chan struct{}
}

func newGated() *gated {
	return &gated{entered: make(chan struct{}, 1), release: make(chan struct{})}
}

func (g *gated) Foreign(uint32, string, []byte) ([]byte, host.Status) {
	g.entered <- struct{}{}
	<-g.release
	return nil, host.OK
}

// loadGated loads one guarded VM of world g.
func loadGated(t *testing.T, g *gated, limit time.Duration) *Version {
	l := newLoading()
	l.Load.Guarded = true
	l.VMs = 1
	l.Budget = limit
	l.NewEnv = func() host.Env { return g }
	return l.load(t)
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no VM became free in time: %s", what)
		}
	}
}

// TestRequestLeaves: a request does not wait for a guest call that does not
// return. When the call returns, the failure counts, the VM is closed, and
// another one serves.
func TestRequestLeaves(t *testing.T) {
	g := newGated()
	v := loadGated(t, g, 200*time.Millisecond)
	place := hook(t, v, abi.HookPlace)
	m := v.pool.grab()
	v.pool.put(m)

	reasons := make(chan string, 1)
	f := policytest.Pair("count")
	go func() {
		_, reason := place.Place(f)
		f.Candidates[0].BlocksGPU++ // the request may reuse its facts
		reasons <- reason
	}()
	<-g.entered
	select {
	case reason := <-reasons:
		if reason != Late {
			t.Errorf("the request has %q", reason)
		}
	case <-time.After(time.Minute):
		close(g.release)
		t.Fatal("the request waits for the guest")
	}
	if m.MemorySize() == 0 {
		t.Error("the VM was closed under its guest")
	}
	if v.pool.grab() != nil {
		t.Error("the VM of a call that runs is in the pool")
	}
	if s := place.Summary(); s.Calls != 1 || s.Failures != 1 {
		t.Errorf("place.Summary() = %+v", s)
	}
	time.Sleep(v.opts.Budget) // the guest has used up its own time, also if it began late
	close(g.release)
	var fresh *vm
	eventually(t, "another VM", func() bool { fresh = v.pool.grab(); return fresh != nil })
	if fresh == m || m.MemorySize() != 0 || m.Err() == nil {
		t.Errorf("the abandoned VM serves again, with %d bytes of memory", m.MemorySize())
	}
	v.pool.put(fresh)
	v.opts.Budget = time.Minute // the machine may be busy
	if d, reason := place.Place(policytest.Pair("")); reason != "" || d.Decode != 3 {
		t.Errorf("afterwards: %+v, %q", d, reason)
	}
}

// TestLateStart: a request that had to wait for its VM abandons a guest that has used
// little of its time. The guest's call continues, does not count as a failure, and the VM
// serves again.
func TestLateStart(t *testing.T) {
	g := newGated()
	v := loadGated(t, g, time.Hour)
	place := hook(t, v, abi.HookPlace)
	m := v.pool.grab()
	frame := abi.AppendPlace(nil, &abi.Header{}, policytest.Pair("count"))
	view, at, err := m.Scratch(t.Context(), roomFor(len(frame)))
	if err != nil {
		t.Fatal(err)
	}
	copy(view, frame)
	m.worker.p, m.worker.at, m.worker.size = place, at, uint32(len(frame))
	left := make(chan error, 1)
	go func() {
		_, err := m.worker.do(v, m, time.Now().Add(time.Hour))
		left <- err
	}()
	<-g.entered
	m.worker.timer.Reset(0) // the request's time is up
	if err := <-left; err != errLeft {
		t.Fatalf("error of the abandoned call: %v, want errLeft", err)
	}
	close(g.release)
	var again *vm
	eventually(t, "the VM", func() bool { again = v.pool.grab(); return again != nil })
	if again != m || m.Err() != nil {
		t.Errorf("the VM was replaced: %v", m.Err())
	}
	v.pool.put(again)
	if d, reason := place.Place(policytest.Pair("")); reason != "" || d.Decode != 3 {
		t.Errorf("afterwards: %+v, %q", d, reason)
	}
	if n := place.Summary().Failures; n != 0 {
		t.Errorf("got %d failures", n)
	}
}

// TestMisbehaviourUnderLoad: policies loop and exhaust their memory while
// goroutines use all processors. Each request gets its answer or the reason why
// there is none. The time of the abandoned calls parks the version, and its end
// leaves nothing over.
func TestMisbehaviourUnderLoad(t *testing.T) {
	before := runtime.NumGoroutine()
	stop := keepBusy(2 * runtime.GOMAXPROCS(0))
	var log bytes.Buffer
	l := newLoading()
	l.Load.Guarded = true
	l.Load.MemoryPages = 256
	l.Budget = 5 * time.Millisecond
	l.Failures = budget.New(1<<20, time.Second, 0.001)
	l.Log = slog.New(slog.NewTextHandler(&log, nil))
	v, err := l.try(t)
	if err != nil {
		t.Fatal(err)
	}
	var all []*vm
	for m := v.pool.grab(); m != nil; m = v.pool.grab() {
		all = append(all, m)
	}
	for _, m := range all {
		v.pool.put(m)
	}
	place := hook(t, v, abi.HookPlace)
	var clients sync.WaitGroup
	for i := range 4 {
		clients.Go(func() {
			do := []string{"loop", "grow"}[i%2]
			for n := 0; ; n++ {
				switch _, reason := place.Place(policytest.Pair(do)); reason {
				case Parked:
					return
				case Late, Trap:
				default:
					t.Errorf("%s: %q", do, reason)
					return
				}
			}
		})
	}
	clients.Wait()
	stop()
	if err := v.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		if m.MemorySize() != 0 {
			t.Error("a VM has memory after its version's end")
		}
	}
	if !bytes.Contains(log.Bytes(), []byte("timeout")) {
		t.Error("no timeout was charged")
	}
	eventually(t, "the end of all goroutines", func() bool { return runtime.NumGoroutine() <= before })
}
