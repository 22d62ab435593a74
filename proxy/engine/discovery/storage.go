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
)

const (
	// sweepEvery is how often expired keys are looked for.
	sweepEvery = time.Second
	// maxKeys bounds the keys that are stored.
	maxKeys = 8192
	// storageTimeout bounds the reading of one request; workers give one 5 s in
	// all (HttpClusterStorageClient).
	storageTimeout = 5 * time.Second
	// storageIdle is how long a worker's connection may be idle: more than the
	// time between two heartbeats.
	storageIdle = time.Minute
)

// Storage is the store of TensorRT-LLM's disagg_cluster, kept in memory and
// served over HTTP: the five routes by which trtllm-serve workers register where
// their cluster_uri is an http address. It is a Source of the workers of one
// cluster. A proxy that was started anew knows nobody until the next heartbeats,
// which fail and are followed by registrations.
//
// Source: TensorRT-LLM serve/cluster_storage.py (HttpClusterStorageServer),
// serve/disagg_auto_scaling.py (the keys, the heartbeat).
type Storage struct {
	listener net.Listener
	token    string // "" asks for none
	prefix   string // of the workers' keys
	changed  chan struct{}

	mu    sync.Mutex
	items map[string]item // guarded by mu
	born  int64           // counts the keys that came; guarded by mu
	swept time.Time       // guarded by mu
	book                  // of the workers among the items; guarded by mu
}

// item is one key.
type item struct {
	value string
	until time.Time // zero: for ever
}

// ListenStorage opens the socket of the store at cfg.ClusterURI, which is an http
// address. With a token each request must bear it. It starts nothing; log may be
// nil.
func ListenStorage(cfg config.DiscoveryTRTLLM, token string, log *slog.Logger) (*Storage, error) {
	address, ok := strings.CutPrefix(cfg.ClusterURI, "http://")
	if !ok {
		return nil, fmt.Errorf("listen for workers: %q is not http://host:port", cfg.ClusterURI)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for workers: %w", err)
	}
	s := newStorage(cfg.ClusterName, token, log)
	s.listener = l
	return s, nil
}

func newStorage(cluster, token string, log *slog.Logger) *Storage {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Storage{
		token: token, prefix: workersPrefix(cluster), changed: make(chan struct{}, 1),
		items: map[string]item{}, swept: time.Now(), book: newBook("trtllm", log),
	}
	s.read, s.same = readWorker, func(e config.Engine) string { return e.URL }
	return s
}

// Addr is where workers register.
func (s *Storage) Addr() net.Addr { return s.listener.Addr() }

// Close closes a socket that Run was not called for.
func (s *Storage) Close() error { return s.listener.Close() }

// Run serves the store until ctx ends, and then closes the socket and every
// connection. It calls found, from its own goroutine, with all workers that are
// there as often as that changes.
func (s *Storage) Run(ctx context.Context, found func([]config.Engine)) {
	server := &http.Server{Handler: s.routes(), ReadTimeout: storageTimeout, IdleTimeout: storageIdle, MaxHeaderBytes: 16 << 10, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer server.Close()
	wg.Go(func() {
		if err := server.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("workers cannot register any more", "source", s.name, "error", err)
		}
	})
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.sweep(now)
		case <-s.changed:
			found(s.workers())
		}
	}
}

// workers lists the engines of the cluster.
func (s *Storage) workers() []config.Engine {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.engines()
}

// sweep drops what has expired. Time that the proxy itself was stopped for is
// not charged to the workers, whose heartbeats wait in its socket.
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

// set stores a value, for ttl if that is positive; false: the key is there and is
// to stay, or there are too many. peer is the address of who sets it.
func (s *Storage) set(key, value string, ttl time.Duration, overwrite bool, peer string) bool {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, there := s.live(key, now); there && !overwrite {
		return false
	} else if !there && len(s.items) >= maxKeys || len(key)+len(value) > maxRecord {
		return false
	}
	it := item{value: value}
	if ttl > 0 {
		it.until = now.Add(ttl)
	}
	s.items[key] = it
	if strings.HasPrefix(key, s.prefix) {
		s.born++
		s.note(key, reachable([]byte(value), peer), s.born)
		s.tell()
	}
	return true
}

// reachable is a worker's record with the worker's own address for a host of
// 0.0.0.0 or [::], which it was told to listen on and which is nobody's.
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

// expire gives a key ttl from now on; false: it is not there.
func (s *Storage) expire(key string, ttl time.Duration) bool {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	it, there := s.live(key, now)
	if there {
		it.until = now.Add(ttl)
		s.items[key] = it
	}
	return there
}

// remove takes a key out; false: it was not there. s.mu is held.
func (s *Storage) remove(key string) bool {
	if _, there := s.items[key]; !there {
		return false
	}
	delete(s.items, key)
	if strings.HasPrefix(key, s.prefix) {
		s.drop(key)
		s.tell()
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

// tell says that the workers have changed.
func (s *Storage) tell() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}
