package http1

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// answer is the http.ResponseWriter of one request. Between two flushes it holds at most one buffer,
// after a flush none.
type answer struct {
	conn *conn
	req  *http.Request
	body *body

	header    http.Header // made by Header
	status    int         // 0: WriteHeader has not been called
	length    int64       // of the body, as the handler has announced it; -1: not announced
	written   int64       // bytes of the body so far
	begun     bool        // the head is complete; before, out begins with room for the head's first lines
	chunked   bool
	closes    bool     // the connection closes behind the answer
	keeps     bool     // a client of HTTP/1.0 keeps the connection if it can see the end of the body
	dated     bool     // the handler has set Date
	typed     bool     // the handler has set Content-Type, or Content-Encoding
	trailer   []string // names of fields behind the body; nil: none
	continues bool     // the client may have waited for 100 Continue
	err       error    // of a write
	over      bool     // the handler has returned; guarded by conn.timing

	out    []byte // what has not been written yet; nil: no buffer
	at     int    // where it begins in out
	bodyAt int    // where the body begins in out, before begun

	asking sync.Mutex
	asked  bool // the client waits for 100 Continue; guarded by asking
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header {
	if a.header == nil {
		a.header = make(http.Header)
	}
	return a.header
}

// WriteHeader implements http.ResponseWriter. A status from 100 to 199, except 101, is written at
// once, and another one may follow.
func (a *answer) WriteHeader(status int) {
	switch {
	case status < 100 || status > 999:
		panic(fmt.Sprintf("http1: status %d", status))
	case a.status != 0 || a.conn.taken:
		return
	case status < 200 && status != http.StatusSwitchingProtocols:
		a.inform(status)
		return
	}
	if a.continues {
		a.stopAsking()
	}
	a.status = status
	a.out = a.appendHeader(newBuffer()[:headRoom])
	a.bodyAt = len(a.out)
}

// bodyAllowed reports whether an answer with the status has a body.
func (a *answer) bodyAllowed() bool {
	return a.status >= 200 && a.status != http.StatusNoContent && a.status != http.StatusNotModified
}

// Write implements http.ResponseWriter.
func (a *answer) Write(p []byte) (int, error) {
	switch {
	case a.conn.taken:
		return 0, http.ErrHijacked
	case a.status == 0:
		a.WriteHeader(http.StatusOK)
	}
	switch {
	case len(p) == 0:
		return 0, nil
	case !a.bodyAllowed():
		return 0, http.ErrBodyNotAllowed
	case a.length >= 0 && a.written+int64(len(p)) > a.length:
		a.written = a.length + 1 // the connection ends
		return 0, http.ErrContentLength
	}
	a.written += int64(len(p))
	if !a.begun {
		if len(a.out)+len(p) <= cap(a.out) {
			a.out = append(a.out, p...) // the answer may end here, and then goes out in one write, with its length
			return len(p), a.err
		}
		a.beginBody(false, p)
	}
	switch {
	case a.req.Method == http.MethodHead:
	case a.chunked:
		a.appendSize(len(p))
		a.append(p)
		a.append(crlf)
	default:
		a.append(p)
	}
	if a.err != nil {
		return 0, a.err
	}
	return len(p), nil
}

// WriteString implements io.StringWriter.
func (a *answer) WriteString(s string) (int, error) { return a.Write([]byte(s)) }

// Flush implements http.Flusher.
func (a *answer) Flush() { _ = a.FlushError() }

// FlushError is for http.ResponseController.
func (a *answer) FlushError() error {
	if a.conn.taken {
		return http.ErrHijacked
	}
	if a.status == 0 {
		a.WriteHeader(http.StatusOK)
	}
	if !a.begun {
		a.beginBody(false, nil)
	}
	a.flush()
	return a.err
}

// end completes the answer, and reports whether the connection may serve another request. It reads the
// rest of the body of the request before a head that is still to be written, so that the head says whether
// another request may follow.
func (a *answer) end() bool {
	if a.status == 0 {
		a.WriteHeader(http.StatusOK)
	}
	begun, stands := a.begun, false
	if !begun {
		stands = a.body.end(!a.closes)
		a.beginBody(true, nil)
	}
	if a.chunked {
		a.append(lastChunk)
		if a.trailer != nil || len(a.header) > 0 {
			a.append(a.appendTrailer(nil))
		}
		a.append(crlf)
	}
	a.flush()
	if begun {
		stands = a.body.end(a.err == nil && !a.closes)
	}
	if a.err != nil {
		return false
	}
	a.err = errOver // nothing that is written now may come into the next answer
	whole := a.length < 0 || a.written == a.length || a.req.Method == http.MethodHead || !a.bodyAllowed()
	return whole && stands && !a.closes
}

// append adds bytes to the buffer, and writes it when it is full.
func (a *answer) append(p []byte) {
	if a.out == nil {
		a.out, a.at = newBuffer()[:0], 0
	}
	if free := cap(a.out) - len(a.out); len(p) > free {
		a.out = append(a.out, p[:free]...)
		a.flush()
		if p = p[free:]; len(p) >= bufferSize {
			a.send(p)
			return
		}
		a.out, a.at = newBuffer()[:0], 0
	}
	a.out = append(a.out, p...)
}

// appendSize appends the line in front of a chunk of n bytes.
func (a *answer) appendSize(n int) {
	if cap(a.out)-len(a.out) < longestSize {
		a.flush()
		a.out, a.at = newBuffer()[:0], 0
	}
	a.out = append(strconv.AppendInt(a.out, int64(n), 16), crlf...)
}

// longestSize is the length of the line of the largest chunk.
const longestSize = 18

// flush writes the buffer and gives it back.
func (a *answer) flush() {
	if a.out == nil {
		return
	}
	a.send(a.out[a.at:])
	freeBuffer(a.out)
	a.out = nil
}

// send writes bytes to the connection.
func (a *answer) send(p []byte) {
	if a.err != nil || len(p) == 0 {
		return
	}
	if _, a.err = a.conn.nc.Write(p); a.err != nil {
		a.conn.leave()
	}
}

// inform writes an answer before the final one.
func (a *answer) inform(status int) {
	if status == http.StatusContinue {
		a.stopAsking()
	}
	b := a.appendStatus(newBuffer()[:0], status)
	for name, values := range a.header {
		if name != "Content-Length" && name != "Transfer-Encoding" {
			b = appendField(b, name, values)
		}
	}
	a.send(append(b, crlf...))
	freeBuffer(b)
}

// sendContinue writes 100 Continue, unless the answer has begun.
func (a *answer) sendContinue() {
	a.asking.Lock()
	defer a.asking.Unlock()
	if a.asked {
		a.asked = false
		_, _ = io.WriteString(a.conn.nc, "HTTP/1.1 100 Continue\r\n\r\n") // the next read finds the error
	}
}

// stopAsking prevents a later 100 Continue.
func (a *answer) stopAsking() {
	a.asking.Lock()
	defer a.asking.Unlock()
	a.asked = false
}

// Hijack implements http.Hijacker. The reader of the result has the bytes of the client that have been
// read. The connection counts as one of its new owner.
func (a *answer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c := a.conn
	if c.taken {
		return nil, nil, http.ErrHijacked
	}
	a.stopAsking()
	if a.status != 0 {
		if err := a.FlushError(); err != nil {
			return nil, nil, err
		}
	}
	c.unregister() // the new owner notices that the client leaves
	c.unwatch()
	c.endDeadlines(a)
	c.taken = true
	rest := bytes.Clone(c.buf[c.r:c.w])
	c.r = c.w
	c.release()
	in := bufio.NewReaderSize(io.MultiReader(bytes.NewReader(rest), c.nc), max(bufferSize, len(rest)))
	_, _ = in.Peek(len(rest)) // so that they are buffered
	return c.nc, bufio.NewReadWriter(in, bufio.NewWriterSize(c.nc, bufferSize)), nil
}

// errOver is the result of a use after the handler has returned.
var errOver = errors.New("the request has ended")

// SetReadDeadline is for http.ResponseController. It has no effect if the whole body has come.
// Safe for concurrent use.
func (a *answer) SetReadDeadline(t time.Time) error {
	c := a.conn
	c.timing.Lock()
	defer c.timing.Unlock()
	switch {
	case a.over:
		return errOver
	case t.IsZero() && !c.readTimed, !t.IsZero() && a.body.Whole():
		return nil
	}
	c.readTimed = !t.IsZero()
	return c.nc.SetReadDeadline(t)
}

// SetWriteDeadline is for http.ResponseController. Safe for concurrent use.
func (a *answer) SetWriteDeadline(t time.Time) error {
	c := a.conn
	c.timing.Lock()
	defer c.timing.Unlock()
	if a.over {
		return errOver
	}
	c.writeTimed = c.writeTimed || !t.IsZero()
	return c.nc.SetWriteDeadline(t)
}

// EnableFullDuplex is for http.ResponseController. The body can always be read after the answer has
// begun.
func (a *answer) EnableFullDuplex() error { return nil }
