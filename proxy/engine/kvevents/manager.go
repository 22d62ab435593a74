package kvevents

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// Kind is how the events of an instance are had.
type Kind uint8

// The kinds.
const (
	// Subscribe connects to a ZeroMQ publisher for each rank: vLLM, SGLang.
	Subscribe Kind = iota
	// Poll drains the queue of the whole instance by HTTP: TensorRT-LLM.
	Poll
)

// Source says where the events of one instance come from, and whose they are.
type Source struct {
	// Name is the instance's, for metrics and logs.
	Name string
	Kind Kind
	// Model seeds the hashes: the name by which requests for the instance are
	// hashed.
	Model string
	// Targets are the slots of its ranks, in order. They belong to the source
	// until Forget has returned.
	Targets []kvindex.Target
	// Events is "tcp://host:port" of rank 0's publisher, or the base URL of a
	// polled instance.
	Events string
	// Replay is "tcp://host:port" of rank 0's replay endpoint; "" for none.
	Replay string
	// BlockTokens is the length of a block if it is known; 0 is to learn it.
	BlockTokens int
	// Transport carries the polls; APIKey goes with them if it is not empty.
	Transport http.RoundTripper
	APIKey    string
}

// Options are what a Manager needs.
type Options struct {
	Index *kvindex.Index
	// Log may be nil.
	Log   *slog.Logger
	Hooks Hooks
}

// Manager runs the subscribers and pollers of all instances that are followed.
// It is safe for concurrent use.
type Manager struct {
	index *kvindex.Index
	log   *slog.Logger
	hooks Hooks

	mu        sync.Mutex
	followers map[string]*follower // guarded by mu
	ctx       context.Context      // that of Run; nil while it does not run; guarded by mu
}

// New returns a manager that follows nothing yet.
func New(o Options) *Manager {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Manager{index: o.Index, log: o.Log, hooks: o.Hooks, followers: map[string]*follower{}}
}

// Run follows the sources until ctx ends. When it returns, all goroutines of
// the manager have ended. It is called once.
func (m *Manager) Run(ctx context.Context) error {
	m.mu.Lock()
	m.ctx = ctx
	for _, f := range m.followers {
		f.start(ctx)
	}
	m.mu.Unlock()
	<-ctx.Done()
	m.mu.Lock()
	left := slices.Collect(maps.Values(m.followers))
	m.mu.Unlock()
	for _, f := range left {
		f.wait()
	}
	return context.Cause(ctx)
}

// Follow takes in the events of an instance from now on, or from when Run is
// called. A source of the same name is forgotten first.
func (m *Manager) Follow(s Source) error {
	f, err := m.follower(s)
	if err != nil {
		return fmt.Errorf("follow %s: %w", s.Name, err)
	}
	m.Forget(s.Name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.followers[s.Name] != nil {
		return fmt.Errorf("follow %s: followed twice at once", s.Name)
	}
	m.followers[s.Name] = f
	if m.ctx != nil {
		f.start(m.ctx)
	}
	return nil
}

// Forget ends following an instance. When it returns, nothing touches its
// targets any more; their blocks are still there. It does nothing if the
// instance is not followed.
func (m *Manager) Forget(name string) {
	m.mu.Lock()
	f := m.followers[name]
	delete(m.followers, name)
	m.mu.Unlock()
	if f != nil {
		f.end()
		f.wait()
	}
}

// Restarted says that an instance has restarted, as its probe found: its blocks
// go at once, and its events are followed from the start.
func (m *Manager) Restarted(name string) {
	if f := m.find(name); f != nil {
		for _, w := range f.workers {
			w.reset()
		}
	}
}

// Nudge polls an instance soon: a request to it has just finished, so events are
// likely. It costs next to nothing, and does nothing for one that publishes.
func (m *Manager) Nudge(name string) {
	if f := m.find(name); f != nil && f.nudge != nil {
		select {
		case f.nudge <- struct{}{}:
		default:
		}
	}
}

// States returns what is known of the events of an instance, one a rank; nil if
// it is not followed.
func (m *Manager) States(name string) []State {
	f := m.find(name)
	if f == nil {
		return nil
	}
	states := make([]State, len(f.ranks))
	for i, r := range f.ranks {
		states[i] = r.state()
	}
	return states
}

func (m *Manager) find(name string) *follower {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.followers[name]
}

// follower follows one instance.
type follower struct {
	ranks   []*rank
	workers []*worker
	nudge   chan struct{} // of a polled instance
	cancel  context.CancelFunc
	started sync.WaitGroup
}

func (m *Manager) follower(s Source) (*follower, error) {
	if len(s.Targets) == 0 {
		return nil, errors.New("no targets")
	}
	f := &follower{}
	for i := range s.Targets {
		f.ranks = append(f.ranks, &rank{engine: s.Name, n: i, hooks: &m.hooks, log: m.log})
	}
	if s.Kind == Poll {
		return f, m.poller(f, s)
	}
	return f, m.subscribers(f, s)
}

func (m *Manager) subscribers(f *follower, s Source) error {
	for i, t := range s.Targets {
		events, err := Endpoint(s.Events, i)
		if err != nil {
			return err
		}
		replay := ""
		if s.Replay != "" {
			if replay, err = Endpoint(s.Replay, i); err != nil {
				return err
			}
		}
		sub := &subscriber{rank: f.ranks[i], events: events, replay: replay, block: s.BlockTokens, idle: replayIdle}
		sub.batches.to = kvindex.NewFeed(m.index, t, s.Model)
		sub.batches.sieve = sieve{block: s.BlockTokens, fixed: s.BlockTokens > 0}
		f.workers = append(f.workers, &worker{session: sub.session, restarted: sub.restarted, down: sub.rank.connect})
	}
	return nil
}

func (m *Manager) poller(f *follower, s Source) error {
	if s.Transport == nil {
		return errors.New("no transport")
	}
	f.nudge = make(chan struct{}, 1)
	p := &poller{
		ranks: f.ranks, url: strings.TrimRight(s.Events, "/") + "/kv_cache_events", key: s.APIKey,
		transport: s.Transport, nudge: f.nudge, block: s.BlockTokens,
	}
	p.events.resync = func(rank int, reason string) {
		if reason == ResyncGap {
			f.ranks[rank].gap()
		}
		f.ranks[rank].resync(reason)
	}
	for _, t := range s.Targets {
		p.events.ranks = append(p.events.ranks, drainedRank{
			to: kvindex.NewFeed(m.index, t, s.Model), sieve: sieve{block: s.BlockTokens, fixed: s.BlockTokens > 0},
		})
	}
	f.workers = []*worker{{session: p.session, restarted: p.restarted, down: func(error) {}}}
	return nil
}

// start runs the workers. It is called once, with Manager.mu held.
func (f *follower) start(ctx context.Context) {
	ctx, f.cancel = context.WithCancel(ctx)
	for _, w := range f.workers {
		f.started.Go(func() { w.run(ctx) })
	}
}

// end and wait do nothing for a follower that was never started.
func (f *follower) end() {
	if f.cancel != nil {
		f.cancel()
	}
}

func (f *follower) wait() { f.started.Wait() }

// worker keeps one session going: a subscriber's or a poller's.
type worker struct {
	session   func(context.Context) error
	restarted func(reason string)
	down      func(error)

	told   atomic.Bool // the engine restarted
	mu     sync.Mutex
	cancel context.CancelFunc // of the session; guarded by mu
}

// reset ends the session and begins a new one with nothing known. The session's
// own goroutine clears its feed, for a feed belongs to one.
func (w *worker) reset() {
	w.told.Store(true)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cancel != nil {
		w.cancel()
	}
}

// run holds sessions until ctx ends, with growing pauses between those that
// fail at once.
func (w *worker) run(ctx context.Context) {
	wait := retryMin
	for ctx.Err() == nil {
		session, cancel := context.WithCancel(ctx)
		w.mu.Lock()
		w.cancel = cancel
		w.mu.Unlock()
		if w.told.Swap(false) {
			w.restarted(ResyncTold)
		}
		begin := time.Now()
		err := w.session(session)
		if session.Err() == nil {
			w.down(err)
		}
		if time.Since(begin) > retryMax {
			wait = retryMin
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
			wait = min(2*wait, retryMax)
		case <-session.Done():
			wait = retryMin
		}
		timer.Stop()
		cancel()
	}
}

// Followed returns the names of the instances that are followed, sorted.
func (m *Manager) Followed() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.followers))
}
