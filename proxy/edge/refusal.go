package edge

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

const (
	// headSlack is how far a head may exceed server.max_header. net/http grants it
	// (server.go, initialReadLimitSize).
	headSlack = 4 << 10
	// libraryHeads is the size of a head up to which net/http and quic-go let the handler
	// answer, as a multiple of server.max_header. Their own 431 has no JSON.
	libraryHeads = 4
	// fieldOverhead is the size of a header field beyond its name and value (RFC 9113 6.5.2,
	// RFC 9114 4.2.2).
	fieldOverhead = 32
	// lingerLimit is how long a refused client may take to read the answer. net/http waits
	// as long (server.go, rstAvoidanceDelay).
	lingerLimit = 500 * time.Millisecond
)

// appendRefusal appends an answer over HTTP/1.1 from below net/http. It closes the connection.
func appendRefusal(dst []byte, e *openai.Error) []byte {
	body := e.AppendJSON(nil)
	dst = fmt.Appendf(dst, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nX-Request-Id: %s\r\nConnection: close\r\nContent-Length: %d\r\n",
		e.Status, http.StatusText(e.Status), downstream.RandomHex(16), len(body))
	if e.Status == http.StatusServiceUnavailable {
		dst = append(dst, "Retry-After: 1\r\n"...)
	}
	dst = append(dst, "\r\n"...)
	return append(dst, body...)
}

// ownRefusal returns the error of an answer with which net/http refuses a head by itself
// (server.go, conn.serve): plain text, or for 417 no body. It returns nil for other answers.
// No answer of a handler begins before the handler, so the caller asks only until then.
func ownRefusal(p []byte) *openai.Error {
	const begin = "HTTP/1.x "
	if len(p) < len(begin)+3 || !bytes.HasPrefix(p, []byte("HTTP/1.")) || p[len(begin)-1] != ' ' {
		return nil
	}
	status, err := strconv.Atoi(string(p[len(begin) : len(begin)+3]))
	if err != nil || status < 400 {
		return nil
	}
	why := ""
	line, _, _ := bytes.Cut(p, []byte("\r\n"))
	if _, text, ok := bytes.Cut(line, []byte(": ")); ok { // a constant of net/http, such as missing required Host header
		why = ": " + string(text)
	}
	return invalidHead(status, why)
}

// invalidHead refuses a head with that status. Why, the reason of a 400, may be empty.
func invalidHead(status int, why string) *openai.Error {
	e := openai.NewError(openai.CodeInvalidHead, "the head of the request is not valid HTTP"+why)
	e.Status = status
	switch status {
	case http.StatusExpectationFailed:
		e.Message = "the header Expect may only be 100-continue"
	case http.StatusNotImplemented:
		e.Message = "the header Transfer-Encoding may only be chunked"
	case http.StatusHTTPVersionNotSupported:
		e.Message = "this version of HTTP is not supported"
	}
	return e
}

func headTooLarge(limit int) *openai.Error {
	return openai.NewError(openai.CodeHeadTooLarge, fmt.Sprintf("the head of the request is larger than server.max_header, %d bytes", limit))
}

// errLine refuses a head whose lines two servers could divide in different ways.
var errLine = openai.NewError(openai.CodeInvalidHead, "a line in the head of the request begins with a space or a tab, or does not end in CR LF")

// errFraming refuses a request whose end two servers could see at different places.
var errFraming = openai.NewError(openai.CodeInvalidHead, "the head of the request does not give the length of the body clearly; see Content-Length and Transfer-Encoding")

// refuse sends an answer instead of that of net/http. Then refuse reads until the client has
// closed the connection, or until lingerLimit: the kernel drops the answer if bytes of the
// client are unread at Close. The caller is the goroutine of the connection in net/http.
func (c *framingConn) refuse(e *openai.Error) error {
	c.refused = true
	if _, err := c.Conn.Write(appendRefusal(nil, e)); err != nil {
		return err
	}
	if c.CloseWrite() == nil && c.Conn.SetReadDeadline(time.Now().Add(lingerLimit)) == nil {
		_, _ = io.Copy(io.Discard, c.Conn) // the connection ends in any case
	}
	return nil
}

// limitHeads refuses requests over HTTP/2 and HTTP/3 with a head above the limit, for which the
// libraries have a higher limit. framing limits the heads of HTTP/1.1.
func limitHeads(w http.ResponseWriter, r *http.Request, limit int) (refused bool) {
	size := len(r.Method) + len(r.Host) + len(r.RequestURI) + 4*fieldOverhead
	for name, values := range r.Header {
		for _, v := range values {
			size += len(name) + len(v) + fieldOverhead
		}
	}
	if size <= limit+headSlack {
		return false
	}
	id := downstream.RequestID(r)
	clear(r.Header) // a client that does not read the answer holds no memory
	w.Header().Set("X-Request-Id", id)
	downstream.Error(w, headTooLarge(limit))
	return true
}
