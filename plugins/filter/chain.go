package filter

import (
	"context"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Limits are the limits of one stream.
type Limits struct {
	// MaxBody is the number of bytes of a body that a filter may hold, in
	// either direction; 0: 64 MiB. A larger request gets 413, a larger answer
	// becomes 500.
	MaxBody int64
	// ReadTimeout is the time in which the client must send its body while a
	// filter holds the request; 0: no limit.
	ReadTimeout time.Duration
	// Memory counts the bytes of bodies that filters hold; nil: no count. A
	// stream whose bytes Memory rejects gets 503.
	Memory Memory
}

// Memory counts bytes. Its methods are safe for concurrent use.
type Memory interface {
	// Take counts n bytes. It returns false when there is no room for them.
	Take(n int64) bool
	// Release subtracts n bytes.
	Release(n int64)
}

func (l Limits) bodyLimit() int64 {
	if l.MaxBody <= 0 {
		return 64 << 20
	}
	return l.MaxBody
}

// Chain passes requests and their answers through filters. The zero value has
// no filters. It is safe for concurrent use.
type Chain struct {
	// Active is whether the chain has filters. Without filters a caller need not call the handler of
	// Wrap. Only Set changes it.
	Active atomic.Bool

	now atomic.Pointer[links]
}

// links is the content of a chain. It is never changed, only replaced.
type links struct {
	plugins []*Plugin
	limits  Limits
}

// Set replaces the filters. The order is that of the request. Running streams
// keep their filters. The caller may then close the filters that are no longer
// in the list.
func (c *Chain) Set(plugins []*Plugin, limits Limits) {
	c.now.Store(&links{slices.Clone(plugins), limits})
	c.Active.Store(len(plugins) > 0)
}

// Plugins returns the filters in the order of the request.
func (c *Chain) Plugins() []*Plugin {
	if now := c.now.Load(); now != nil {
		return slices.Clone(now.plugins)
	}
	return nil
}

// Wrap returns a handler that passes requests through the filters to next, and
// next's answers back through them in reverse order. Without filters it calls
// next directly.
func (c *Chain) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		now := c.now.Load()
		if now == nil || len(now.plugins) == 0 {
			next.ServeHTTP(w, r)
			return
		}
		plugins, limits, ok := c.acquire()
		switch {
		case !ok:
			newFailure(openai.CodeDraining, "the proxy is shutting down").write(w)
		case len(plugins) == 0:
			next.ServeHTTP(w, r)
		default:
			serve(plugins, limits, w, r, next)
		}
	})
}

// acquire registers a stream with the plugins that process streams. It returns
// false when one of them is closed and has no successor, because the proxy is
// shutting down.
func (c *Chain) acquire() ([]*Plugin, Limits, bool) {
	for {
		now := c.now.Load()
		plugins := make([]*Plugin, 0, len(now.plugins))
		closed := false
		for _, p := range now.plugins {
			if !p.forStreams() {
				continue
			}
			if closed = !p.acquire(); closed {
				break
			}
			plugins = append(plugins, p)
		}
		if !closed {
			return plugins, now.limits, true
		}
		for _, p := range plugins {
			p.release()
		}
		if c.now.Load() == now {
			return nil, Limits{}, false
		}
	}
}

// serve runs one stream.
func serve(plugins []*Plugin, limits Limits, w http.ResponseWriter, r *http.Request, next http.Handler) {
	s := open(plugins, limits, w, r)
	defer s.end()
	header := make(http.Header)
	passed := s.passHeaders()
	if passed {
		s.serveNext(next, header)
	}
	s.finish(header, passed)
	if s.close() {
		// net/http would read the rest of the client's body before it closes the connection.
		s.breakRead()
		panic(http.ErrAbortHandler) // net/http closes the connection in the middle of the answer
	}
}

// serveNext calls the next handler. It ignores a panic of the handler when the
// stream no longer needs its work.
func (s *stream) serveNext(next http.Handler, header http.Header) {
	ctx, cancel := context.WithCancelCause(s.ctx)
	defer cancel(nil)
	s.mu.Lock()
	s.cancelNext, s.serving = cancel, true
	s.mu.Unlock()
	r := s.nextRequest(ctx)
	if r == nil {
		return
	}
	defer func() {
		if s.isOver() {
			if v := recover(); v != nil && v != http.ErrAbortHandler {
				panic(v)
			}
		}
	}()
	s.room.writer = answerWriter{s, header}
	next.ServeHTTP(&s.room.writer, r)
}
