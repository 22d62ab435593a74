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

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

// Kind is the way in which the proxy receives the events of an instance.
type Kind uint8

// The kinds.
const (
	// Subscribe connects to a ZeroMQ publisher for each rank: vLLM, SGLang.
	Subscribe Kind = iota
	// Poll drains the queue of the whole instance by HTTP: TensorRT-LLM.
	Poll
)

// Source describes the events of one instance.
type Source struct {
	// Name is the instance's name, for metrics and logs.
	Name string
	Kind Kind
	// Model is the model name under which requests for the instance are hashed: it
	// seeds the hashes.
	Model string
	// Targets are the index slots of the instance's ranks, in order. Only the manager
	// changes these slots until Forget has returned.
	Targets []kvindex.Target
	// Publishers are the endpoints of the ranks, in the order of Targets. A rank without one
	// is not followed.
	Publishers []engine.KVEndpoints
	// URL is the base URL of a polled instance.
	URL string
	// BlockTokens is the length of a block in tokens if it is known; 0 to learn it.
	BlockTokens int
	// Transport carries the polls. APIKey is sent with them unless it is empty.
	Transport http.RoundTripper
	APIKey    string
}

// Options configures a Manager.
type Options struct {
	Index *kvindex.Index
	// Log may be nil.
	Log   *slog.Logger
	Hooks Hooks
}

// Manager runs the subscribers and pollers of all followed instances. It is safe for
// concurrent use.
type Manager struct {
	index *kvindex.Index
	log   *slog.Logger
	hooks Hooks

	mu        sync.Mutex
	followers map[string]*follower // guarded by mu
	ctx       context.Context      // Run's context; nil while Run is not running; guarded by mu
}

// New returns a manager that follows no instance.
func New(o Options) *Manager {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Manager{index: o.Index, log: o.Log, hooks: o.Hooks, followers: map[string]*follower{}}
}

// Run follows the sources until ctx ends. When it returns, all goroutines of the
// manager have ended. It may be called once.
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

// Follow begins to apply the events of an instance, at the earliest when Run is called.
// It first calls Forget for a source of the same name.
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

// Forget stops following an instance. When Forget returns, the manager no longer changes
// the targets. The index still has their blocks. It does nothing if the instance is not
// followed.
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

// Restarted reports a restart of an instance that its probe found. The instance's
// blocks are removed at once, and its events are followed from the start.
func (m *Manager) Restarted(name string) {
	if f := m.find(name); f != nil {
		for _, w := range f.workers {
			w.reset()
		}
	}
}

// States returns the state of an instance's events, one for each rank; nil if the
// instance is not followed.
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
	m.subscribers(f, s)
	return f, nil
}

func (m *Manager) subscribers(f *follower, s Source) {
	for i, t := range s.Targets {
		if i >= len(s.Publishers) || s.Publishers[i].Events == "" {
			continue
		}
		at := s.Publishers[i]
		sub := &subscriber{rank: f.ranks[i], events: at.Events, replay: at.Replay, block: s.BlockTokens, idle: replayIdle, subscribe: subscribeTime}
		sub.batches.to = kvindex.NewFeed(m.index, t, s.Model)
		sub.batches.filter = eventFilter{block: s.BlockTokens, fixed: s.BlockTokens > 0}
		f.workers = append(f.workers, &worker{session: sub.session, restarted: sub.restarted, down: sub.rank.connect})
	}
}

func (m *Manager) poller(f *follower, s Source) error {
	if s.Transport == nil {
		return errors.New("no transport")
	}
	p := &poller{
		ranks: f.ranks, url: strings.TrimRight(s.URL, "/") + "/kv_cache_events", key: s.APIKey,
		transport: s.Transport, block: s.BlockTokens,
	}
	p.events.resync = func(rank int, reason string) {
		if reason == ResyncGap {
			f.ranks[rank].gap()
		}
		f.ranks[rank].resync(reason)
	}
	for _, t := range s.Targets {
		p.events.ranks = append(p.events.ranks, drainedRank{
			to: kvindex.NewFeed(m.index, t, s.Model), filter: eventFilter{block: s.BlockTokens, fixed: s.BlockTokens > 0},
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

// end stops the workers. It does nothing for a follower that was never started. Neither
// does wait.
func (f *follower) end() {
	if f.cancel != nil {
		f.cancel()
	}
}

func (f *follower) wait() { f.started.Wait() }

// worker runs the sessions of a subscriber or a poller, one after the other.
type worker struct {
	session   func(context.Context) error
	restarted func(reason string)
	down      func(error)

	engineRestarted atomic.Bool // the engine has restarted
	mu              sync.Mutex
	cancel          context.CancelFunc // cancels the session; guarded by mu
}

// reset ends the session. The next one begins with nothing known. The worker's own
// goroutine clears the feed, because a feed belongs to one goroutine.
func (w *worker) reset() {
	w.engineRestarted.Store(true)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cancel != nil {
		w.cancel()
	}
}

// run runs sessions until ctx ends. The pause between sessions that fail at once grows.
func (w *worker) run(ctx context.Context) {
	wait := retryMin
	for ctx.Err() == nil {
		session, cancel := context.WithCancel(ctx)
		w.mu.Lock()
		w.cancel = cancel
		w.mu.Unlock()
		if w.engineRestarted.Swap(false) {
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
