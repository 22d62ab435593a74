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
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// These errors are the causes with which the next handler's context ends.
var (
	errAnswered = errors.New("a filter answered the request")
	errCut      = errors.New("a filter failed or closed the stream")
)

// stream is one request with its answer in the chain. The handler's goroutine
// owns it from open to end. Locks are taken in the order in, out, a VM's, mu.
type stream struct {
	limits  Limits
	w       http.ResponseWriter
	r       *http.Request
	ctx     context.Context // of the client's request
	info    *abi.StreamInfo
	start   time.Time
	filters []filter // in the order of the request
	state   state    // properties that guests made

	in  sync.Mutex // guards the following fields
	req flow
	src source

	out  sync.Mutex // guards the following fields
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
	pending    *reply                  // reply to send; guarded by mu
	answered   bool                    // a reply was accepted; guarded by mu
	cutting    bool                    // the client's connection must be cut; guarded by mu
	headOut    bool                    // the client has received a head; guarded by mu
	serving    bool                    // the next handler runs; guarded by mu
	ended      bool                    // guarded by mu
	cancelNext context.CancelCauseFunc // guarded by mu
	over       chan struct{}           // closed when waits must end
	stopping   bool                    // over is closed; guarded by mu
	workers    sync.WaitGroup          // goroutines that poke starts

	// room holds values that every stream needs, so that one allocation makes
	// them.
	room struct {
		info              abi.StreamInfo // used where the context has none
		request, response headerMap
		writer            answerWriter
	}
}

// rc controls the client's connection.
func (s *stream) rc() *http.ResponseController { return http.NewResponseController(s.w) }

// open begins a stream through plugins, which must all be acquired.
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

// end is the only exit of a stream. When it returns, no goroutine of the stream
// runs any more. The guests' last callbacks run in the background.
func (s *stream) end() {
	s.close()
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

// interrupted reports whether the flows have to stop, for a reply or because
// the stream is cut.
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

// isOver reports whether the next handler's work is no longer needed.
func (s *stream) isOver() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopping || s.pending != nil || s.cutting
}

// answer accepts a guest's local response, which make returns. After the client has
// received a head, no other answer is possible: the stream is cut, so that the client
// does not take the answer for a complete one. Envoy resets such a stream
// (source/common/http/filter_manager.cc, sendLocalReply). BadArgument: the stream has
// ended, or has had a local response.
func (s *stream) answer(make func() *reply) host.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.ended || s.cutting:
		return host.BadArgument
	case s.headOut:
		s.cutting = true
		return host.OK
	case s.answered:
		return host.BadArgument
	}
	s.answered, s.pending = true, make()
	return host.OK
}

// begun reports whether the client has received a head.
func (s *stream) begun() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.headOut
}

// close ends the stream for its guests: from now on no guest answers or cuts it. It
// reports whether the client's connection must be cut.
func (s *stream) close() (cut bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	return s.cutting
}

// fail ends the stream with an error: r, or a cut connection when the client
// has already received a head.
func (s *stream) fail(r *reply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failNow(r)
}

// failNow is fail for a caller that holds s.mu.
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
	s.cutting = s.cutting || !s.ended
}

// lost removes a filter from the stream, which continues without it or ends. It
// acts once: the filter's own call and the loss of its VM may both report the
// loss.
func (s *stream) lost(f *filter, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.dead.Swap(true) || f.p.spec.FailOpen {
		return
	}
	s.failNow(pluginFailure(f.p.spec.Name, err))
}

// tooLarge ends a stream that would hold more for a filter than the limit
// allows: with 413 for a request, 500 for an answer.
func (s *stream) tooLarge(d direction) {
	if d == request {
		s.fail(newFailure(openai.CodeBodyTooLarge, "the request body is larger than a plugin may hold"))
	} else {
		s.fail(newFailure(openai.CodeAnswerTooLarge, "the answer is larger than a plugin may hold"))
	}
}

// poke makes the stream act on a request that a guest made outside the stream's
// own calls. While the next handler runs, no goroutine of the stream may be
// waiting, so poke starts one; end waits for it.
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
		_ = s.flush() // the next write returns the same error
	})
}

// settle carries out pending replies first, then sends on the data that may
// continue. The caller holds s.out.
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
			s.stop(errAnswered) // first: the head of the reply says whether the connection closes
			s.reply(r)
			_ = s.flush() // an error means that the client has hung up
		case !s.resp.resumeAll():
			s.passed(response)
			return
		}
	}
}

// passed subtracts the bytes that guests have added to the bodies of a
// direction, if no hop holds any of them. The caller holds the direction's
// lock.
func (s *stream) passed(d direction) {
	var hops []hop // each direction's field is read only under its lock
	if d == request {
		hops = s.req.hops
	} else {
		hops = s.resp.hops
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

// respond is settle for a caller that does not hold s.out.
func (s *stream) respond() {
	s.out.Lock()
	defer s.out.Unlock()
	s.settle()
}

// stop ends the next handler's work: its context and its waits in this package.
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
	if s.src.reading.Load() || cause != context.Canceled && s.src.begun.Load() {
		s.breakRead()
	}
}

// wait waits until a flow may continue. It returns false when over is closed or the
// client has hung up. It releases the flow's lock while it waits.
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
