package filter

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

const (
	// restartPause is how long a VM that did not start waits before the next
	// try; it doubles up to restartPauseMax.
	restartPause    = 50 * time.Millisecond
	restartPauseMax = 5 * time.Second
)

var (
	errParked = errors.New("the plugin is parked: it failed too often")
	errBusy   = errors.New("no VM was free in time")
	errStuck  = errors.New("a guest does not come back and cannot be interrupted")
)

// Plugin is one version of one filter. Its methods are safe for concurrent use.
type Plugin struct {
	spec    Spec
	deps    Deps
	module  *host.Module
	space   *shared.Space
	metrics *shared.MetricTable
	has     [host.OnForeignFunction + 8]bool // callbacks that the module exports
	streams bool                             // it has callbacks for streams at all

	// background is set when the guest has shown that it has nothing for streams:
	// a plugin of ticks and queues only. See question.
	background atomic.Bool
	served     atomic.Bool     // a stream's context was made once
	allowAll   bool            // spec.Upstreams has "*"
	allowed    map[string]bool // by the name of the upstream

	ctx    context.Context // of the VMs' goroutines and calls; ends in Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup // background goroutines of VMs, starts of new ones, HTTP calls

	next atomic.Uint32 // whose turn it is among the live VMs

	mu      sync.Mutex
	live    []*vm         // replaced, never changed; guarded by mu
	changed chan struct{} // closed when live changes; guarded by mu
	users   int           // streams that use the version; guarded by mu
	closed  bool          // guarded by mu
	stopped bool          // nothing begins in the background any more; guarded by mu
	// answered is closed when it is known whether the plugin works in the
	// background only; nil while nobody has asked; guarded by mu.
	answered chan struct{}
	idle     chan struct{} // closed when closed and no user is left; guarded by mu
}

// New returns a version that is not started.
func New(spec Spec, deps Deps) *Plugin {
	if spec.VMs <= 0 {
		spec.VMs = runtime.GOMAXPROCS(0)
	}
	if spec.Timeout <= 0 {
		spec.Timeout = DefaultTimeout
	}
	p := &Plugin{spec: spec, deps: deps, changed: make(chan struct{}), idle: make(chan struct{}), allowed: make(map[string]bool), metrics: shared.NewMetricTable(deps.Metrics)}
	if p.deps.Host == nil {
		p.deps.Host = budget.NewHost(0, nil)
	}
	p.deps.Log = deps.Log.With("plugin", spec.Name)
	for _, name := range spec.Upstreams {
		p.allowed[name] = true
	}
	p.allowAll = p.allowed["*"]
	return p
}

// Start compiles the module and starts and configures its VMs; ctx bounds it. An
// error means that the version cannot be used; what was begun has been ended
// then, and Close need not be called.
func (p *Plugin) Start(ctx context.Context) error {
	module, err := host.Load(ctx, p.spec.Wasm, p.spec.Load)
	if err != nil {
		return err
	}
	if module.Info().ABIVersion == "" {
		return errors.Join(errors.New("start plugin: a filter needs the marker of proxy-wasm"), module.Close(ctx))
	}
	p.module, p.spec.Wasm = module, nil
	p.readCallbacks()
	p.space = p.deps.Shared.Open(p.spec.VMID)
	p.ctx, p.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if p.spec.Compiled != nil {
		p.spec.Compiled()
	}
	started, cancel := context.WithTimeout(ctx, host.StartBudget)
	defer cancel()
	for range p.spec.VMs {
		v, err := p.startVM(started)
		if err != nil {
			return errors.Join(err, p.Close(ctx))
		}
		p.mu.Lock()
		p.live = append(slices.Clip(p.live), v)
		p.mu.Unlock()
	}
	return nil
}

// readCallbacks notes which callbacks there are.
func (p *Plugin) readCallbacks() {
	for c := host.OnContextCreate; c <= host.OnDelete; c++ {
		p.has[c] = slices.Contains(p.module.Info().Callbacks, c.String())
	}
	for _, c := range []host.Callback{
		host.OnRequestHeaders, host.OnRequestBody, host.OnRequestTrailers,
		host.OnResponseHeaders, host.OnResponseBody, host.OnResponseTrailers, host.OnLog,
	} {
		p.streams = p.streams || p.has[c]
	}
}

// Name returns the plugin's name.
func (p *Plugin) Name() string { return p.spec.Name }

// Info returns what the module says about itself. Start has come back without an
// error before.
func (p *Plugin) Info() host.Info { return p.module.Info() }

// State says what the version is doing.
func (p *Plugin) State() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return Closed
	case p.deps.Budget.Parked():
		return Parked
	}
	return Serving
}

// Close lets the running streams finish until ctx ends, takes leave of the
// guests and frees everything. Streams that still run then are dealt with as if
// their VM had failed. It may be called more than once, by one goroutine.
func (p *Plugin) Close(ctx context.Context) error {
	p.mu.Lock()
	first := !p.closed
	p.closed = true
	if first && p.users == 0 {
		close(p.idle)
	}
	p.mu.Unlock()
	if !first || p.module == nil {
		return nil
	}
	var err error
	select {
	case <-p.idle:
	case <-ctx.Done():
		err = fmt.Errorf("close plugin %s: streams still ran: %w", p.spec.Name, context.Cause(ctx))
	}
	p.mu.Lock()
	live := p.live
	p.live = nil
	p.mu.Unlock()
	for _, v := range live {
		v.leave(ctx)
	}
	p.cancel()
	for _, v := range live {
		if !v.kill() {
			// Its code must stay: it is being run.
			return errors.Join(err, fmt.Errorf("close plugin %s: %w", p.spec.Name, errStuck))
		}
	}
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	p.tasks.Wait()
	p.space.Release()
	return errors.Join(err, p.module.Close(context.WithoutCancel(ctx)))
}

// spawn runs f in the background; Close waits for it. Once the VMs are freed
// nothing begins any more.
func (p *Plugin) spawn(f func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return false
	}
	p.tasks.Go(f)
	return true
}

// acquire enters a stream; false: the version is closed, use its successor.
func (p *Plugin) acquire() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.users++
	return true
}

// release lets a stream go, after its context in the guest has ended.
func (p *Plugin) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.users--
	if p.closed && p.users == 0 {
		close(p.idle)
	}
}

// forStreams reports whether the plugin takes part in streams.
func (p *Plugin) forStreams() bool { return p.streams && !p.background.Load() }

// pick returns the VM for a new stream. When all of them are being replaced it
// waits, but not longer than for a call.
func (p *Plugin) pick(ctx context.Context) (*vm, error) {
	if p.deps.Budget.Parked() {
		return nil, errParked
	}
	p.mu.Lock()
	live, changed := p.live, p.changed
	p.mu.Unlock()
	if len(live) == 0 {
		return p.pickLater(ctx, changed)
	}
	turn := int(p.next.Add(1))
	for i := range live {
		if v := live[(turn+i)%len(live)]; v.idle() {
			return v, nil
		}
	}
	return live[turn%len(live)], nil
}

func (p *Plugin) pickLater(ctx context.Context, changed <-chan struct{}) (*vm, error) {
	limit := time.NewTimer(p.spec.Timeout)
	defer limit.Stop()
	for {
		select {
		case <-changed:
		case <-limit.C:
			return nil, errBusy
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		p.mu.Lock()
		live := p.live
		changed = p.changed
		p.mu.Unlock()
		if len(live) > 0 {
			return live[0], nil
		}
		if p.deps.Budget.Parked() {
			return nil, errParked
		}
	}
}

// failed books a failure of the plugin; timeout is how long a call took that used
// up its time, 0 for any other failure.
func (p *Plugin) failed(c host.Callback, reason string, timeout time.Duration) {
	if p.deps.Meter != nil {
		p.deps.Meter.Fail(c, reason)
	}
	parked := false
	if timeout > 0 {
		parked = p.deps.Budget.Timeout(time.Now(), timeout)
	} else {
		parked = p.deps.Budget.Fail(time.Now())
	}
	if parked {
		p.deps.Log.Error("plugin is parked: it failed too often, or used too much time in calls that timed out", "fail_open", p.spec.FailOpen)
		p.mu.Lock()
		p.announce()
		p.mu.Unlock()
	}
}

// timeoutOf is how long a call took that began then, if err says that it used up
// its time; else 0.
func timeoutOf(err error, began time.Time) time.Duration {
	var failure *host.Error
	if errors.As(err, &failure) && failure.Failure == host.Timeout {
		return time.Since(began)
	}
	return 0
}

// announce wakes who waits for a VM. p.mu is held.
func (p *Plugin) announce() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// lost takes a VM out and has another one started in its place.
func (p *Plugin) lost(v *vm) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.live, v)
	if i < 0 {
		return // the plugin closes, or v never began to serve
	}
	p.live = slices.Concat(p.live[:i], p.live[i+1:])
	p.tasks.Go(p.replace)
}

// replace starts a VM, again and again until it serves, the plugin is parked or
// it closes.
func (p *Plugin) replace() {
	for pause := restartPause; !p.deps.Budget.Parked(); pause = min(2*pause, restartPauseMax) {
		began := time.Now()
		ctx, cancel := context.WithTimeout(p.ctx, host.StartBudget)
		v, err := p.startVM(ctx)
		cancel()
		if err == nil {
			p.mu.Lock()
			keep := !p.closed
			if keep {
				p.live = append(slices.Clip(p.live), v)
				p.announce()
			}
			p.mu.Unlock()
			if !keep {
				v.kill()
			}
			return
		}
		if p.ctx.Err() != nil {
			return
		}
		p.deps.Log.Error("plugin does not start again", "error", err)
		p.failed(host.OnVMStart, "start", timeoutOf(err, began))
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-p.ctx.Done():
			timer.Stop()
			return
		}
	}
}
