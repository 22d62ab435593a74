package sidecar

import (
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/sidecar/extproc"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// ObservedWriter writes the answer to the client and copies it to the picker. The picker may change
// the header. The goroutine of the request uses it. It is a plain writer until Show, and after the
// stream of the picker has ended.
type ObservedWriter struct {
	http.ResponseWriter
	stream *extproc.Stream  // nil: no picker sees the answer
	served *engine.Instance // has answered; nil: none
	begun  bool
	late   bool
	lost   bool
}

// Show makes the picker of that stream see the answer, in the place of an earlier stream. Nothing of
// the answer may have been written. Close ends the stream.
func (w *ObservedWriter) Show(stream *extproc.Stream) {
	if w.stream != nil {
		w.stream.Abort()
	}
	w.stream = stream
}

// Served notes the engine to which the request is sent.
func (w *ObservedWriter) Served(i *engine.Instance) { w.served = i }

// Late reports whether the head of the answer went to the client without the picker's changes,
// because the picker was late.
func (w *ObservedWriter) Late() bool { return w.late }

// Lost reports whether the picker has read too slowly to see the whole answer.
func (w *ObservedWriter) Lost() bool { return w.lost }

// Unwrap is for http.ResponseController.
func (w *ObservedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader implements http.ResponseWriter. It waits for the picker's changes of the header, but
// not for a picker that is late with other answers.
func (w *ObservedWriter) WriteHeader(status int) {
	if w.stream != nil && !w.begun && status >= 200 {
		w.begun = true
		h := w.Header()
		var list []upstream.Field
		for name, values := range h {
			for _, v := range values {
				list = append(list, upstream.Field{Name: name, Value: v})
			}
		}
		served := ""
		if w.served != nil {
			served = endpointOf(w.served)
		}
		var m extproc.HeaderMutation
		m, w.late = w.stream.Head(status, list, served)
		MutateHeader(h, &m)
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *ObservedWriter) Write(p []byte) (int, error) {
	if w.stream != nil && !w.begun {
		w.WriteHeader(http.StatusOK)
	}
	n, err := w.ResponseWriter.Write(p)
	if w.stream != nil && w.stream.Body(p[:n]) {
		w.lost = true
	}
	return n, err
}

// Close ends the stream. whole reports whether the client has the whole answer, or an error that
// ends it.
func (w *ObservedWriter) Close(whole bool) {
	if w.stream == nil {
		return
	}
	if whole {
		w.stream.End()
	} else {
		w.stream.Abort()
	}
	*w = ObservedWriter{}
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
