package discovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connlimit"
	"github.com/pdproxy/pdproxy/proxy/engine/registrations"
	"github.com/pdproxy/pdproxy/proxy/httpguard"
)

const (
	// sweepEvery is how often expired keys are removed.
	sweepEvery = registrations.WriteEvery
	// maxKeys bounds the number of stored keys, maxTexts the bytes of keys and values:
	// a worker has about 200.
	maxKeys, maxTexts = 8192, 8 << 20
	// drainLimit bounds the answering of received requests when another process takes
	// over the store.
	drainLimit = time.Second
	// storageTimeout bounds the reading of one request. Workers allow 5 s for a whole
	// request (HttpClusterStorageClient).
	storageTimeout = 5 * time.Second
	// storageIdle is how long a worker's connection may be idle: longer than the time
	// between two heartbeats.
	storageIdle = time.Minute
)

// Storage is the store of TensorRT-LLM's disagg_cluster, kept in memory and served over
// HTTP: the five routes with which trtllm-serve workers register if their cluster_uri
// is an http address. It is a Source of the workers of one cluster. Without the
// registrations of a previous process, a restarted proxy knows no worker until the next
// heartbeats, which fail and are followed by registrations.
//
// Source: TensorRT-LLM serve/cluster_storage.py (HttpClusterStorageServer),
// serve/disagg_auto_scaling.py (the keys, the heartbeat).
type Storage struct {
	listener      net.Listener
	guard         httpguard.Guard
	prefix        string // of the workers' keys
	changed       chan struct{}
	registrations *registrations.Store
	own           context.Context // ends when a successor takes over the store
	release       context.CancelFunc
	released      chan struct{} // closed after the release

	mu    sync.Mutex
	items map[string]item // guarded by mu
	texts int             // bytes of the items; guarded by mu
	born  int64           // counter of new keys; guarded by mu
	swept time.Time       // guarded by mu
	book                  // the workers among the items; guarded by mu
}

// item is one key.
type item struct {
	value string
	peer  string        // address of the client that set it
	born  int64         // increases from item to item
	ttl   time.Duration // counted from the last heartbeat; 0: no expiry
	until time.Time     // zero: no expiry
}

// StorageOptions configures a store.
type StorageOptions struct {
	// Cluster must have a ClusterURI that is an http address.
	Cluster config.DiscoveryTRTLLM
	// Listener is the open socket at that address, or nil.
	Listener net.Listener
	// Token is required in each request, unless it is "".
	Token string
	// Hosts are the host names that a request without token may use.
	Hosts []string
	// Registrations keeps the keys for other processes; a store without a directory
	// keeps none.
	Registrations *registrations.Store
	// Log may be nil.
	Log *slog.Logger
}

// StorageAddress returns the address at which the store of a cluster listens, as
// host:port. ok is false if the proxy does not serve the store.
func StorageAddress(cfg config.DiscoveryTRTLLM) (address string, ok bool) {
	return strings.CutPrefix(cfg.ClusterURI, "http://")
}

// ListenStorage opens the socket of the store unless it is already open. It starts
// nothing.
func ListenStorage(o StorageOptions) (*Storage, error) {
	address, ok := StorageAddress(o.Cluster)
	if !ok {
		return nil, fmt.Errorf("listen for workers: %q is not http://host:port", o.Cluster.ClusterURI)
	}
	s := newStorage(o.Cluster.ClusterName, o.Token, o.Log)
	s.guard.Hosts = o.Hosts
	if o.Registrations != nil {
		s.registrations = o.Registrations
	}
	if s.listener = o.Listener; s.listener == nil {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return nil, fmt.Errorf("listen for workers: %w", err)
		}
		s.listener = l
	}
	s.guard.Address = s.listener.Addr()
	return s, nil
}

func newStorage(cluster, token string, log *slog.Logger) *Storage {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Storage{
		guard: httpguard.Guard{
			Name: "discovery.trtllm.cluster_uri", Token: token, Types: []string{"application/json"}, Log: log,
			Refuse: func(w http.ResponseWriter, _ *http.Request, status int, text string) {
				answer(w, status, "detail", text)
			},
		},
		prefix: workersPrefix(cluster), changed: make(chan struct{}, 1),
		registrations: registrations.New(nil, "", log), released: make(chan struct{}),
		items: map[string]item{}, swept: time.Now(), book: newBook("trtllm", log),
	}
	s.own, s.release = context.WithCancel(context.Background())
	s.read, s.same = readWorker, func(e config.Engine) string { return e.URL }
	return s
}

// Addr returns the address at which workers register.
func (s *Storage) Addr() net.Addr { return s.listener.Addr() }

// Listener returns the socket, for a successor.
func (s *Storage) Listener() net.Listener { return s.listener }

// Complete reports whether the workers that registered before this process began are
// known.
func (s *Storage) Complete() bool { return s.registrations.Complete() }

// Close closes the socket. It is for a Storage whose Run is not called.
func (s *Storage) Close() error { return s.listener.Close() }

// Release gives the store to a successor. When it returns, this process answers no more
// requests, and the successor can read all stored keys. Run continues with the workers
// that register at the successor.
func (s *Storage) Release() {
	s.release()
	<-s.released
}

// Run serves the store until ctx ends, and then closes the socket and every connection.
// It calls found, from its own goroutine, with all workers whenever they change. While
// another process serves the store, before this one's turn and after Release, they are
// that process's workers.
func (s *Storage) Run(ctx context.Context, found func([]config.Engine)) {
	tell := registrations.OnChange(s.workers, found)
	shown := func(entries []registrations.Entry) {
		s.restore(entries)
		tell()
	}
	s.runOwner(ctx, shown, tell)
	close(s.released)
	s.registrations.Follow(ctx, shown)
}

// runOwner waits for its turn and serves the store, until Release or the end of ctx.
func (s *Storage) runOwner(ctx context.Context, shown func([]registrations.Entry), tell func()) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(s.own, stop)()
	defer s.listener.Close()
	entries, ok := s.registrations.Acquire(ctx, shown)
	if !ok {
		return
	}
	s.restore(entries)
	if len(entries) > 0 || s.Complete() {
		tell()
	}
	s.serve(ctx, tell)
	s.registrations.Release(s.entries())
}

// serve answers requests until ctx ends.
func (s *Storage) serve(ctx context.Context, tell func()) {
	d := &drainer{}
	server := &http.Server{
		Handler: d.closeAfterReply(s.routes()), ConnState: d.follow,
		ReadTimeout: storageTimeout, WriteTimeout: 2 * storageTimeout, IdleTimeout: storageIdle, MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	connlimit.HTTP(server)
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := server.Serve(s.listener); !errors.Is(err, net.ErrClosed) || ctx.Err() == nil {
			s.log.Error("workers cannot register any more", "source", s.name, "error", err)
		}
	}()
	defer func() {
		s.listener.Close()
		<-served
		d.drain(drainLimit)
		server.Close()
	}()
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.sweep(now)
			s.registrations.Write(s.entries())
		case <-s.changed:
			tell()
		}
	}
}

// restore replaces the items by the entries of another store.
func (s *Storage) restore(entries []registrations.Entry) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.items)
	clear(s.records)
	s.texts, s.swept = 0, now
	for _, e := range entries {
		it := item{value: string(e.Value), peer: e.Peer, born: e.Born}
		if e.Until > 0 {
			it.ttl, it.until = time.Duration(e.TTL)*time.Millisecond, now.Add(e.Left(now))
		}
		if len(e.Key)+len(e.Value) <= maxRecord && len(s.items) < maxKeys {
			s.put(e.Key, it)
			s.born = max(s.born, e.Born)
		}
	}
}

// entries returns the items in the form that restore reads.
func (s *Storage) entries() []registrations.Entry {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]registrations.Entry, 0, len(s.items))
	for key, it := range s.items {
		e := registrations.Entry{Key: key, Value: []byte(it.value), Peer: it.peer, Born: it.born}
		if !it.until.IsZero() {
			e.End(now, it.ttl, it.until.Sub(now))
		}
		list = append(list, e)
	}
	return list
}

// workers lists the engines of the cluster.
func (s *Storage) workers() []config.Engine {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.engines()
}

// sweep removes expired items. Time for which the proxy itself was stopped does not
// count, because the workers' heartbeats wait in its socket.
func (s *Storage) sweep(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	stall := now.Sub(s.swept) - sweepEvery
	s.swept = now
	for key, it := range s.items {
		switch {
		case it.until.IsZero():
		case stall > sweepEvery:
			it.until = it.until.Add(stall)
			s.items[key] = it
		case now.After(it.until):
			s.remove(key)
		}
	}
}

// set stores a value, for ttl if that is positive. It returns false if the key exists
// and must not be overwritten, or if there are too many. peer is the client's address.
func (s *Storage) set(key, value string, ttl time.Duration, overwrite bool, peer string) bool {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	old, there := s.live(key, now)
	switch more := len(value) - len(old.value); {
	case there && !overwrite || len(key)+len(value) > maxRecord:
		return false
	case !there && (len(s.items) >= maxKeys || s.texts+len(key)+more > maxTexts), there && s.texts+more > maxTexts:
		return false
	}
	s.born++
	it := item{value: value, peer: peer, born: s.born}
	if ttl > 0 {
		it.ttl, it.until = ttl, now.Add(ttl)
	}
	s.put(key, it)
	return true
}

// put stores an item; s.mu is held.
func (s *Storage) put(key string, it item) {
	if old, there := s.items[key]; there {
		s.texts -= len(key) + len(old.value)
	}
	s.items[key] = it
	s.texts += len(key) + len(it.value)
	if strings.HasPrefix(key, s.prefix) {
		s.note(key, reachable([]byte(it.value), it.peer), it.born)
		s.notify()
	}
}

// reachable returns a worker's record in which the worker's own address replaces a host
// of 0.0.0.0 or [::], to which no peer can connect.
func reachable(value []byte, peer string) []byte {
	var w map[string]any
	if json.Unmarshal(value, &w) != nil || peer == "" {
		return value
	}
	if host, _ := w["host"].(string); !unspecified(strings.Trim(host, "[]")) {
		return value
	}
	w["host"] = peer
	if changed, err := json.Marshal(w); err == nil {
		return changed
	}
	return value
}

// expire gives a key ttl from now on. It returns false if there is no such key.
func (s *Storage) expire(key string, ttl time.Duration) bool {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	it, there := s.live(key, now)
	if there {
		it.ttl, it.until = max(0, ttl), now.Add(ttl)
		s.items[key] = it
	}
	return there
}

// remove deletes a key. It returns false if there is no such key. s.mu is held.
func (s *Storage) remove(key string) bool {
	it, there := s.items[key]
	if !there {
		return false
	}
	delete(s.items, key)
	s.texts -= len(key) + len(it.value)
	if strings.HasPrefix(key, s.prefix) {
		s.drop(key)
		s.notify()
	}
	return true
}

// live returns an item that has not expired; s.mu is held.
func (s *Storage) live(key string, now time.Time) (item, bool) {
	it, there := s.items[key]
	if there && !it.until.IsZero() && now.After(it.until) {
		s.remove(key)
		return item{}, false
	}
	return it, there
}

// notify signals that the workers have changed.
func (s *Storage) notify() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}
