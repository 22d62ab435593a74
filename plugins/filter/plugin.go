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
	// restartPause is the wait after a VM did not start, before the next try.
	// It doubles up to restartPauseMax.
	restartPause    = 50 * time.Millisecond
	restartPauseMax = 5 * time.Second
)

var (
	errParked = errors.New("the plugin is parked: it failed too often")
	errBusy   = errors.New("no VM was free in time")
	errStuck  = errors.New("a guest call does not return and cannot be interrupted")
)

// Plugin is one version of one filter. Its methods are safe for concurrent use.
type Plugin struct {
	spec    Spec
	deps    Deps
	module  *host.Module
	space   *shared.Space
	metrics *shared.MetricTable
	has     [host.OnForeignFunction + 8]bool // callbacks that the module exports
	streams bool                             // it has callbacks for streams

	// background is set when the probe has shown that the plugin only has ticks
	// and queues and cannot process streams. See suspectBackground.
	background atomic.Bool
	served     atomic.Bool     // a context of a stream was created successfully
	allowAll   bool            // spec.Upstreams has "*"
	allowed    map[string]bool // by name of the upstream

	ctx    context.Context // of the VMs' goroutines and calls; Close ends it
	cancel context.CancelFunc
	tasks  sync.WaitGroup // background goroutines of VMs, starts of new VMs, HTTP calls

	next atomic.Uint32 // index of the next VM, in rotation

	mu      sync.Mutex
	live    []*vm         // replaced, never changed; guarded by mu
	changed chan struct{} // closed when live changes; guarded by mu
	users   int           // streams that use the version; guarded by mu
	closed  bool          // guarded by mu
	stopped bool          // no background task may begin any more; guarded by mu
	// answered is closed when the probe has a result; nil while no probe was
	// started; guarded by mu.
	answered chan struct{}
	idle     chan struct{} // closed when the version is closed and has no streams; guarded by mu
}

// New returns a version that has not started.
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

// Start compiles the module and starts and configures its VMs; ctx bounds it.
// When it returns an error, it has released everything and the version cannot
// be used; Close is not necessary then.
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

// readCallbacks records which callbacks the module exports.
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

// Info returns the description of the module. Start must have succeeded before.
func (p *Plugin) Info() host.Info { return p.module.Info() }

// State returns the current state of the version.
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

// Close lets the running streams finish until ctx ends, runs the guests' last
// callbacks and frees everything. Streams that still run then end as if their
// VM had failed. It may be called more than once, by one goroutine.
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
		v.shutDown(ctx)
	}
	p.cancel()
	for _, v := range live {
		if !v.kill() {
			// The module's code must stay in memory, because a guest still runs
			// it.
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

// spawn runs f in the background; Close waits for it. It returns false and does
// nothing once Close has stopped background tasks.
func (p *Plugin) spawn(f func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return false
	}
	p.tasks.Go(f)
	return true
}

// acquire registers a stream. It returns false when the version is closed; the
// caller then uses its successor.
func (p *Plugin) acquire() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.users++
	return true
}

// release ends a stream's use of the plugin, after the stream's context in the
// guest has ended.
func (p *Plugin) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.users--
	if p.closed && p.users == 0 {
		close(p.idle)
	}
}

// forStreams reports whether the plugin processes streams.
func (p *Plugin) forStreams() bool { return p.streams && !p.background.Load() }

// pick returns the VM for a new stream. When all VMs are being replaced, it
// waits at most as long as a call may take.
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

// failed counts a failure of the plugin. timeout is the duration of a call that
// used up its time, 0 for any other failure.
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

// timeoutOf returns the duration of a call that started at began, if err means that the
// call used up its time; else 0.
func timeoutOf(err error, began time.Time) time.Duration {
	var failure *host.Error
	if errors.As(err, &failure) && failure.Failure == host.Timeout {
		return time.Since(began)
	}
	return 0
}

// announce wakes all goroutines that wait for a VM. The caller holds p.mu.
func (p *Plugin) announce() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// lost removes a VM and starts another one in its place.
func (p *Plugin) lost(v *vm) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.live, v)
	if i < 0 {
		return // the plugin closes, or v never served
	}
	p.live = slices.Concat(p.live[:i], p.live[i+1:])
	p.tasks.Go(p.replace)
}

// replace starts a VM, with retries until one serves, the plugin is parked or
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
		p.deps.Log.Error("plugin could not be restarted", "error", err)
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
