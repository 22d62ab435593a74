package filter

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// chunkSize is the size in bytes of one read of a client's body, when the next
// handler does not bring its own buffer.
const chunkSize = 32 << 10

// source is the client's body, and the part of it that has passed the filters
// for the next handler.
type source struct {
	body    io.ReadCloser
	done    bool        // no more bytes can be read
	err     error       // of the last read, except io.EOF
	reading atomic.Bool // a read is running
	begun   atomic.Bool // the first read has started, and the last has not ended
	broken  atomic.Bool // a deadline has ended a read, or may have ended net/http's own read
	ahead   *readAhead  // reads while a filter holds the request; nil: no filter has, or the body is done
	buf     []byte      // of reads; at most one runs

	dst  []byte // buffer of the next handler
	n    int    // number of bytes in dst
	rest []byte // bytes that passed before the handler's first read

	next *http.Request // as the next handler sees it; nil before it runs
}

// readAhead is the reads of the client's body in a separate goroutine, while a filter holds the
// request. The reads are needed because only a read shows that the client has left. The
// goroutine is needed because the filter may continue before the read returns.
type readAhead struct {
	n     int
	err   error
	busy  bool          // a read is running, or its result waits; guarded by in of the stream
	again chan struct{} // starts a read; closed: the goroutine ends
	done  chan struct{} // a read has ended; closed: the goroutine has ended
}

// setRequest fills an empty map with the headers of a request as filters see them.
func (m *headerMap) setRequest(r *http.Request) {
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	path := r.RequestURI
	if path == "" {
		path = r.URL.RequestURI()
	}
	m.room = [...]host.Pair{{Key: ":authority", Value: r.Host}, {Key: ":method", Value: r.Method}, {Key: ":path", Value: path}, {Key: ":scheme", Value: scheme}}
	m.pseudo, m.lines, m.shared = m.room[:], r.Header, true
	if !validID(r.Header.Get("X-Request-Id")) {
		m.Replace("X-Request-Id", newID())
	}
}

// validID reports whether a client's request id is safe in log lines. The rule
// is that of the proxy, which replaces any other id.
func validID(id string) bool {
	for i := range len(id) {
		if id[i] <= ' ' || id[i] > '~' {
			return false
		}
	}
	return id != "" && len(id) <= 128
}

func newID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// passHeaders passes the request's headers through the filters. It returns false when no further
// handler gets the request. While the filters run, it reads as much of the body as filters may
// hold.
func (s *stream) passHeaders() bool {
	s.in.Lock()
	defer s.in.Unlock()
	empty := s.r.Body == nil || s.r.Body == http.NoBody
	s.src.done = empty
	s.req.begin(empty)
	limited := false
	for !s.req.headed && !s.interrupted() {
		if !limited {
			s.limitRead()
			limited = true
		}
		going := s.advance(nil)
		if !going {
			s.endRead()
		}
		if s.src.err != nil {
			s.fail(bodyFailure(s.src.err))
		}
		if !going {
			return false
		}
	}
	if limited {
		_ = s.rc().SetReadDeadline(time.Time{}) // from here on the deadline belongs to the next handler
		if s.isOver() && s.src.begun.Load() {
			s.breakRead() // repeat stop's read deadline, which the line above removed
		}
	}
	s.requestDone.Store(int64(time.Since(s.start)))
	return !s.interrupted()
}

// limitRead sets the configured deadline for the client's body.
func (s *stream) limitRead() {
	if t := s.limits.ReadTimeout; t > 0 && s.r.ContentLength != 0 {
		_ = s.rc().SetReadDeadline(time.Now().Add(t))
	}
}

// bodyFailure returns the answer to a body that did not arrive completely while
// a filter held the request.
func bodyFailure(err error) *reply {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return newFailure(openai.CodeBodyTimeout, "the request body did not come in time")
	}
	return newFailure(openai.CodeBodyIncomplete, "the request body could not be read")
}

// advance does one step. It sends on held data, or reads a chunk (into p if p is not
// empty), or waits for either. It returns false when the stream or the client's
// connection has ended. The caller holds s.in.
func (s *stream) advance(p []byte) bool {
	src := &s.src
	switch {
	case s.req.resumeAll():
		s.req.count(len(src.rest))
		return true
	case src.done, !src.busy() && s.req.closed(s.req.limit):
		return s.wait(&s.req, &s.in, s.over)
	case src.busy() || s.req.stopped():
		return s.advanceAhead()
	}
	if len(p) == 0 {
		p = src.buffer()
	}
	src.reading.Store(true)
	src.begun.Store(true)
	if s.isOver() {
		src.reading.Store(false)
		return false
	}
	n, err := src.read(p)
	s.arrived(p[:n], err)
	return true
}

// advanceAhead waits until a chunk arrives or a filter continues.
func (s *stream) advanceAhead() bool {
	src := &s.src
	if !src.busy() {
		src.reading.Store(true)
		src.begun.Store(true)
		if s.isOver() {
			src.reading.Store(false)
			return false
		}
		src.readAhead()
	}
	s.in.Unlock()
	arrived, waiting := false, true
	select {
	case <-src.ahead.done:
		arrived = true
	case <-s.req.signal:
	case <-s.over:
		waiting = false
	case <-s.ctx.Done():
		waiting = false
	}
	s.in.Lock()
	if arrived {
		a := src.ahead
		a.busy = false
		if s.arrived(src.buf[:a.n], a.err); src.done {
			src.endAhead()
		}
	}
	return waiting
}

// busy reports whether a read ahead is running, or its result waits.
func (src *source) busy() bool { return src.ahead != nil && src.ahead.busy }

// buffer returns the buffer of reads.
func (src *source) buffer() []byte {
	if src.buf == nil {
		src.buf = make([]byte, chunkSize)
	}
	return src.buf
}

// readAhead starts a read in the goroutine of the body. endAhead ends the goroutine.
func (src *source) readAhead() {
	if src.ahead == nil {
		src.ahead = &readAhead{again: make(chan struct{}, 1), done: make(chan struct{}, 1)}
		go src.ahead.run(src, src.buffer()) // endAhead waits for it
	}
	src.ahead.busy = true
	src.ahead.again <- struct{}{}
}

func (a *readAhead) run(src *source, buf []byte) {
	for range a.again {
		a.n, a.err = src.read(buf)
		a.done <- struct{}{}
	}
	close(a.done)
}

// endAhead waits for the running read and for the end of its goroutine, and frees the buffer.
func (src *source) endAhead() {
	close(src.ahead.again)
	for range src.ahead.done {
	}
	src.ahead, src.buf = nil, nil
}

func (src *source) read(p []byte) (int, error) {
	n, err := src.body.Read(p)
	if err != nil {
		src.begun.Store(false)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			src.broken.Store(true)
		}
	}
	src.reading.Store(false)
	return n, err
}

// breakRead ends reads of the client's body whose result is not needed. Without
// it, net/http would read the rest of a started body before it sends the head
// of an answer.
//
// A running read may reach the end of the body at the same time. net/http then already
// waits for the next request, and the deadline ends that wait.
func (s *stream) breakRead() {
	if s.src.reading.Load() {
		s.src.broken.Store(true)
	}
	if s.rc().SetReadDeadline(time.Unix(1, 0)) != nil {
		s.src.body.Close()
	}
}

// closeSource waits until no goroutine reads the client's body.
func (s *stream) closeSource() {
	s.in.Lock()
	defer s.in.Unlock()
	if s.src.ahead != nil {
		s.src.endAhead()
	}
}

// endRead ends the running read and keeps its error, so that the proxy can
// report a body that was too slow.
func (s *stream) endRead() {
	a := s.src.ahead
	if !s.src.busy() {
		return
	}
	s.breakRead()
	s.src.endAhead()
	if s.src.done = true; s.src.err == nil {
		s.src.err = a.err
	}
}

// arrived passes a chunk of the client's body through the filters.
func (s *stream) arrived(b []byte, err error) {
	s.requestBytes.Add(int64(len(b)))
	src := &s.src
	defer func() { s.req.count(len(src.rest)) }()
	if err != nil && err != io.EOF {
		src.done, src.err = true, err
		return
	}
	if err == nil {
		if len(b) > 0 {
			s.req.dataFrom(0, b, false)
		}
		return
	}
	src.done = true
	trailer := trailerOf(s.r.Trailer)
	if len(b) > 0 || trailer == nil {
		s.req.dataFrom(0, b, trailer == nil)
	}
	if trailer != nil && !s.interrupted() {
		s.requestTrailers.Store(trailer)
		s.req.trailers = trailer
		s.req.trailersFrom(0)
	}
}

// trailerOf returns the received trailer, nil if there is none.
func trailerOf(h http.Header) *headerMap {
	lines := make(http.Header)
	for name, values := range h {
		if len(values) > 0 {
			lines[name] = values
		}
	}
	if len(lines) == 0 {
		return nil
	}
	return &headerMap{lines: lines, plain: true}
}

// requestSink is the next handler's side of the request.
type requestSink struct{ s *stream }

// headers implements sink; passHeaders continues once the headers have arrived
// here.
func (requestSink) headers(bool) {}

// data implements sink. b may be the handler's own buffer.
func (k requestSink) data(b []byte, _ bool) {
	src := &k.s.src
	if len(src.rest) == 0 && src.n < len(src.dst) && len(b) > 0 {
		n := min(len(b), len(src.dst)-src.n)
		if &b[0] != &src.dst[src.n] {
			copy(src.dst[src.n:], b[:n])
		}
		src.n += n
		b = b[n:]
	}
	src.rest = append(src.rest, b...)
}

// trailers implements sink.
func (k requestSink) trailers(t *headerMap) {
	k.s.requestTrailers.Store(t)
	if next := k.s.src.next; next != nil {
		next.Trailer = t.take()
	}
}

// nextRequest returns the request as the next handler sees it. It returns nil
// when the filters have made it invalid.
func (s *stream) nextRequest(ctx context.Context) *http.Request {
	s.in.Lock()
	defer s.in.Unlock()
	m := s.requestHeaders
	method, path, authority := m.get(":method"), m.get(":path"), m.get(":authority")
	next := s.r.WithContext(abi.WithStreamInfo(ctx, s.info))
	if path != s.r.RequestURI || s.r.URL == nil {
		u, err := url.ParseRequestURI(path)
		if err != nil {
			path = ""
		}
		next.URL, next.RequestURI = u, path
	}
	if !validName(method) || path == "" {
		// Envoy gives this answer to a filter that removed a required header of
		// a request.
		s.fail(newFailure(openai.CodePluginFailed, "a plugin made an invalid request"))
		return nil
	}
	next.Method, next.Host = method, authority
	s.nextBody(next)
	next.Header = m.take()
	s.src.next = next
	if s.req.trailers != nil && s.req.ended {
		next.Trailer = s.req.trailers.take()
	}
	return next
}

// nextBody sets the body of the next handler: the client's own where no filter
// looks at it, else the filtered bytes, with their length if it is known.
func (s *stream) nextBody(next *http.Request) {
	src := &s.src
	m := s.requestHeaders
	switch {
	case !s.req.uses(host.OnRequestBody, host.OnRequestTrailers) && !src.busy() && !src.done && len(src.rest) == 0 && src.err == nil:
		return
	case s.req.ended && len(src.rest) == 0 && s.req.trailers == nil:
		next.Body, next.ContentLength = http.NoBody, 0
	case s.req.ended && s.req.trailers == nil:
		next.Body, next.ContentLength = requestBody{s}, int64(len(src.rest))
	default:
		next.Body, next.ContentLength = requestBody{s}, -1
	}
	if m.get("Content-Length") == "" {
		return
	}
	if next.ContentLength < 0 {
		m.Remove("Content-Length")
	} else if length := strconv.FormatInt(next.ContentLength, 10); m.get("Content-Length") != length {
		m.Replace("Content-Length", length)
	}
}

// requestBody is the body that the next handler reads. Each read passes a chunk
// through the filters.
type requestBody struct{ s *stream }

// Read implements io.Reader.
func (b requestBody) Read(p []byte) (int, error) {
	s := b.s
	s.in.Lock()
	defer s.in.Unlock()
	src := &s.src
	if len(p) == 0 {
		return 0, nil
	}
	for {
		if len(src.rest) == 0 {
			s.passed(request)
		}
		if len(src.rest) > 0 {
			n := copy(p, src.rest)
			if src.rest = src.rest[n:]; len(src.rest) == 0 {
				src.rest = nil
				s.req.count(0)
			}
			return n, nil
		}
		switch {
		case s.interrupted():
			s.respond()
			return 0, s.bodyError()
		case src.err != nil:
			return 0, src.err
		case s.req.ended:
			return 0, io.EOF
		}
		src.dst, src.n = p, 0
		going := s.advance(p)
		n := src.n
		src.dst, src.n = nil, 0
		switch {
		case s.interrupted():
			s.respond()
			return 0, s.bodyError()
		case n > 0:
			return n, nil
		case !going:
			return 0, s.bodyError()
		}
	}
}

// bodyError returns the reason why the body ends early.
func (s *stream) bodyError() error {
	if s.ctx.Err() != nil {
		return context.Cause(s.ctx)
	}
	if s.isCut() {
		return errCut
	}
	return errAnswered
}

// Close implements io.Closer.
func (b requestBody) Close() error { return b.s.src.body.Close() }
