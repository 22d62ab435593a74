package filter

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// Causes with which the next handler's context ends.
var (
	errAnswered = errors.New("a filter answered the request")
	errCut      = errors.New("a filter failed or closed the stream")
)

// stream is one request with its answer on their way through the chain. The
// handler's goroutine owns it from open to end. Locks are taken in the order in,
// out, a VM's, mu.
type stream struct {
	limits  Limits
	w       http.ResponseWriter
	r       *http.Request
	ctx     context.Context // of the client's request
	info    *abi.StreamInfo
	start   time.Time
	filters []filter // in the order of the request
	state   state    // properties that guests made

	in  sync.Mutex // what follows is guarded by it
	req flow
	src source

	out  sync.Mutex // what follows is guarded by it
	resp flow
	dst  destination

	requestHeaders                     *headerMap
	requestTrailers                    atomic.Pointer[headerMap]
	responseHeaders, responseTrailers  atomic.Pointer[headerMap]
	requestBytes, responseBytes        atomic.Int64
	status                             atomic.Int32 // of the answer, 0: none yet
	details                            atomic.Pointer[string]
	requestDone, responseDone, headSet atomic.Int64 // when, in nanoseconds since start; 0: not yet

	mu         sync.Mutex
	pending    *reply                  // to be sent; guarded by mu
	answered   bool                    // a reply was accepted; guarded by mu
	cutting    bool                    // the client's connection must be cut; guarded by mu
	headOut    bool                    // the client has seen a head; guarded by mu
	serving    bool                    // the next handler runs; guarded by mu
	ended      bool                    // guarded by mu
	cancelNext context.CancelCauseFunc // guarded by mu
	over       chan struct{}           // closed when there is nothing to wait for any more
	stopping   bool                    // over is closed; guarded by mu
	workers    sync.WaitGroup          // goroutines that poke started

	// room has what every stream needs once, so that one allocation makes it.
	room struct {
		info              abi.StreamInfo // where the context has none
		request, response headerMap
		writer            answerWriter
	}
}

// rc controls the client's connection.
func (s *stream) rc() *http.ResponseController { return http.NewResponseController(s.w) }

// open begins a stream through plugins, all of which are acquired.
func open(plugins []*Plugin, limits Limits, w http.ResponseWriter, r *http.Request) *stream {
	s := &stream{
		limits: limits, w: w, r: r, ctx: r.Context(), start: time.Now(),
		over: make(chan struct{}), filters: make([]filter, len(plugins)),
	}
	if s.info = abi.StreamInfoFrom(s.ctx); s.info == nil {
		s.info = &s.room.info
	}
	hops := make([]hop, 2*len(plugins))
	for i, p := range plugins {
		f := &s.filters[i]
		f.s, f.p = s, p
		hops[i].f = f
		hops[len(hops)-1-i].f = f
	}
	s.requestHeaders = &s.room.request
	s.requestHeaders.setRequest(r)
	s.req = flow{s: s, d: request, hops: hops[:len(plugins)], sink: requestSink{s}, headers: s.requestHeaders, signal: make(chan struct{}, 1), limit: limits.bodyLimit()}
	s.src.body = r.Body
	s.resp = flow{s: s, d: response, hops: hops[len(plugins):], sink: answerSink{s}, signal: make(chan struct{}, 1), limit: limits.bodyLimit()}
	s.dst.declared = -1
	return s
}

// end is the only exit of a stream, whatever happened in it: nothing of it runs
// any more when it returns, and the guests take leave of it in the background.
func (s *stream) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.stop(context.Canceled)
	s.workers.Wait()
	s.closeSource()
	s.req.release()
	s.resp.release()
	s.responseDone.CompareAndSwap(0, int64(time.Since(s.start)))
	for i := range s.filters {
		s.filters[i].end()
	}
}

// interrupted reports whether the flows have to stop where they are, for a reply
// or because the stream is cut.
func (s *stream) interrupted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending != nil || s.cutting
}

func (s *stream) isCut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cutting
}

// isOver reports whether the next handler's work is not wanted any more.
func (s *stream) isOver() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopping || s.pending != nil || s.cutting
}

// answer accepts a guest's local response, which make makes; false: it is too
// late, or not the first one.
func (s *stream) answer(make func() *reply) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.answered || s.headOut || s.ended || s.cutting {
		return false
	}
	s.answered, s.pending = true, make()
	return true
}

// fail ends the stream with an error, visibly whatever the client has seen.
func (s *stream) fail(r *reply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failNow(r)
}

// failNow is fail for who holds s.mu.
func (s *stream) failNow(r *reply) {
	switch {
	case s.ended:
	case s.headOut:
		s.cutting = true
	default:
		s.answered, s.pending = true, r
	}
}

// cut ends the stream without an answer.
func (s *stream) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cutting = !s.ended
}

// lost takes a filter out of the stream, which goes on without it or ends. Whoever
// meets the loss first says so: the filter's own call or its VM's end.
func (s *stream) lost(f *filter, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.dead.Swap(true) || f.p.spec.FailOpen {
		return
	}
	s.failNow(pluginFailure(f.p.spec.Name, err))
}

// tooLarge ends a stream of which a filter wanted to see more at once than may
// be held: 413 for a request, 500 for an answer.
func (s *stream) tooLarge(d direction) {
	if d == request {
		s.fail(newFailure(http.StatusRequestEntityTooLarge, "invalid_request_error", "body_too_large", "the request body is larger than a plugin may hold"))
	} else {
		s.fail(newFailure(http.StatusInternalServerError, "server_error", "answer_too_large", "the answer is larger than a plugin may hold"))
	}
}

// poke makes the stream look at what a guest asked for from elsewhere. If the
// next handler runs, nobody may be waiting: then a goroutine sees to it, which
// end waits for.
func (s *stream) poke() {
	s.req.poke()
	s.resp.poke()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.serving || s.ended {
		return
	}
	s.workers.Go(func() {
		s.out.Lock()
		defer s.out.Unlock()
		s.settle()
		_ = s.flush() // the next write meets the same error
	})
}

// settle carries out what is due: replies first, then what goes on. s.out is
// held.
func (s *stream) settle() {
	for {
		s.mu.Lock()
		r, cutting := s.pending, s.cutting
		s.pending = nil
		s.mu.Unlock()
		switch {
		case cutting:
			s.stop(errCut)
			return
		case r != nil:
			s.reply(r)
			s.stop(errAnswered)
			_ = s.flush() // the client may be gone
		case !s.resp.resumeAll():
			s.passed(response)
			return
		}
	}
}

// passed gives back what guests have added to the bodies of a direction, if none
// of that is held any more. The direction's lock is held.
func (s *stream) passed(d direction) {
	hops := s.resp.hops
	if d == request {
		hops = s.req.hops
	}
	for i := range hops {
		if hops[i].held != nil {
			return
		}
	}
	for i := range s.filters {
		f := &s.filters[i]
		if n := f.held[d].Load(); n != 0 {
			f.letGo(d, n)
		}
	}
}

// respond is settle for one who is not in the response.
func (s *stream) respond() {
	s.out.Lock()
	defer s.out.Unlock()
	s.settle()
}

// stop ends the next handler's work: its context, and what it waits for here.
func (s *stream) stop(cause error) {
	s.mu.Lock()
	first := !s.stopping
	s.stopping = true
	cancel := s.cancelNext
	s.mu.Unlock()
	if !first {
		return
	}
	close(s.over)
	if cancel != nil {
		cancel(cause)
	}
	if s.src.reading.Load() || cause == errAnswered && s.src.begun.Load() {
		s.breakRead()
	}
}

// wait waits until a flow may go on; false: over is closed, or the client is
// gone. The flow's lock is not held meanwhile.
func (s *stream) wait(w *flow, lock *sync.Mutex, over <-chan struct{}) bool {
	lock.Unlock()
	defer lock.Lock()
	select {
	case <-w.signal:
		return true
	case <-over:
	case <-s.ctx.Done():
	}
	return false
}

// finalMap returns a map for the callbacks after the end of the stream.
func (s *stream) finalMap(kind host.MapKind) *headerMap {
	switch kind {
	case host.HTTPRequestHeaders:
		return s.requestHeaders
	case host.HTTPRequestTrailers:
		return s.requestTrailers.Load()
	case host.HTTPResponseHeaders:
		return s.responseHeaders.Load()
	case host.HTTPResponseTrailers:
		return s.responseTrailers.Load()
	}
	return nil
}
