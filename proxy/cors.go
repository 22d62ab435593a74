package proxy

import (
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// allowedOrigins are the origins whose web pages may use the public API (server.cors_origins).
type allowedOrigins []string

// allow returns the value of Access-Control-Allow-Origin for the page that sent a request; "" if its
// origin is not allowed, or if the request does not name exactly one.
func (o allowedOrigins) allow(r *http.Request) string {
	lines := r.Header["Origin"]
	switch {
	case len(lines) != 1:
		return ""
	case slices.Contains(o, "*"):
		return "*"
	case slices.Contains(o, lines[0]):
		return lines[0]
	}
	return ""
}

// serve serves a request of a web page. It answers a preflight request itself, unless the
// configuration allows no origin; next answers all other requests. keyless: clients need no key, so
// that each page that a user of the network opens could use the engines.
func (o allowedOrigins) serve(w http.ResponseWriter, r *http.Request, keyless bool, next http.Handler) {
	if len(o) > 0 && r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
		o.servePreflight(w, r)
		return
	}
	page := newCORSWriter(w, o.allow(r))
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions
	if keyless && !reads && page.allow == "" && !ownPage(r) {
		page.Header().Set("X-Request-Id", downstream.RequestID(r))
		downstream.Error(page, errOrigin)
		return
	}
	next.ServeHTTP(page, r)
	page.begin()
}

// ownPage reports whether the page has the address to which its request goes, as a page of a
// server in front of the proxy has. The owner of a page can make any name of the public DNS lead to
// the proxy, so such a name counts only over TLS, where the certificate proves the name.
func ownPage(r *http.Request) bool {
	scheme, host, ok := strings.Cut(r.Header.Get("Origin"), "://")
	port := map[string]string{"http": ":80", "https": ":443"}[scheme]
	if len(r.Header["Origin"]) != 1 || !ok || port == "" || host == "" || !strings.EqualFold(strings.TrimSuffix(host, port), strings.TrimSuffix(r.Host, port)) {
		return false
	}
	name := (&url.URL{Host: host}).Hostname()
	return scheme == "https" || !strings.Contains(name, ".") || net.ParseIP(name) != nil
}

var errOrigin = openai.NewFieldError(openai.CodeOriginNotAllowed, "Origin", "server.cors_origins does not list the origin of the web page")

// servePreflight answers a preflight request. No filter sees the request and it needs no key:
// a browser sends preflight requests without the header lines of the page.
func (o allowedOrigins) servePreflight(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("X-Request-Id", downstream.RequestID(r))
	h.Set("Vary", "Origin, Access-Control-Request-Headers")
	allow := o.allow(r)
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
