// Package policy runs one version of a policy module: a pool of VMs, and the
// calls of their hooks. Each call ends in a decision or in the reason why there
// is none. A version never fails a request: when a guest traps, loops, exceeds
// its memory or gives an invalid answer, the version replaces its VM and counts
// a failure in its crash budget.
//
// The decisions behind this package are in docs/design/plugins.md.
package policy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
)

// scratchSize is the size in bytes of the scratch buffer that a guest provides
// when its VM starts. Larger frames make it grow.
const scratchSize = 64 << 10

// maxPolicies is the largest number of policies that one module may list.
const maxPolicies = 256

// root is the id of the only context of a policy's VM.
const root = 1

// Options are the options of Load.
type Options struct {
	Name     string // of the plugin; also the name of unnamed policies
	Wasm     []byte
	Load     host.LoadOptions
	Budget   time.Duration // of one call, including the wait for a VM
	VMs      int           // the most; 0: one for each processor, in guarded modules all but one
	Failures *budget.Budget
	Seed     uint32 // in every frame
	// NewEnv returns the environment of one VM. Different VMs call their
	// environments concurrently.
	NewEnv func() host.Env
	// Compiled is an optional function. It is called when the module is
	// compiled and its VMs begin to start.
	Compiled func()
	// Meter returns the meter of one policy.
	Meter func(policy string, hook abi.Hook) Meter
	Log   *slog.Logger
}

// Meter counts the calls of one policy. It is safe for concurrent use and does
// not allocate.
type Meter interface {
	Observe(d time.Duration)
	Fail(reason string)
}

// Version is one loaded version. Its methods are safe for concurrent use.
type Version struct {
	opts     Options
	module   *host.Module
	needs    abi.Needs
	headers  []string // that the module declares, in lower case
	policies []*Policy
	scorers  []Scorer // of the policy with the score hook
	pool     *pool
	trial    error
	parked   atomic.Bool // it failed too often and is no longer called

	ctx     context.Context // ends when the version closes
	cancel  context.CancelFunc
	starts  sync.WaitGroup // starts of VMs that replace others
	workers sync.WaitGroup // of VMs of a guarded module

	mu      sync.Mutex
	live    int  // VMs that are in the pool, in use or being started; guarded by mu
	growing bool // a VM that grow has asked for is being started; guarded by mu
	closed  bool // guarded by mu
}

// Load compiles a module, starts and configures its VMs and reads the list of
// its policies. When it fails, it frees everything that it has begun.
func Load(ctx context.Context, opts Options) (*Version, error) {
	if opts.VMs <= 0 {
		opts.VMs = runtime.GOMAXPROCS(0)
		if opts.Load.Guarded {
			// Guests that loop must leave a processor to the timers that end them.
			opts.VMs = max(1, opts.VMs-1)
		}
	}
	module, err := host.Load(ctx, opts.Wasm, opts.Load)
	if err != nil {
		return nil, err
	}
	opts.Wasm = nil
	if opts.Compiled != nil {
		opts.Compiled()
	}
	v := &Version{opts: opts, module: module, pool: newPool(opts.VMs)}
	v.ctx, v.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := v.start(ctx); err != nil {
		return nil, errors.Join(err, v.Close(context.WithoutCancel(ctx)))
	}
	return v, nil
}

// firstVMs is the number of VMs with which an unguarded module starts. A call takes some µs, so two
// are enough for most loads, and each takes megabytes. Guests that may loop get all at once.
const firstVMs = 2

// start runs the trial of the module and starts the first VMs.
func (v *Version) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, host.StartBudget)
	defer cancel()
	if err := v.tryOut(ctx); err != nil {
		return err
	}
	first := v.opts.VMs
	if !v.opts.Load.Guarded {
		first = min(first, firstVMs)
	}
	for range first {
		m, err := v.newVM(ctx, v.opts.NewEnv())
		if err != nil {
			return err
		}
		v.live++
		v.pool.put(m)
	}
	return nil
}

// newVM starts and configures a VM. In a guarded module ctx bounds this.
func (v *Version) newVM(ctx context.Context, env host.Env) (*vm, error) {
	notes := &Notebook{Env: env}
	guest, err := v.module.NewVM(ctx, notes)
	if err != nil {
		return nil, err
	}
	m := &vm{VM: guest, notes: notes}
	if err := v.configure(ctx, m); err != nil {
		return nil, errors.Join(err, guest.Close(ctx))
	}
	if v.opts.Load.Guarded {
		v.startWorker(m)
	}
	m.KeepPrinted()
	return m, nil
}

// configure runs the start callbacks of proxy-wasm, if the module has them, and
// looks up the scratch buffer and the hooks.
func (v *Version) configure(ctx context.Context, m *vm) error {
	if v.module.Info().ABIVersion != "" {
		if err := m.Begin(ctx, root); err != nil {
			return err
		}
	}
	for h := abi.HookPlan; h <= abi.LastHook; h++ {
		if hook, ok := m.Hook(h.Export()); ok {
			m.hooks[h] = hook
		}
	}
	if m.hooks == [len(m.hooks)]*host.Hook{} {
		return errNoHook
	}
	_, _, err := m.Scratch(ctx, scratchSize)
	m.room = scratchSize
	return err
}

// describe reads the policies and the needs of the module.
func (v *Version) describe(ctx context.Context, m *vm) error {
	needs, _, err := m.Value(ctx, abi.ExportNeeds)
	if err != nil {
		return err
	}
	v.needs = abi.Needs(needs)
	declared, _, err := m.Text(ctx, abi.ExportHeaders)
	if err != nil {
		return err
	}
	if v.headers, err = abi.ParseHeaders(declared); err != nil {
		return err
	}
	list, named, err := m.Text(ctx, abi.ExportPolicies)
	if err != nil {
		return err
	}
	if !named || strings.TrimSpace(list) == "" {
		for h := abi.HookPlan; h <= abi.LastHook; h++ {
			if m.hooks[h] != nil {
				v.add(h, "", 0)
			}
		}
		if m.hooks[abi.HookScore] != nil {
			v.scorers = []Scorer{{}}
		}
		return v.extend()
	}
	var count [abi.LastHook + 1]uint32
	for line := range strings.Lines(list) {
		if len(v.policies)+len(v.scorers) >= maxPolicies {
			return fmt.Errorf("read policies: there are more than %d", maxPolicies)
		}
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		word, name, _ := strings.Cut(line, " ")
		h, ok := abi.ParseHook(word)
		switch {
		case !ok || name == "" || strings.ContainsAny(name, " \t"):
			return fmt.Errorf("read policies: %q is not a hook and a name", line)
		case m.hooks[h] == nil:
			return fmt.Errorf("read policies: %q without the export %s", line, h.Export())
		case v.find(h, name) != nil || h == abi.HookScore && v.scorer(name) != nil:
			return fmt.Errorf("read policies: %q is listed twice", line)
		case h == abi.HookScore:
			if count[h] == 0 {
				v.add(h, "", 0)
			}
			v.scorers = append(v.scorers, Scorer{Name: name, Index: count[h]})
		default:
			v.add(h, name, count[h])
		}
		count[h]++
	}
	return v.describeNeeds(ctx, m)
}

// describeNeeds reads the needs of single policies in addition to those of the
// module.
func (v *Version) describeNeeds(ctx context.Context, m *vm) error {
	list, _, err := m.Text(ctx, abi.ExportPolicyNeeds)
	if err != nil {
		return err
	}
	all, err := abi.ParsePolicyNeeds(list)
	for _, n := range all {
		if n.Hook == abi.HookScore {
			if s := v.scorer(n.Name); s != nil {
				s.Needs |= n.Needs
			}
		} else if p := v.find(n.Hook, n.Name); p != nil {
			p.Needs |= n.Needs
		}
	}
	return errors.Join(err, v.extend())
}

// extend selects the version and the facts of the frames of each policy, by its needs.
func (v *Version) extend() error {
	for _, p := range v.policies {
		needs := p.allNeeds()
		if needs&abi.NeedHeaders != 0 && len(v.headers) == 0 {
			return fmt.Errorf("read headers: policy %s needs headers, but %s declares none", p.Label, abi.ExportHeaders)
		}
		p.layout = abi.LayoutFor(needs, v.headers)
	}
	return nil
}

// add registers a policy; name is "" for the policy of an unnamed hook.
func (v *Version) add(h abi.Hook, name string, index uint32) {
	p := &Policy{version: v, Hook: h, Name: name, Label: v.opts.Name, index: index}
	switch {
	case v.opts.Name == "" && h == abi.HookScore:
		p.Label = builtinScores
	case v.opts.Name == "":
		p.Label = name
	case name != "":
		p.Label = v.opts.Name + "/" + name
	}
	p.meter = v.opts.Meter(p.Label, h)
	v.policies = append(v.policies, p)
}

func (v *Version) find(h abi.Hook, name string) *Policy {
	for _, p := range v.policies {
		if p.Hook == h && p.Name == name {
			return p
		}
	}
	return nil
}

// Policies returns the module's policies in the module's order.
func (v *Version) Policies() []*Policy { return v.policies }

// Find returns the policy of that hook and name. A module without names has one
// policy for each hook that it exports, under the name "".
func (v *Version) Find(h abi.Hook, name string) (*Policy, bool) {
	p := v.find(h, name)
	return p, p != nil
}

// Needs returns the needs of the module for all its policies.
func (v *Version) Needs() abi.Needs { return v.needs }

// Headers returns the names of the request headers that the module declares, in lower case. The
// caller must not change the list.
func (v *Version) Headers() []string { return v.headers }

// Headers returns the names of the request headers that the policy gets, in lower case; nil: none.
// The caller must not change the list.
func (p *Policy) Headers() []string { return p.layout.Headers }

// Info returns the description of the module.
func (v *Version) Info() host.Info { return v.module.Info() }

// restartPause is the wait after a VM could not be started, before the next try.
const restartPause = 100 * time.Millisecond

// replace ends a failed VM and starts another in its place, in the background,
// unless the version is parked or closed.
func (v *Version) replace(m *vm) {
	_ = m.close(v.ctx)
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed || v.parked.Load() {
		v.lose()
		return
	}
	v.launch(false)
}

// grow starts one more VM in the background, if there may be more.
func (v *Version) grow() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.growing || v.closed || v.live == v.opts.VMs || v.parked.Load() {
		return
	}
	v.growing = true
	v.live++
	v.launch(true)
}

// Shrink ends the VMs beyond those of the start that are free now.
func (v *Version) Shrink() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for !v.opts.Load.Guarded && !v.closed && v.live > firstVMs {
		m := v.pool.grab()
		if m == nil {
			return
		}
		_ = m.close(v.ctx)
		v.live--
	}
}

// launch starts a VM in the background. v.live counts the VM already. If an extra VM does not start, the
// policy has not failed: the other VMs answer its calls, and grow tries again. The caller holds v.mu.
func (v *Version) launch(extra bool) {
	v.starts.Go(func() {
		if extra {
			defer func() {
				v.mu.Lock()
				defer v.mu.Unlock()
				v.growing = false
			}()
		}
		for {
			began := time.Now()
			ctx, cancel := context.WithTimeout(v.ctx, host.StartBudget)
			m, err := v.newVM(ctx, v.opts.NewEnv())
			cancel()
			if err == nil {
				v.pool.put(m)
				return
			}
			if v.ctx.Err() == nil {
				v.opts.Log.Error("policy could not be started again", "plugin", v.opts.Name, "error", err)
			}
			if v.ctx.Err() != nil || extra || v.failed(timeoutOf(err, began)) {
				break
			}
			select {
			case <-v.ctx.Done():
			case <-time.After(restartPause):
			}
		}
		v.mu.Lock()
		defer v.mu.Unlock()
		v.lose()
	})
}

// lose subtracts one from the number of VMs. The caller holds v.mu.
func (v *Version) lose() {
	v.live--
	v.pool.nudge()
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

// failed counts a failure and reports whether the version is parked now.
// timeout is the duration of a call that used up its time, 0 for any other
// failure.
func (v *Version) failed(timeout time.Duration) bool {
	parked := false
	if timeout > 0 {
		parked = v.opts.Failures.Timeout(time.Now(), timeout)
	} else {
		parked = v.opts.Failures.Fail(time.Now())
	}
	if parked {
		v.parked.Store(true)
		v.pool.close() // no VM will be free for the calls that wait
		v.opts.Log.Error("policy failed too often, or used too much time in calls that timed out, and is parked until it is loaded again", "plugin", v.opts.Name)
	}
	return v.parked.Load()
}

// Close waits for the running calls and frees everything. Later calls get the reason
// Closed. ctx bounds the wait. Then the garbage collector frees the remaining memory.
func (v *Version) Close(ctx context.Context) error {
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		return nil
	}
	v.closed = true
	v.mu.Unlock()
	v.cancel()
	v.starts.Wait()
	v.pool.close()
	v.pool.waiting.Add(1)
	defer v.pool.waiting.Add(-1)
	for {
		v.mu.Lock()
		live := v.live
		v.mu.Unlock()
		if live == 0 {
			v.workers.Wait()
			return v.module.Close(ctx)
		}
		if m := v.pool.grab(); m != nil {
			_ = m.close(ctx)
			v.mu.Lock()
			v.live--
			v.mu.Unlock()
			continue
		}
		select {
		case <-v.pool.wake:
		case <-ctx.Done():
			return fmt.Errorf("close policy %s: %w", v.opts.Name, ctx.Err())
		}
	}
}
