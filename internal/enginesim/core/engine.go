package core

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// ErrEnded is the cause of contexts that end with the engine.
var ErrEnded = errors.New("engine ended")

// Engine is one simulated engine. Call New, then Start (or Run), then Close or
// Kill. An ended engine cannot be started again: a restart is another New, with
// another engine id. It is safe for concurrent use.
type Engine struct {
	Cfg     Config
	UUID    string // as the real engine's engine_id: a fresh uuid
	born    time.Time
	Weights weights
	Proto   Protocol
	Faults  *faults
	Stats   counters
	loras   loras
	Sleeper sleeper
	Ranks   []*Rank
	Conns   *connSet
	server  *http.Server
	// kvSink receives the changes of the ranks' prefix caches. publishers is
	// the kvSink of an engine that has a publisher.
	kvSink     kvSink
	Publishers *publishers
	KVFault    *KVFault
	Peers      zmtpPeers
	// wrongTokens makes the tokenize endpoints return ids that differ from
	// those that the engine computes.
	wrongTokens atomic.Bool
	// step is the time of one decoded token, in nanoseconds; it can change.
	step atomic.Int64

	Ctx    context.Context // ends with the engine
	cancel context.CancelCauseFunc
	Wg     sync.WaitGroup // all goroutines of spawn

	mu       sync.Mutex
	listener net.Listener
	started  bool
	ended    bool
	next     int            // rank of the next request that does not name one
	inFlight map[string]int // request ids in flight
	died     chan struct{}  // closed by Kill
}

// NewEngine checks the config and builds an engine whose kind build adds; it opens nothing.
func NewEngine(cfg Config, build func(*Engine) Protocol) (*Engine, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	e := &Engine{
		Cfg: cfg, UUID: NewUUID(), born: time.Now(), Weights: newWeights(cfg.Model), Conns: newConnSet(),
		KVFault: &KVFault{}, Peers: zmtpPeers{conns: newConnSet()},
		inFlight: make(map[string]int), died: make(chan struct{}),
	}
	if cfg.Nixl.EngineID != "" {
		e.UUID = cfg.Nixl.EngineID
	}
	e.wrongTokens.Store(cfg.WrongTokens)
	e.SetDecodeUsPerToken(cfg.DecodeUsPerToken)
	if e.Faults, err = newFaults(cfg); err != nil {
		return nil, err
	}
	for i := range cfg.Ranks {
		e.Ranks = append(e.Ranks, &Rank{Engine: e, Index: i, Cache: NewKVCache(cfg.KVBlocks, cfg.BlockSize, Mix(cfg.Seed)+uint64(i))})
	}
	e.Proto = build(e)
	e.Ctx, e.cancel = context.WithCancelCause(context.Background())
	e.server = &http.Server{
		Handler:           e.handler(),
		BaseContext:       func(net.Listener) context.Context { return e.Ctx },
		ConnState:         e.Conns.State,
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          slog.NewLogLogger(cfg.Log.Handler(), slog.LevelWarn),
	}
	return e, nil
}

// Start opens the listeners and serves until Close or Kill.
func (e *Engine) Start() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.started {
		return errors.New("start engine: already started")
	}
	host, _, err := net.SplitHostPort(e.Cfg.Listen)
	if err != nil {
		return fmt.Errorf("start engine: %w", err)
	}
	if e.listener, err = net.Listen("tcp", e.Cfg.Listen); err != nil {
		return fmt.Errorf("start engine: %w", err)
	}
	e.started = true
	for _, r := range e.Ranks {
		if r.Side, err = OpenSideChannel(r, host, e.Cfg.SideChannelPort); err != nil {
			e.endLocked(false)
			return fmt.Errorf("start engine: %w", err)
		}
	}
	for _, r := range e.Ranks {
		e.Spawn(r.Side.accept)
	}
	if e.Publishers != nil {
		if err := e.Publishers.Start(e); err != nil {
			e.endLocked(false)
			return fmt.Errorf("start engine: %w", err)
		}
	}
	if err := e.Proto.Start(); err != nil {
		e.endLocked(false)
		return fmt.Errorf("start engine: %w", err)
	}
	l := &faultyListener{Listener: e.listener, e: e}
	e.Spawn(func(context.Context) { e.server.Serve(l) })
	e.Spawn(func(ctx context.Context) {
		if s, key, value := e.registration(); s != nil {
			e.registerIn(ctx, s, key, value, e.Cfg.TRTLLM.Heartbeat)
		}
	})
	return nil
}

// Run starts the engine and serves until ctx ends, then closes it. It returns
// nil after a close and an error when the engine could not start or died.
func (e *Engine) Run(ctx context.Context) error {
	if err := e.Start(); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		e.Close()
		return nil
	case <-e.died:
		e.Wg.Wait()
		return errors.New("run engine: died")
	}
}

// Addr is the HTTP address, host:port; empty before Start.
func (e *Engine) Addr() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.listener == nil {
		return ""
	}
	return e.listener.Addr().String()
}

// URL is the base URL of the HTTP address.
func (e *Engine) URL() string { return "http://" + e.Addr() }

// ID is the engine id that it publishes to peers; it differs after a restart.
func (e *Engine) ID() string { return e.UUID }

// Died is closed when the engine has been killed, by Kill or by a fault.
func (e *Engine) Died() <-chan struct{} { return e.died }

// CloseGrace is the time that Close gives running requests to finish.
const CloseGrace = 5 * time.Second

// Close stops accepting, gives running requests a few seconds to finish, ends the
// remaining requests and waits for every goroutine. It may be called again, and after
// Kill.
func (e *Engine) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), CloseGrace)
	defer cancel()
	e.server.Shutdown(ctx)
	e.end(false)
	e.Wg.Wait()
}

// Kill ends the engine as kill -9 would: it resets every connection and drops
// all memory. It does not wait for goroutines; Close does.
func (e *Engine) Kill() {
	e.end(true)
}

// crashDelay is the time between an engine core's failure and the process's
// exit. The request that caused the failure still gets its 500.
const crashDelay = 100 * time.Millisecond

// Crash ends the engine core by an assertion: the process exits soon.
func (e *Engine) Crash(reason string) {
	e.Cfg.Log.Error("engine core died", "reason", reason)
	e.Spawn(func(ctx context.Context) {
		if Sleep(ctx, crashDelay) == nil {
			e.Kill()
		}
	})
}

func (e *Engine) end(abrupt bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.endLocked(abrupt)
}

func (e *Engine) endLocked(abrupt bool) {
	if e.ended {
		return
	}
	e.ended = true
	if e.listener != nil {
		e.listener.Close()
	}
	e.Conns.Close(abrupt)
	e.Peers.Close(abrupt)
	for _, r := range e.Ranks {
		if r.Side != nil {
			r.Side.Close(abrupt)
		}
	}
	e.cancel(ErrEnded)
	e.Faults.stop(false)
	e.server.Close()
	for _, r := range e.Ranks {
		r.UnpinAll()
	}
	if abrupt {
		close(e.died)
	}
}

// killed reports whether the engine died instead of being closed.
func (e *Engine) killed() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	select {
	case <-e.died:
		return true
	default:
		return false
	}
}

// Spawn runs fn in a goroutine that Close waits for. fn's context ends with the
// engine.
func (e *Engine) Spawn(fn func(ctx context.Context)) {
	e.Wg.Go(func() { fn(e.Ctx) })
}

// Begin counts a handler that Close waits for. It returns false after the end.
// The caller ends it with e.wg.Done, and may spawn until then.
func (e *Engine) Begin() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended {
		return false
	}
	e.Wg.Add(1)
	return true
}

// HasEnded reports whether the engine was closed or killed. It waits while
// either is in progress.
func (e *Engine) HasEnded() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.ended
}

// PickRank is the rank of a request: the wanted one, or the one with the least
// running and waiting.
func (e *Engine) PickRank(want int) *Rank {
	if want >= 0 && want < len(e.Ranks) {
		return e.Ranks[want]
	}
	e.mu.Lock()
	e.next++
	first := e.next
	e.mu.Unlock()
	var best *Rank
	bestLoad := 0
	for i := range e.Ranks {
		r := e.Ranks[(first+i)%len(e.Ranks)]
		r.Mu.Lock()
		load := r.running + len(r.queue) + len(r.resume) + r.loading
		r.Mu.Unlock()
		if best == nil || load < bestLoad {
			best, bestLoad = r, load
		}
	}
	return best
}

// Enter records a request id as in flight and reports whether it already was;
// leave removes it.
func (e *Engine) Enter(id string) (duplicate bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.inFlight[id]++
	if e.inFlight[id] > 1 {
		e.Stats.DuplicateIDs.Add(1)
		e.Cfg.Log.Warn("request id is in flight already", "request", id)
		return true
	}
	return false
}

func (e *Engine) Leave(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.inFlight[id]--; e.inFlight[id] <= 0 {
		delete(e.inFlight, id)
	}
}

// NewUUID is a random version 4 uuid.
func NewUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// SideAddress returns the address of the side channel of rank 0. Call it after
// the engine has started.
func (e *Engine) SideAddress() string {
	host, port := e.Ranks[0].Side.HostPort()
	return net.JoinHostPort(host, strconv.Itoa(port))
}

// EngineID returns the id by which peers know the engine.
func (e *Engine) EngineID() string { return e.UUID }

// BootstrapPort returns the port of the bootstrap server of a started engine
// that has one (sglang's prefill and vllm-mooncake's), and 0 for every other
// engine.
func (e *Engine) BootstrapPort() int {
	if p, ok := e.Proto.(bootstrapProtocol); ok {
		return p.BootstrapPort()
	}
	return 0
}

// KVAddress returns the address of the KV transfer of an engine with the
// MoRIIOConnector, as the engine registers it. It is empty for other engines. Call it
// after the engine has started.
func (e *Engine) KVAddress() string {
	if p, ok := e.Proto.(addressedProtocol); ok {
		return p.KVAddress()
	}
	return ""
}
