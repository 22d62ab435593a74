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

// maxWaiting is the limit of ended contexts of a VM that wait for proxy_done.
// Above the limit a context is deleted at once.
const maxWaiting = 1024

var errGone = errors.New("the VM has failed")

// vm is one VM of a plugin with its root context. It is the host.Env of its guest.
type vm struct {
	p     *Plugin
	guest *host.VM
	lock  chan struct{} // holds a token while a goroutine is in the guest
	began atomic.Int64  // start of the running call, in nanoseconds; 0: none runs
	dead  atomic.Bool
	gone  chan struct{} // closed when dead is set

	probing bool // it serves no traffic, see Plugin.probe

	// lock guards the following fields up to mu.
	limit     *time.Timer // of the running call: interrupts the guest
	lastID    uint32
	waiting   int       // contexts that wait for proxy_done
	touched   []*filter // filters whose stream has to act on a request of the guest
	complaint complaint // text about contexts of streams that the guest printed before the plugin served any
	suspected bool      // it failed with a complaint: the stream reports the failure after the probe
	rootDone  chan struct{}
	closed    bool // the guest is closed

	wake chan struct{} // capacity 1

	mu       sync.Mutex
	streams  map[uint32]*filter // by context id; nil once the VM is lost; guarded by mu
	period   time.Duration      // of ticks; guarded by mu
	rearm    bool               // period was set; guarded by mu
	ready    map[uint32]int     // number of new items by queue; guarded by mu
	ended    []*filter          // contexts to end; guarded by mu
	lastCall uint32             // token of the last HTTP call; guarded by mu
}

// startVM makes a VM that serves, and starts its background goroutine.
func (p *Plugin) startVM(ctx context.Context) (*vm, error) {
	v, err := p.newVM(ctx, false)
	if err == nil {
		p.spawn(v.background)
	}
	return v, err
}

// newVM makes a VM, starts it and configures it. In a guarded module ctx bounds this.
// probing: the VM will serve no traffic.
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
	err = v.guest.Begin(ctx, rootContext)
	v.guest.KeepPrinted()
	return err
}

// idle reports whether no goroutine is in the guest now.
func (v *vm) idle() bool { return len(v.lock) == 0 }

// enter waits until the guest is free. If bounded, it waits at most as long as
// one call may take.
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
		// A guest call that cannot be interrupted may never return.
		if began := v.began.Load(); began != 0 && time.Since(time.Unix(0, began)) >= v.p.spec.Timeout {
			v.lose(host.OnVMStart, "timeout", time.Since(time.Unix(0, began)))
		}
		return errBusy
	}
}

// exit permits the next goroutine to enter. If the VM was lost during the call, exit
// frees the VM.
func (v *vm) exit() {
	if v.dead.Load() && !v.closed {
		v.close()
	}
	<-v.lock
}

// call enters the guest for one callback, or for several that belong together,
// within one time limit. Other goroutines may enter when do has returned. Then
// the streams act on the guest's requests.
func (v *vm) call(c host.Callback, do func(ctx context.Context) error) error {
	if err := v.enter(true); err != nil {
		if errors.Is(err, errBusy) && v.p.deps.Meter != nil {
			v.p.deps.Meter.Fail(c, "busy")
		}
		return err
	}
	return v.run(c, do)
}

// run is call for a caller that has entered.
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

// limited calls do, which enters the guest. It interrupts the guest when the
// time limit of a call is over. The caller holds v.lock.
func (v *vm) limited(do func(ctx context.Context) error) error {
	v.limit.Reset(v.p.spec.Timeout)
	err := do(context.Background())
	if !v.limit.Stop() {
		v.guest.Interrupt() // the timer may fire now, and must not interrupt the next call
	}
	return err
}

// lose gives the VM up: the plugin replaces it, and its streams end or continue
// without it. reason is "" when the guest itself failed. timeout is the
// duration of a call that timed out, else 0.
func (v *vm) lose(c host.Callback, reason string, timeout time.Duration) {
	if !v.dead.CompareAndSwap(false, true) {
		return
	}
	close(v.gone)
	p := v.p
	suspected := reason == "" && v.suspected
	switch {
	case suspected: // filter.start reports it, if it was a failure
	case reason == "":
		reason = p.report(v.guest.Err())
	default:
		p.report(errStuck)
	}
	p.space.Forget(v)
	p.lost(v)
	if !suspected {
		p.failed(c, reason, timeout)
	}
	p.spawn(v.abandon)
}

// abandon ends the streams on a lost VM. It runs in a separate goroutine, because there
// may be many streams, and the caller of lose may drive one of them.
func (v *vm) abandon() {
	v.mu.Lock()
	streams := v.streams
	v.streams, v.ended = nil, nil
	v.mu.Unlock()
	for _, f := range streams {
		f.lose()
	}
}

// kill frees a VM that gets no new streams, and reports whether that succeeded.
// It fails while a guest call runs that cannot be interrupted. Streams that are
// still on the VM lose it.
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

// close frees the guest. The caller holds v.lock.
func (v *vm) close() {
	v.closed = true
	if v.guest != nil {
		// Close uses only the values of the context.
		_ = v.guest.Close(context.WithoutCancel(v.p.ctx))
	}
}

// add assigns an id to a stream's context. The caller holds v.lock.
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

// remove drops a stream's context.
func (v *vm) remove(id uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.streams, id)
}
