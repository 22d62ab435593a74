package proxy

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// reply answers the client with err. Nothing has been sent before.
func (x *exchange) reply(err error) {
	var le *legError
	if errors.As(err, &le) && le.relay {
		x.replyEngineError(le)
		return
	}
	oe := publicError(err)
	x.rec.Status = oe.Status
	x.committed = true
	limitWrites(&x.rc, x.r, time.Duration(x.cfg.Server.WriteTimeout))
	writeErrorOf(x.w, x.req.API, oe)
}

// replyEngineError relays an engine's own 4xx as it wrote it.
func (x *exchange) replyEngineError(le *legError) {
	if le.ctype != "" {
		x.w.Header().Set("Content-Type", le.ctype)
	}
	if le.retryAfter != "" {
		x.w.Header().Set("Retry-After", le.retryAfter)
	}
	_ = x.writeWhole(le.status, le.body) // the client may be gone
}

// writeError answers with an OpenAI-shaped error.
func writeError(w http.ResponseWriter, e *openai.Error) { writeErrorOf(w, 0, e) }

// writeErrorOf answers with an error in the form of an API.
func writeErrorOf(w http.ResponseWriter, api openai.API, e *openai.Error) {
	h := w.Header()
	if e.Status == http.StatusServiceUnavailable || e.Status == http.StatusTooManyRequests {
		h.Set("Retry-After", "1")
	}
	if e.Status == http.StatusUnsupportedMediaType {
		h.Set("Accept-Encoding", acceptedCodings)
	}
	body := api.AppendError(nil, e)
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(e.Status)
	w.Write(body)
}

// commit sends the head of the answer. From here on nothing is retried.
func (x *exchange) commit(status int) {
	x.committed = true
	x.rec.Status = status
	if x.cfg.Server.ExposePlacement {
		x.rec.expose(x.w.Header())
	}
	x.w.WriteHeader(status)
}

// writeWhole answers with a body that is there in full.
func (x *exchange) writeWhole(status int, body []byte) error {
	x.w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	limitWrites(&x.rc, x.r, time.Duration(x.cfg.Server.WriteTimeout))
	x.commit(status)
	if _, err := x.w.Write(body); err != nil {
		return errClientWrite
	}
	return nil
}

func (x *exchange) flush() { x.rc.Flush() }

// copyHeader copies an engine's header lines to the client's answer, less those
// of the connection, those that the engine's Connection line names, and those that
// the proxy sets itself.
func copyHeader(dst http.Header, resp *upstream.Response) {
	var named map[string]bool
	for _, f := range resp.Header {
		if strings.EqualFold(f.Name, "Connection") {
			named = addNamed(named, f.Value)
		}
	}
	for _, f := range resp.Header {
		k := http.CanonicalHeaderKey(f.Name)
		name := lineName(k)
		if hopByHop(name) || named[name] || ownLine(name) || name == "X-Request-Id" || name == "Date" || name == "Alt-Svc" {
			continue
		}
		dst[k] = append(dst[k], f.Value)
	}
}

// replyHandoff answers with prefill's answer, which was the whole text.
func (a *attempt) replyHandoff() error {
	x := a.x
	x.firstByte(nil)
	if u, ok := openai.ParseUsage(a.answer.B); ok {
		x.usage = u
	}
	x.w.Header().Set("Content-Type", "application/json")
	if x.req.Stream {
		x.w.Header().Set("Content-Type", "text/event-stream")
	} else {
		a.tellTiming()
	}
	return x.writeWhole(http.StatusOK, a.handoff.Answer)
}
