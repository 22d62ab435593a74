package filter

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
)

// rootContext is the id of a VM's root context.
const rootContext = 1

// maxWaiting is how many contexts of a VM may have ended and wait for
// proxy_done; more of them are deleted at once.
const maxWaiting = 1024

var errGone = errors.New("the VM has failed")

// vm is one VM of a plugin with its root context. It is the host.Env of its
// guest.
type vm struct {
	p     *Plugin
	guest *host.VM
	lock  chan struct{} // holds a token while somebody is in the guest
	began atomic.Int64  // when the call that runs began, in nanoseconds; 0: none runs
	dead  atomic.Bool
	gone  chan struct{} // closed with dead

	probing bool // it serves nothing, see Plugin.probe

	// What follows up to mu is guarded by lock.
	limit     *time.Timer // of the call that runs: interrupts the guest
	lastID    uint32
	waiting   int       // contexts that wait for proxy_done
	touched   []*filter // those whose stream has to hear what the guest asked for
	complaint complaint // what the guest printed about contexts of streams, before the plugin served any
	doubted   bool      // it failed with one: whoever led the stream to it asks the plugin what that means
	rootDone  chan struct{}
	closed    bool // the guest is

	wake chan struct{} // room for one

	mu       sync.Mutex
	streams  map[uint32]*filter // by context id; nil once the VM is lost; guarded by mu
	period   time.Duration      // of ticks; guarded by mu
	rearm    bool               // period was set; guarded by mu
	ready    map[uint32]int     // items to be told of, by queue; guarded by mu
	ended    []*filter          // contexts to be ended; guarded by mu
	lastCall uint32             // token of the last HTTP call; guarded by mu
}

// startVM makes a VM that serves, and begins its background work.
func (p *Plugin) startVM(ctx context.Context) (*vm, error) {
	v, err := p.newVM(ctx, false)
	if err == nil {
		p.spawn(v.background)
	}
	return v, err
}

// newVM makes a VM, starts and configures it, which ctx bounds in a guarded
// module; probing says that it will serve nothing.
func (p *Plugin) newVM(ctx context.Context, probing bool) (*vm, error) {
	v := &vm{
		p:       p,
		probing: probing,
		lock:    make(chan struct{}, 1),
		gone:    make(chan struct{}),
		streams: make(map[uint32]*filter),
		ready:   make(map[uint32]int),
		lastID:  rootContext,
		wake:    make(chan struct{}, 1),
	}
	v.lock <- struct{}{}
	err := v.start(ctx)
	v.exit()
	if err != nil {
		v.kill()
		return nil, err
	}
	return v, nil
}

func (v *vm) start(ctx context.Context) (err error) {
	if v.guest, err = v.p.module.NewVM(ctx, v); err != nil {
		return fmt.Errorf("start plugin: %w", err)
	}
	v.limit = time.AfterFunc(v.p.spec.Timeout, v.guest.Interrupt)
	v.limit.Stop()
	return v.guest.Begin(ctx, rootContext)
}

// idle reports whether nobody is in the guest just now.
func (v *vm) idle() bool { return len(v.lock) == 0 }

// enter waits for the guest to be free, if bounded no longer than one call may
// take.
func (v *vm) enter(bounded bool) error {
	select {
	case v.lock <- struct{}{}:
	default:
		if err := v.enterLater(bounded); err != nil {
			return err
		}
	}
	if v.dead.Load() {
		v.exit()
		return errGone
	}
	return nil
}

func (v *vm) enterLater(bounded bool) error {
	var late <-chan time.Time
	if bounded {
		timer := time.NewTimer(v.p.spec.Timeout)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case v.lock <- struct{}{}:
		return nil
	case <-v.gone:
		return errGone
	case <-late:
		// A guest that cannot be interrupted may never come back.
		if began := v.began.Load(); began != 0 && time.Since(time.Unix(0, began)) >= v.p.spec.Timeout {
			v.lose(host.OnVMStart, "timeout", time.Since(time.Unix(0, began)))
		}
		return errBusy
	}
}

// exit lets the next one in. A VM that was given up while somebody was in it is
// freed by who comes out.
func (v *vm) exit() {
	if v.dead.Load() && !v.closed {
		v.close()
	}
	<-v.lock
}

// call enters the guest for one callback, or for several that belong together,
// within one time budget; the others are let in when do has returned. Then the
// streams hear what the guest has asked for meanwhile.
func (v *vm) call(c host.Callback, do func(ctx context.Context) error) error {
	if err := v.enter(true); err != nil {
		if errors.Is(err, errBusy) && v.p.deps.Meter != nil {
			v.p.deps.Meter.Fail(c, "busy")
		}
		return err
	}
	return v.run(c, do)
}

// run is call for one who has entered.
func (v *vm) run(c host.Callback, do func(ctx context.Context) error) error {
	began := time.Now()
	v.began.Store(began.UnixNano())
	err := v.limited(do)
	v.began.Store(0)
	if v.p.deps.Meter != nil {
		v.p.deps.Meter.Observe(c, time.Since(began))
	}
	touched := v.touched
	v.touched = nil
	for _, f := range touched {
		f.called = false
	}
	failure := v.guest.Err()
	if failure != nil {
		v.lose(c, "", timeoutOf(failure, began))
	}
	v.exit()
	for _, f := range touched {
		f.s.poke()
	}
	if failure != nil {
		return failure
	}
	return err
}

// limited calls do, which enters the guest, and has the guest interrupted when the
// time of a call is over. v.lock is held.
func (v *vm) limited(do func(ctx context.Context) error) error {
	v.limit.Reset(v.p.spec.Timeout)
	err := do(context.Background())
	if !v.limit.Stop() {
		v.guest.Interrupt() // the timer may be about to, and must not meet the next call
	}
	return err
}

// lose gives the VM up: it is replaced, and its streams hear of it. reason is
// set when the failure is not the guest's own, timeout when it is one.
func (v *vm) lose(c host.Callback, reason string, timeout time.Duration) {
	if !v.dead.CompareAndSwap(false, true) {
		return
	}
	close(v.gone)
	p := v.p
	doubted := reason == "" && v.doubted
	switch {
	case doubted: // who asks reports it, if it was a failure
	case reason == "":
		reason = p.report(v.guest.Err())
	default:
		p.report(errStuck)
	}
	p.space.Forget(v)
	p.lost(v)
	if !doubted {
		p.failed(c, reason, timeout)
	}
	p.spawn(v.abandon)
}

// abandon tells the streams on a lost VM. They are many perhaps, and whoever
// lost it drives one of them.
func (v *vm) abandon() {
	v.mu.Lock()
	streams := v.streams
	v.streams, v.ended = nil, nil
	v.mu.Unlock()
	for _, f := range streams {
		f.lose()
	}
}

// kill frees a VM that no new stream is led to, and reports whether that could
// be done: not while somebody is in a guest that cannot be interrupted. Streams
// that are still on it are lost.
func (v *vm) kill() bool {
	if v.dead.CompareAndSwap(false, true) {
		close(v.gone)
		v.p.space.Forget(v)
	}
	v.abandon()
	limit := time.NewTimer(2 * v.p.spec.Timeout)
	defer limit.Stop()
	select {
	case v.lock <- struct{}{}:
		v.exit()
		return true
	case <-limit.C:
		return false
	}
}

// close frees the guest. v.lock is held.
func (v *vm) close() {
	v.closed = true
	if v.guest != nil {
		// The context is only looked at for values.
		_ = v.guest.Close(context.WithoutCancel(v.p.ctx))
	}
}

// add gives a stream's context an id. v.lock is held.
func (v *vm) add(f *filter) (id uint32, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.streams == nil {
		return 0, false
	}
	for {
		v.lastID++
		if v.lastID > rootContext && v.streams[v.lastID] == nil {
			v.streams[v.lastID] = f
			return v.lastID, true
		}
	}
}

// remove forgets a stream's context.
func (v *vm) remove(id uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.streams, id)
}
