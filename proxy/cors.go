package proxy

import (
	"net/http"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// allowedOrigins are the origins whose web pages may use the public API (server.cors_origins).
type allowedOrigins []string

// allow returns the value of Access-Control-Allow-Origin for a page of an origin; "" if the
// origin is not allowed.
func (o allowedOrigins) allow(origin string) string {
	switch {
	case slices.Contains(o, "*"):
		return "*"
	case slices.Contains(o, origin):
		return origin
	}
	return ""
}

// serve serves a request of a web page. It answers a preflight request itself; next answers
// all other requests.
func (o allowedOrigins) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
		o.servePreflight(w, r)
		return
	}
	page := newCORSWriter(w, o.allow(r.Header.Get("Origin")))
	next.ServeHTTP(page, r)
	page.begin()
}

var errOrigin = openai.NewFieldError(openai.CodeOriginNotAllowed, "Origin", "server.cors_origins does not list the origin of the web page")

// servePreflight answers a preflight request. No filter sees the request and it needs no key:
// a browser sends preflight requests without the header lines of the page.
func (o allowedOrigins) servePreflight(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("X-Request-Id", downstream.RequestID(r))
	h.Set("Vary", "Origin, Access-Control-Request-Headers")
	allow := o.allow(r.Header.Get("Origin"))
	if allow == "" {
		downstream.Error(w, errOrigin)
		return
	}
	h.Set("Access-Control-Allow-Origin", allow)
	h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, DELETE")
	if names := r.Header.Values("Access-Control-Request-Headers"); len(names) > 0 {
		h.Set("Access-Control-Allow-Headers", strings.Join(names, ", "))
	}
	h.Set("Access-Control-Max-Age", "600") // seconds
	w.WriteHeader(http.StatusNoContent)
}

// corsWriter adds to the answer to a web page the header lines with which the browser shows
// the answer to the page. It drops those of an engine or of a filter: the configuration of
// the proxy alone decides.
type corsWriter struct {
	http.ResponseWriter
	rc    *http.ResponseController
	allow string // value of Access-Control-Allow-Origin; "": the origin is not allowed
	begun bool
}

func newCORSWriter(w http.ResponseWriter, allow string) *corsWriter {
	return &corsWriter{ResponseWriter: w, rc: http.NewResponseController(w), allow: allow}
}

// WriteHeader implements http.ResponseWriter.
func (w *corsWriter) WriteHeader(status int) {
	if !w.begun {
		w.begun = status >= 200
		w.mark()
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *corsWriter) mark() {
	h := w.Header()
	for name := range h {
		if strings.HasPrefix(name, "Access-Control-") {
			delete(h, name)
		}
	}
	if w.allow != "" {
		h.Set("Access-Control-Allow-Origin", w.allow)
		h.Set("Access-Control-Expose-Headers", "*")
	}
	if w.allow != "*" {
		h.Add("Vary", "Origin")
	}
}

// Write implements http.ResponseWriter.
func (w *corsWriter) Write(p []byte) (int, error) {
	w.begin()
	return w.ResponseWriter.Write(p)
}

// FlushError is the method of http.ResponseController.
func (w *corsWriter) FlushError() error {
	w.begin()
	return w.rc.Flush()
}

// begin sends the head of an answer whose status was not set.
func (w *corsWriter) begin() {
	if !w.begun {
		w.WriteHeader(http.StatusOK)
	}
}

// Unwrap is for http.ResponseController.
func (w *corsWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
