package sidecar

import (
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Shown is the writer of an answer that also shows the answer to the picker of the request, which
// may change header lines. The goroutine of the request uses it. Shown is a plain writer until
// Show, and after the stream of the picker has ended.
type Shown struct {
	http.ResponseWriter
	stream *extproc.Stream  // nil: no picker sees the answer
	served *engine.Instance // has answered; nil: none
	begun  bool
	late   bool
	lost   bool
}

// Show makes the picker of that stream see the answer. Nothing of the answer may have been
// written. Close ends the stream.
func (s *Shown) Show(stream *extproc.Stream) { s.stream = stream }

// Served notes the engine to which the request is sent.
func (s *Shown) Served(i *engine.Instance) { s.served = i }

// Late reports whether the head of the answer went to the client without the picker's changes,
// because the picker was late.
func (s *Shown) Late() bool { return s.late }

// Lost reports whether the picker has read too slowly to see the whole answer.
func (s *Shown) Lost() bool { return s.lost }

// Unwrap is for http.ResponseController.
func (s *Shown) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// WriteHeader implements http.ResponseWriter. It waits for the picker's changes of the header, but
// not for a picker that is late with other answers.
func (s *Shown) WriteHeader(status int) {
	if s.stream != nil && !s.begun && status >= 200 {
		s.begun = true
		h := s.Header()
		var list []upstream.Field
		for name, values := range h {
			for _, v := range values {
				list = append(list, upstream.Field{Name: name, Value: v})
			}
		}
		served := ""
		if s.served != nil {
			served = endpointOf(s.served)
		}
		var m extproc.HeaderMutation
		m, s.late = s.stream.Head(status, list, served)
		MutateHeader(h, &m)
	}
	s.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (s *Shown) Write(p []byte) (int, error) {
	if s.stream != nil && !s.begun {
		s.WriteHeader(http.StatusOK)
	}
	n, err := s.ResponseWriter.Write(p)
	if s.stream != nil && s.stream.Body(p[:n]) {
		s.lost = true
	}
	return n, err
}

// Close ends the stream. whole reports whether the client has the whole answer, or an error that
// ends it.
func (s *Shown) Close(whole bool) {
	if s.stream == nil {
		return
	}
	if whole {
		s.stream.End()
	} else {
		s.stream.Abort()
	}
	*s = Shown{}
}

// MutateHeader applies the changes of a picker to the header of the client's answer. Lines of the
// connection and lines that only the proxy writes stay as they are.
func MutateHeader(h http.Header, m *extproc.HeaderMutation) {
	change(m, func(name string) bool {
		return name == "Content-Type" || !downstream.Proxied(name) && !downstream.OwnLine(name)
	}, lines{
		has:    func(name string) bool { return len(h[name]) > 0 },
		remove: func(name string) { delete(h, name) },
		add:    func(name, value string) { h[name] = append(h[name], value) },
	})
}
