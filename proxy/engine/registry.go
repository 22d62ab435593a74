package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/lograte"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// The sources of instances.
const (
	SourceStatic = "static" // the configuration
	SourceAdmin  = "admin"  // POST /v1/engines
	SourceZMQ    = "zmq"    // vLLM MoRI-IO engines that register themselves
)

// ErrUnknown reports that no instance has the name.
var ErrUnknown = errors.New("no such engine")

// SpecError is the reason why one engine of a list cannot become an instance.
type SpecError struct {
	Name  string
	Cause error
}

// Error names the engine and the cause.
func (e *SpecError) Error() string { return fmt.Sprintf("add engine %q: %v", e.Name, e.Cause) }

// Unwrap returns the cause.
func (e *SpecError) Unwrap() error { return e.Cause }

// Options configures a Registry. NewProbe, APIKey, Index, Log and the hooks may be nil.
type Options struct {
	Health  config.Health
	Circuit config.Circuit
	Pairs   config.Pairs
	// Protocols returns the connector of that name in the configuration.
	Protocols func(name string) (Protocol, bool)
	// NewClient returns the pooled client of an instance.
	NewClient func(spec config.Engine) (upstream.Client, error)
	// NewProbe returns the transport of an instance's probes. It must share nothing
	// with the client. Nil: a small transport without special TLS.
	NewProbe func(spec config.Engine) (http.RoundTripper, error)
	// Resolve returns the addresses of a host. Nil: only the host's name is known.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
	// APIKey returns the key that is sent to an instance, or "".
	APIKey func(spec config.Engine) (string, error)
	// Index records which blocks the instances hold. Each rank has a slot in it, which is cleared
	// when the instance restarts.
	Index *kvindex.Index
	Log   *slog.Logger
	// SyncClocks reports whether the registry sets the clocks of engines that report
	// times; nil: no.
	SyncClocks func() bool
	// MoveAfter returns how long the open streams of an instance that leaves or drains stay
	// there before they move to other engines; nil: they never move.
	MoveAfter func() time.Duration
	// OnState is called after each change of an instance's state, and when a ready one
	// has new facts. OnRestart is called when the registry detects that the engine's
	// process has restarted, so that the known KV is invalid. OnGone is called when an
	// instance has left the registry. Run calls them, for one instance in order, for
	// several concurrently. They must not block.
	OnState   func(*Instance, State)
	OnRestart func(*Instance)
	OnGone    func(*Instance)
}

// Registry holds the instances. Its methods are safe for concurrent use. Those that the request
// path calls take no lock.
type Registry struct {
	o        Options
	log      *slog.Logger
	health   atomic.Pointer[config.Health]
	circuit  atomic.Pointer[circuit.Rules]
	pairing  atomic.Pointer[pairing]
	refusals refusals
	states   lograte.Limiter[nameState] // decides which states are logged
	snap     atomic.Pointer[Snapshot]
	pairs    pairTable
	wake     chan struct{}                 // wakes Run when there are new instances
	changed  chan struct{}                 // wakes Export when exported data has changed
	newer    atomic.Pointer[chan struct{}] // closed and replaced by each publish
	mark     uint64                        // random: identifies the registry whose instance ids a mirror uses
	reports  *reports                      // nil: this is not a mirror
	learned  learned                       // from mirrors of this one
	born     time.Time                     // origin of answered
	answered atomic.Int64                  // send time of the latest probe that any instance answered
	settled  atomic.Bool                   // see Settled

	mu        sync.Mutex
	instances []*Instance // by age, draining ones included; guarded by mu
	expected  int         // lists of engines that have not arrived; guarded by mu
	wakes     bool        // see SetWakes; guarded by mu
	runs      bool        // Run has begun; guarded by mu
	known     known       // guarded by mu
	lastID    uint32      // guarded by mu
	stale     bool        // a change is not in the snapshot yet; guarded by mu
	next      time.Time   // when change may publish; guarded by mu
}

// New returns an empty registry. It starts nothing.
func New(o Options) *Registry {
	r := &Registry{o: o, log: o.Log, wake: make(chan struct{}, 1), changed: make(chan struct{}, 1), mark: rand.Uint64(), born: time.Now()}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	r.states = lograte.Limiter[nameState]{Every: time.Second, Most: 1 << 16}
	r.pairs.init(&r.circuit)
	r.refusals.logged = make(map[[2]uint32]string)
	r.learned.warming = make(map[int]map[pairKey]*Pair)
	r.Configure(o.Health, o.Circuit, o.Pairs)
	return r
}

// Configure replaces the configuration of probes, circuits and pairs. It applies from
// the next probe, failure or placement on.
func (r *Registry) Configure(h config.Health, c config.Circuit, p config.Pairs) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.health.Store(&h)
	r.circuit.Store(&circuit.Rules{Failures: c.Failures, OpenFor: time.Duration(c.OpenFor)})
	r.pairing.Store(&pairing{lax: p.AllowIncompatible, same: slices.Clone(p.SameLabels)})
	r.publish()
}

// Settle returns when the snapshot shows every state that an instance had before the call. After
// it, a caller that has seen a ready instance finds it in the snapshot.
func (r *Registry) Settle() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stale {
		r.publish()
	}
}

// Apply sets the instances of a source to those of specs. An instance with unchanged
// spec and key stays, with its load, connections and health. One that is missing drains
// for at most drainFor and leaves. A changed one becomes a new instance, and the old
// one drains. A name belongs to the source that has it. Only SourceStatic takes a name
// over from another source: that source's instance drains, because the trust in an
// engine depends on its source. On any error Apply changes nothing; errors of single
// engines are each a SpecError.
func (r *Registry) Apply(source string, specs []config.Engine, drainFor time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var (
		come  []*Instance
		errs  []error
		taken []*Instance // of other sources
		keep  = make(map[*Instance]bool)
		names = make(map[string]*Instance) // of instances that do not leave
		seen  = make(map[string]bool)      // in specs
		room  = r.room()
	)
	for _, i := range r.instances {
		if !i.leaving() {
			names[i.Spec.Name] = i
		}
	}
	for _, spec := range specs {
		i, err := r.newInstance(source, spec)
		old, twice := names[spec.Name], seen[spec.Name]
		seen[spec.Name] = true
		switch {
		case err != nil:
		case twice:
			err = errors.New("the name occurs twice")
		case old != nil && old.Source != source && source != SourceStatic:
			err = fmt.Errorf("the name is taken by an engine of source %s", old.Source)
		case old != nil && old.Source == source && old.Spec == i.Spec && old.APIKey == i.APIKey:
			keep[old] = true
		case spec.Ranks > room:
			err = errRanks
		default:
			room -= spec.Ranks
			come = append(come, i)
			if old != nil && old.Source != source {
				taken = append(taken, old)
			}
		}
		if err != nil {
			errs = append(errs, &SpecError{Name: spec.Name, Cause: err})
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := r.connect(come); err != nil {
		return err
	}
	for _, i := range r.instances {
		if i.Source == source && !keep[i] || slices.Contains(taken, i) {
			r.beginDrain(i, drainFor)
		}
	}
	r.admit(come)
	return nil
}

// Add adds one instance of SourceAdmin.
func (r *Registry) Add(spec config.Engine) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.named(spec.Name) != nil {
		return fmt.Errorf("add engine %q: the name is taken", spec.Name)
	}
	i, err := r.newInstance(SourceAdmin, spec)
	if err == nil && spec.Ranks > r.room() {
		err = errRanks
	}
	if err != nil {
		return fmt.Errorf("add engine %q: %w", spec.Name, err)
	}
	come := []*Instance{i}
	if err := r.connect(come); err != nil {
		return err
	}
	r.admit(come)
	return nil
}

// Remove makes the instance of that name drain: it gets no new requests, and leaves
// when nothing is in flight or drainFor has passed. Remove returns at once; Run waits
// for the end. The error is ErrUnknown if there is no such instance or it leaves
// already.
func (r *Registry) Remove(name string, drainFor time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := r.named(name)
	if i == nil {
		return fmt.Errorf("remove engine %q: %w", name, ErrUnknown)
	}
	r.beginDrain(i, drainFor)
	r.publish()
	return nil
}

// Run probes the instances until ctx ends. When it returns, no probe is in flight.
func (r *Registry) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	r.begin()
	for {
		for _, i := range r.unwatched() {
			wg.Go(func() { r.watch(ctx, i) })
		}
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		}
	}
}

// Close closes the idle connections to all instances.
func (r *Registry) Close() {
	for _, i := range r.Snapshot().Instances {
		i.Client.CloseIdle()
	}
}

// number assigns an id and slots in the index to a new instance; r.mu is held.
func (r *Registry) number(i *Instance) {
	r.lastID++
	i.ID = r.lastID
	if r.o.Index != nil {
		i.KV = r.o.Index.AddRanks(len(i.Load))
	}
}

// signal wakes the receiver of c, now or at its next receive.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// named returns the instance of that name that does not leave, or nil; r.mu is held.
func (r *Registry) named(name string) *Instance {
	for _, i := range r.instances {
		if i.Spec.Name == name && !i.leaving() {
			return i
		}
	}
	return nil
}

// beginDrain makes i drain and leave unless it already does; r.mu is held.
func (r *Registry) beginDrain(i *Instance, drainFor time.Duration) {
	if i.leaving() {
		return
	}
	i.setState(Draining)
	i.drainFor.Store(int64(drainFor))
	i.cancel()
	r.moveLater(i)
}

// changeRest is how long change waits after a snapshot, as a multiple of the time that the snapshot
// took. A snapshot takes time for each instance, so a snapshot for each of n instances that start
// together would take time for n² of them: 20 s of a processor for 4,000.
const changeRest = 9

// longestRest is the longest time that change waits. A snapshot may take long because the process did
// not run, and requests go to a failed engine until the next one.
const longestRest = time.Second

// change changes something about one instance, and returns when the snapshot shows the change. do
// makes the change with r.mu held; false: there is none. Changes at almost the same time share one
// snapshot.
func (r *Registry) change(do func() bool) bool {
	r.mu.Lock()
	if !do() {
		r.mu.Unlock()
		return false
	}
	wait := time.Until(r.next)
	if wait <= 0 {
		r.publish()
		r.mu.Unlock()
		return true
	}
	if !r.stale {
		r.stale = true
		time.AfterFunc(wait, r.Settle)
	}
	published := *r.newer.Load()
	r.mu.Unlock()
	<-published
	return true
}

// publish publishes a new snapshot; r.mu is held.
func (r *Registry) publish() {
	began := time.Now()
	s := newSnapshot(slices.Clone(r.instances), *r.pairing.Load())
	r.known.add(served(s.Instances))
	s.known, s.expects, s.wakes = r.known, r.expected > 0, r.wakes
	for _, i := range s.Instances {
		if !i.asked.Load() {
			s.unasked = append(s.unasked, i)
		}
	}
	r.snap.Store(s)
	r.noteSettled()
	newer := make(chan struct{})
	if old := r.newer.Swap(&newer); old != nil {
		close(*old)
	}
	signal(r.changed)
	now := time.Now()
	r.stale, r.next = false, now.Add(min(changeRest*now.Sub(began), longestRest))
}

// become sets i's state and publishes it, unless i leaves.
func (r *Registry) become(i *Instance, s State) {
	if !r.change(func() bool {
		if i.leaving() {
			return false
		}
		i.setState(s)
		i.asked.Store(true)
		return true
	}) {
		return
	}
	if s == Unhealthy {
		signal(i.evictNow)
	}
	r.announce(i, s)
}

// nameState is a state of the instances of one name.
type nameState struct {
	name  string
	state State
}

// announce logs a new state of i and calls OnState. A state of one name is logged at most once
// a second, because a source may replace an engine hundreds of times a second. Only the goroutine that watches i
// calls it, so that the hooks see the states in order. r.mu is not held, so that hooks
// may call the registry.
func (r *Registry) announce(i *Instance, s State) {
	if r.states.Allow(nameState{i.Spec.Name, s}) {
		level, message := slog.LevelInfo, "engine is "+s.String()
		switch {
		case s == Unhealthy:
			level = slog.LevelWarn
		case s == Ready && i.lost:
			message += " again"
		}
		r.log.Log(context.Background(), level, message, "engine", i.Spec.Name, "url", i.Spec.URL)
	}
	i.lost = s == Unhealthy
	if r.o.OnState != nil {
		r.o.OnState(i, s)
	}
}

// forget removes a drained instance.
func (r *Registry) forget(i *Instance) {
	r.change(func() bool {
		i.gone.Store(true)
		r.instances = slices.DeleteFunc(r.instances, func(o *Instance) bool { return o == i })
		return true
	})
	r.pairs.drop(i.ID)
	r.refusals.forget(i.ID)
	i.Client.CloseIdle()
	if r.o.OnGone != nil {
		r.o.OnGone(i)
	}
	for _, slot := range i.KV { // last: OnGone may stop the goroutines that write to the slots
		r.o.Index.Drop(slot)
	}
}

// setState sets a state and its time.
func (i *Instance) setState(s State) {
	if State(i.state.Swap(uint32(s))) != s {
		i.since.Store(time.Now().UnixMilli())
	}
}
