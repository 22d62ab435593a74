package downstream

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Error answers with an error in OpenAI's form.
func Error(w http.ResponseWriter, e *openai.Error) { ErrorOf(w, 0, e) }

// ErrorOf answers with an error in the form of an API. It returns the number of bytes of the body that
// it has written.
func ErrorOf(w http.ResponseWriter, api openai.API, e *openai.Error) int {
	h := w.Header()
	if (e.Status == http.StatusServiceUnavailable || e.Status == http.StatusTooManyRequests) && h.Get("Retry-After") == "" {
		h.Set("Retry-After", "1")
	}
	if e.Status == http.StatusUnsupportedMediaType {
		h.Set("Accept-Encoding", AcceptedCodings)
	}
	body := api.AppendError(nil, e)
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(e.Status)
	n, _ := w.Write(body)
	return n
}

// JSON answers with v as JSON.
func JSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		Error(w, openai.NewError(openai.CodeInternal, "internal error"))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(append(body, '\n'))
}

// LimitWrites gives the client that long from now to receive the bytes that are written to it. It
// acts on streams of HTTP/2 and HTTP/3, whose flow control may block a write. The listener limits
// each write of a connection, and so all of HTTP/1.1: a deadline there would also hold for the next
// answers.
func LimitWrites(w http.ResponseWriter, r *http.Request, limit time.Duration) {
	if r.ProtoMajor >= 2 {
		http.NewResponseController(w).SetWriteDeadline(time.Now().Add(limit))
	}
}
