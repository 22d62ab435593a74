package filter

import (
	"errors"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// destination is the answer of the next handler, and the part of it that has
// reached the client.
type destination struct {
	wrote    bool  // the next handler has written its head
	declared int64 // its Content-Length, -1: none
	came     int64 // bytes of its body
	closed   bool  // its body has ended
	noBody   bool  // the answer has no body
	err      error // of the last write to the client
}

// answerWriter is the http.ResponseWriter of the next handler. All written data
// goes through the filters at once. A write waits while a filter holds the
// whole answer.
type answerWriter struct {
	s      *stream
	header http.Header
}

// Header implements http.ResponseWriter.
func (w *answerWriter) Header() http.Header { return w.header }

// Unwrap is for http.ResponseController: deadlines and full duplex are those of
// the connection.
func (w *answerWriter) Unwrap() http.ResponseWriter { return w.s.w }

// WriteHeader implements http.ResponseWriter. The head enters the filters with
// the first byte or flush, or at the end, when it is known whether a body
// follows. Informational heads bypass the filters.
func (w *answerWriter) WriteHeader(status int) {
	s := w.s
	s.out.Lock()
	defer s.out.Unlock()
	if status >= 100 && status < 200 && status != http.StatusSwitchingProtocols {
		if !s.dst.wrote && !s.isOver() {
			maps.Copy(s.w.Header(), w.header)
			s.w.WriteHeader(status)
			for name := range w.header {
				delete(s.w.Header(), name)
			}
		}
		return
	}
	s.head(status, w.header)
}

// head receives the head of the next handler's answer. The caller holds s.out.
func (s *stream) head(status int, header http.Header) {
	d := &s.dst
	if d.wrote {
		return
	}
	d.wrote = true
	if length := header.Get("Content-Length"); length != "" { // ParseInt of an empty text would allocate an error
		if n, err := strconv.ParseInt(length, 10, 64); err == nil && n >= 0 {
			d.declared = n
		}
	}
	d.noBody = !bodyAllowed(status) || s.r.Method == http.MethodHead
	lines := make(http.Header, len(header))
	for name, values := range header {
		if !strings.HasPrefix(name, http.TrailerPrefix) && len(values) > 0 {
			lines[name] = values
		}
	}
	m := &s.room.response
	m.room[0] = host.Pair{Key: ":status", Value: statusText(status)}
	m.pseudo, m.lines = m.room[:1], lines
	s.resp.headers = m
	s.responseHeaders.Store(s.resp.headers)
}

// statusText returns a status in digits, for the usual one without an allocation.
func statusText(status int) string {
	if status == http.StatusOK {
		return "200"
	}
	return strconv.Itoa(status)
}

// Write implements io.Writer.
func (w *answerWriter) Write(p []byte) (int, error) {
	s := w.s
	s.out.Lock()
	defer s.out.Unlock()
	s.head(http.StatusOK, w.header)
	if err := s.beginAnswer(false); err != nil {
		return 0, err
	}
	d := &s.dst
	switch {
	case d.noBody && s.r.Method == http.MethodHead:
		return len(p), nil
	case d.noBody:
		return 0, http.ErrBodyNotAllowed
	case d.closed && len(p) > 0:
		return 0, http.ErrContentLength
	}
	for s.resp.closed(0) {
		if !s.wait(&s.resp, &s.out, s.over) {
			return 0, s.writeError()
		}
		if s.settle(); s.isOver() {
			return 0, s.writeError()
		}
	}
	d.came += int64(len(p))
	d.closed = d.declared >= 0 && d.came >= d.declared
	if len(p) > 0 || d.closed {
		s.resp.dataFrom(0, p, d.closed)
		s.resp.count(0)
	}
	if s.settle(); s.isOver() {
		return 0, s.writeError()
	}
	return len(p), d.err
}

// writeError returns the reason why the next handler should stop writing.
func (s *stream) writeError() error {
	switch {
	case s.ctx.Err() != nil:
		return s.ctx.Err()
	case s.isCut():
		return errCut
	}
	return errAnswered
}

// beginAnswer sends the head through the filters, if that has not been done. end: no body
// follows. The caller holds s.out.
func (s *stream) beginAnswer(end bool) error {
	if s.settle(); s.isOver() {
		return s.writeError()
	}
	if s.resp.begun {
		return nil
	}
	s.headSet.Store(int64(time.Since(s.start)))
	d := &s.dst
	if end || d.noBody || d.declared == 0 {
		end, d.closed = true, true
	}
	s.resp.begin(end)
	if s.settle(); s.isOver() {
		return s.writeError()
	}
	return nil
}

// Flush implements http.Flusher.
func (w *answerWriter) Flush() { _ = w.FlushError() }

// FlushError is for http.ResponseController. It does not flush data that a
// filter holds; that data is flushed when the filter releases it.
func (w *answerWriter) FlushError() error {
	s := w.s
	s.out.Lock()
	defer s.out.Unlock()
	s.head(http.StatusOK, w.header)
	if err := s.beginAnswer(false); err != nil {
		return err
	}
	if s.resp.headed {
		s.commit(-1)
	}
	if s.settle(); s.isOver() {
		return s.writeError()
	}
	return s.flush()
}

// flush sends on all data that has passed the filters. The caller holds s.out.
func (s *stream) flush() error {
	s.mu.Lock()
	out := s.headOut && !s.ended
	s.mu.Unlock()
	if !out {
		return nil
	}
	if err := s.rc().Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
}

// finish completes the answer after the next handler has returned, or was not called. It
// waits as long as a filter holds data back. If the answer cannot be completed because
// the client has hung up, finish aborts the connection, so that the answer does not look
// complete.
func (s *stream) finish(header http.Header, called bool) {
	s.mu.Lock()
	s.serving = false
	s.mu.Unlock()
	s.out.Lock()
	defer s.out.Unlock()
	s.settle()
	if !s.isOver() && called && (s.ctx.Err() == nil || !s.resp.begun) {
		s.closeAnswer(header)
		s.settle()
	}
	for !s.resp.ended && !s.isCut() {
		if !s.wait(&s.resp, &s.out, nil) {
			s.cut()
			return
		}
		s.settle()
	}
}

// closeAnswer sends the end of the next handler's answer through the filters.
func (s *stream) closeAnswer(header http.Header) {
	s.head(http.StatusOK, header)
	trailer := nextTrailer(header)
	if s.beginAnswer(trailer == nil) != nil || s.dst.closed {
		return
	}
	s.dst.closed = true
	if trailer == nil {
		s.resp.dataFrom(0, nil, true)
		return
	}
	s.responseTrailers.Store(trailer)
	s.resp.trailers = trailer
	s.resp.trailersFrom(0)
}

// nextTrailer returns the trailer of the next handler, given in either of
// net/http's two ways; nil if there is none.
func nextTrailer(header http.Header) *headerMap {
	var lines http.Header // nil, because most answers have no trailer
	add := func(name string, values []string) {
		if lines == nil {
			lines = make(http.Header)
		}
		lines[name] = values
	}
	for _, announced := range header["Trailer"] {
		for name := range strings.SplitSeq(announced, ",") {
			name = http.CanonicalHeaderKey(strings.TrimSpace(name))
			if values := header[name]; len(values) > 0 {
				add(name, values)
			}
		}
	}
	for name, values := range header {
		if name, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			add(http.CanonicalHeaderKey(name), values)
		}
	}
	if len(lines) == 0 {
		return nil
	}
	return &headerMap{lines: lines, plain: true}
}

// answerSink is the client's side of the answer.
type answerSink struct{ s *stream }

// headers implements sink.
func (k answerSink) headers(end bool) {
	if end {
		k.s.commit(0)
	}
}

// data implements sink.
func (k answerSink) data(b []byte, end bool) {
	s := k.s
	known := int64(-1)
	if end {
		known = int64(len(b))
	}
	if !s.commit(known) || len(b) == 0 {
		return
	}
	n, err := s.w.Write(b)
	s.responseBytes.Add(int64(n))
	if err != nil && !errors.Is(err, http.ErrBodyNotAllowed) {
		s.dst.err = err
	}
}

// trailers implements sink.
func (k answerSink) trailers(t *headerMap) {
	s := k.s
	if !s.commit(-1) {
		return
	}
	s.responseTrailers.Store(t)
	header := s.w.Header()
	for name, values := range t.take() {
		header[http.TrailerPrefix+name] = values
	}
}

// commit sends the head to the client, once, and reports whether it was sent.
// known is the length of the body if all of it is available, else -1. The
// caller holds s.out.
func (s *stream) commit(known int64) bool {
	m := s.resp.headers
	s.mu.Lock()
	if s.headOut || s.pending != nil || s.cutting {
		out := s.headOut
		s.mu.Unlock()
		return out
	}
	s.mu.Unlock()
	status, err := strconv.Atoi(m.get(":status"))
	if err != nil || status < 200 || status > 999 {
		// Envoy gives this answer to a filter that removed a required header of
		// an answer.
		s.fail(failureOf(&openai.Error{Status: http.StatusBadGateway, Code: openai.CodePluginFailed, Message: "a plugin made an invalid answer"}))
		return false
	}
	s.mu.Lock()
	if s.pending != nil || s.cutting {
		s.mu.Unlock()
		return false
	}
	s.headOut = true
	s.mu.Unlock()
	s.fixLength(known)
	s.status.Store(int32(status))
	header := s.w.Header()
	for name, values := range m.take() {
		if name != "Transfer-Encoding" { // net/http writes this one
			header[name] = values
		}
	}
	if s.mustClose() {
		header["Connection"] = []string{"close"}
	}
	s.w.WriteHeader(status)
	return true
}

// mustClose reports whether the client's connection cannot serve another request. When
// a deadline ends a read of an HTTP/1.1 connection, net/http cancels the contexts of
// this request and of all later requests of the connection. A read that is still
// running also ends in this way, because the stream does not wait for the result.
func (s *stream) mustClose() bool {
	return s.r.ProtoMajor == 1 && (s.src.broken.Load() || s.src.reading.Load())
}

// fixLength corrects the Content-Length where a filter can change the body.
func (s *stream) fixLength(known int64) {
	m := s.resp.headers
	if m.get("Content-Length") == "" || s.dst.noBody {
		return
	}
	for i := range s.resp.hops {
		if !s.resp.hops[i].f.p.has[host.OnResponseBody] {
			continue
		}
		if known < 0 {
			m.Remove("Content-Length")
		} else {
			m.Replace("Content-Length", strconv.FormatInt(known, 10))
		}
		return
	}
}
